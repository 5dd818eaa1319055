"""The papers' tables and figures by name: experiment files at two scales, and figures."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fedfuse.core.words import suggest
from fedfuse.errors import ConfigError
from fedfuse.experiment.figures import Figure, all_figures, experiments_folder

Scale = Literal["cpu", "paper"]


@dataclass(frozen=True, slots=True)
class Reproducible:
    """Something of a paper that can be made again: an experiment file, or a figure."""

    name: str
    summary: str
    scales: tuple[str, ...]


def catalogue() -> list[Reproducible]:
    """Everything that can be reproduced, by name."""
    found: dict[str, list[Path]] = {}
    root = experiments_folder()
    for path in sorted(root.rglob("*.toml")):
        name, _, scale = path.stem.rpartition(".")
        if name and scale in ("cpu", "paper"):
            found.setdefault(f"{path.parent.relative_to(root)}/{name}", []).append(path)
    tables = [Reproducible(n, _comment(ps[0]), tuple(p.stem.rpartition(".")[2] for p in ps)) for n, ps in found.items()]
    return tables + [Reproducible(p.name, f"{p.summary} ({p.paper})", ("figure",)) for p in all_figures().values()]


def find(name: str, scale: Scale) -> Path | Figure:
    """The experiment file of a table at a scale, or a figure."""
    figures = all_figures()
    if name in figures:
        return figures[name]
    path = experiments_folder() / f"{name}.{scale}.toml"
    if not path.is_file():
        known = {r.name: r for r in catalogue()}
        if name in known:
            raise ConfigError(f"{name} exists at the scales {', '.join(known[name].scales)}, not {scale}")
        raise ConfigError(
            f"nothing to reproduce is called {name!r}{suggest(name, known)} `fedfuse reproduce` lists all"
        )
    return path


def _comment(path: Path) -> str:
    """A file's first comment says what it is."""
    first = path.read_text(encoding="utf-8").split("\n", 1)[0]
    return first.removeprefix("#").strip() if first.startswith("#") else ""

"""Every experiment file that is shipped is sound, whether its data are on this machine or not."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fedfuse.data import load, outline
from fedfuse.data.rows import Dataset
from fedfuse.experiment.config import load_experiments
from fedfuse.experiment.prepare import prepare

FOLDER = Path(__file__).parents[2] / "experiments"
FILES = sorted(path for path in FOLDER.rglob("*.toml") if path.name != "claims.toml")  # the register is none


def form(source: str, *, options: Mapping[str, Any] | None = None, **limits: Any) -> Dataset:
    if source == "experiments.held_out:rows":  # training rows alone, of the set that it is told
        source = (options or {}).get("source", "fashion-mnist")
    return load(source, **limits) if source == "digits" else outline(source, **limits)


def test_every_family_says_how_to_run_its_files() -> None:
    for folder in {path.parent for path in FILES}:
        assert (folder / "README.md").is_file(), f"experiments/{folder.name} has no README"


@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_every_file_is_sound(path: Path) -> None:
    assert path.name.endswith((".cpu.toml", ".paper.toml"))
    assert path.read_text(encoding="utf-8").startswith("# "), "the first line says which table or figure it is"
    for cell in load_experiments(path):
        prepare(cell.model_copy(update={"seeds": cell.seeds[:1]}), form).check()

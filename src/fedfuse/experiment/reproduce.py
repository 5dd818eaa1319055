"""The papers' tables and figures by name, and their claims: made again, stored, and judged.

An experiment file NAME.SCALE.toml makes a table. What it came to is stored in a few kilobytes (`store_result`), and
every claim of `claims.toml` is judged by what is stored (`all_findings`).
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from fedfuse.core.settings import validate_settings
from fedfuse.errors import ConfigError, FuseError, suggest
from fedfuse.experiment.callbacks import Callback
from fedfuse.experiment.jobs import Job, jobs_of, run_jobs
from fedfuse.experiment.rundir import RunFolder
from fedfuse.report.claims import (
    Claim,
    Finding,
    Pair,
    StoredResult,
    collect_result,
    digest_of,
    judge_all,
    read_result,
    read_results,
    result_path,
    write_result,
)
from fedfuse.report.reproduction import fill_tables

Scale = Literal["cpu", "paper"]
SCALES: tuple[Scale, ...] = ("cpu", "paper")


def experiments_folder() -> Path:
    """Where experiment files and figures are: $FEDFUSE_EXPERIMENTS, ./experiments, or next to the source.

    Raises:
        ConfigError: if there is no such folder.
    """
    named = os.environ.get("FEDFUSE_EXPERIMENTS")
    folders = [Path(named)] if named else [Path("experiments"), Path(__file__).resolve().parents[3] / "experiments"]
    for folder in folders:
        if folder.is_dir():
            return folder
    raise ConfigError(f"there is no folder of experiments at {folders[0]}; set FEDFUSE_EXPERIMENTS to it")


def results_folder() -> Path:
    """Where stored results are."""
    return experiments_folder() / "results"


def file_digests(scale: str = "cpu") -> dict[str, str]:
    """The digest of every experiment file of a scale, by name."""
    root, end = experiments_folder(), f".{scale}.toml"
    return {
        path.relative_to(root).as_posix().removesuffix(end): digest_of(path) for path in sorted(root.rglob(f"*{end}"))
    }


def known_results(scale: str = "cpu", runs: Path | None = None) -> dict[str, StoredResult]:
    """Stored results by name, and what run directories hold of files that have none.

    Args:
        scale: cpu or paper.
        runs: the folder in which `fedfuse reproduce NAME` puts its runs.
    """
    found = read_results(results_folder(), scale)
    for name, digest in file_digests(scale).items():
        folder = runs / name if runs else None
        if name not in found and folder is not None and any(folder.glob("**/ledger.jsonl")):
            found[name] = collect_result(name, scale, digest, folder)
    return found


Draw = Callable[[Path], list[Path]]


@dataclass(frozen=True, slots=True)
class PaperFigure:
    """A figure: its name, whose it is, and how to draw it into a folder."""

    name: str
    paper: str
    draw: Draw

    @property
    def summary(self) -> str:
        """The first sentence of its documentation."""
        return (self.draw.__doc__ or "").strip().split("\n")[0]


_FIGURES: dict[str, PaperFigure] = {}


def figure(name: str, *, paper: str) -> Callable[[Draw], Draw]:
    """Register a function that draws a figure into a folder and returns the files it wrote."""

    def register(draw: Draw) -> Draw:
        _FIGURES[name] = PaperFigure(name, paper, draw)
        return draw

    return register


def all_figures() -> Mapping[str, PaperFigure]:
    """Every figure by name."""
    for path in sorted((experiments_folder() / "figures").glob("*.py")):
        load_figures(path)
    return dict(sorted(_FIGURES.items()))


def load_figures(path: Path) -> ModuleType:
    """A file of figures as a module, loaded once."""
    name = f"fedfuse_figures_{path.stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise ConfigError(f"{path} is no file of figures")
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


State = Literal["stored", "in part", "older", ""]


@dataclass(frozen=True, slots=True)
class Reproducible:
    """Something of a paper that can be made again: an experiment file, or a figure.

    Attributes:
        name: what to ask for.
        summary: what it is.
        scales: at which there is a file; "figure" for a figure.
        result: whether the first of them has a stored result: of all of it, of a part, of an older text, or none.
    """

    name: str
    summary: str
    scales: tuple[str, ...]
    result: State = ""


def catalogue() -> list[Reproducible]:
    """Everything that can be reproduced, by name."""
    found: dict[str, list[Path]] = {}
    root = experiments_folder()
    for path in sorted(root.rglob("*.toml")):
        name, _, scale = path.stem.rpartition(".")
        if name and scale in ("cpu", "paper"):
            found.setdefault(f"{path.parent.relative_to(root)}/{name}", []).append(path)
    states: dict[str, dict[str, State]] = {scale: stored_states(scale) for scale in SCALES}
    tables = []
    for name, paths in found.items():
        scales = tuple(path.stem.rpartition(".")[2] for path in paths)
        tables.append(Reproducible(name, _comment(paths[0]), scales, states[scales[0]].get(name, "")))
    return tables + [
        Reproducible(p.name, f"{p.summary} ({p.paper})", ("figure",), states["cpu"].get(p.name, ""))
        for p in all_figures().values()
    ]


def stored_states(scale: str) -> dict[str, State]:
    """What stored results are of, by name: all of an experiment file's present text, a part of it, or an older text."""
    digests, states = file_digests(scale), dict[str, State]()
    for name, result in known_results(scale).items():
        older = digests.get(name, result.digest) != result.digest
        states[name] = "older" if older else "in part" if result.unfinished else "stored"
    return states


def _comment(path: Path) -> str:
    """The first sentence of the comment at a file's head says what it is."""
    lines = takewhile(lambda line: line.startswith("#"), path.read_text(encoding="utf-8").splitlines())
    first, stop, _ = " ".join(line.removeprefix("#").strip() for line in lines).partition(". ")
    return first + stop.strip()


def find(name: str, scale: Scale) -> Path | PaperFigure:
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


def load_claims(path: Path | None = None) -> list[Claim]:
    """Every claim of the register, in its order.

    Raises:
        ConfigError: one sentence about the first thing that is wrong, with the claim's place in the file.
    """
    path = path or experiments_folder() / "claims.toml"
    found: dict[str, Claim] = {}
    for at, values in enumerate(_read_tables(path), start=1):
        where = f"{path.name}, claim {at} ({values.get('id', 'without id')})"
        try:
            claim = validate_settings(Claim, values)
        except ConfigError as why:
            raise ConfigError(f"{where}: {why}") from why
        if claim.id in found:
            raise ConfigError(f"{where}: the id stands above already; give every claim a name of its own")
        if claim.file:
            scales = [scale for scale in SCALES if (path.parent / f"{claim.file}.{scale}.toml").is_file()]
            if not scales:
                raise ConfigError(f"{where}: there is no experiment {claim.file}.cpu.toml beside the register")
            claim = claim.model_copy(update={"scale": scales[0]})
        found[claim.id] = claim
    return list(found.values())


def _read_tables(path: Path) -> list[dict[str, Any]]:
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as why:
        raise ConfigError(f"{path} cannot be read: {why}; expected a TOML file with [[claims]]") from why
    tables = values.pop("claims", None)
    if values or not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ConfigError(f"{path} has {', '.join(values) or 'no claims'}; expected [[claims]] tables and nothing else")
    return tables


def all_findings(scale: str = "cpu", runs: Path | None = None, claims: Sequence[Claim] | None = None) -> list[Finding]:
    """The verdict on every claim of the register, by stored results and run directories."""
    return judge_all(claims or load_claims(), known_results(scale, runs), file_digests(scale))


def never_run() -> list[str]:
    """Experiment files without a stored result, with their scale."""
    return [
        f"{name}.{scale}"
        for scale in SCALES
        for name in file_digests(scale)
        if not result_path(name, scale, results_folder()).exists()
    ]


def fill_documents() -> dict[Path, str]:
    """The documents of experiments and of docs/, with their marked parts as stored results have them."""
    results, missing, root = known_results(), never_run(), experiments_folder()
    paths = sorted([*root.rglob("*.md"), *(root.parent / "docs").glob("*.md")])
    return {path: fill_tables(path.read_text(encoding="utf-8"), results, missing) for path in paths}


def missing_names(scale: Scale) -> list[str]:
    """Experiment files without a stored result of their present text; those that claims name come first."""
    states, files = stored_states(scale), file_digests(scale)
    claimed = [claim.file for claim in load_claims() if claim.file]
    names = [name for name in dict.fromkeys([*claimed, *files]) if name in files]
    return [name for name in names if states.get(name) != "stored"]


def run_missing(
    scale: Scale,
    hours: float | None = None,
    *,
    out: Path = Path("runs"),
    workers: int | None = None,
    progress: bool = False,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Attempt]:
    """Run every experiment file that has no stored result, store what is finished, and say what became of each.

    A killed or stopped run is continued by the next call; clients' updates come from the memo where they were trained
    before. After so many hours nothing new is begun, and what runs stops at the end of its round.
    """
    deadline = _Deadline(None if hours is None else clock() + 3600 * hours, clock)
    for name in missing_names(scale):
        if deadline.is_over():
            yield Attempt(name, "not begun")
            continue
        folder = out / name if scale == "cpu" else out / scale / name
        file = experiments_folder() / f"{name}.{scale}.toml"
        try:
            run_jobs(file, out=folder, resume=True, workers=workers, progress=progress, callbacks=[deadline])
            yield Attempt(name, "stored", str(store_result(name, scale, folder)))
        except OutOfTimeError as why:
            yield Attempt(name, "stopped", str(why))
        except FuseError as why:
            yield Attempt(name, "failed", str(why))


@dataclass(frozen=True, slots=True)
class Attempt:
    """One experiment file of many: what became of it."""

    name: str
    outcome: Literal["stored", "stopped", "failed", "not begun"]
    why: str = ""


class OutOfTimeError(FuseError):
    """The hours that were given are over; what was done is kept."""


class _Deadline(Callback):
    """Stops a run after the round in which time ran out: its checkpoint is written by then."""

    def __init__(self, end: float | None, clock: Callable[[], float]) -> None:
        self.end, self.clock = end, clock

    def is_over(self) -> bool:
        return self.end is not None and self.clock() >= self.end

    def round_done(self, label: str, seed: int, round_: int, _: Mapping[str, Any]) -> None:
        if self.is_over():
            raise OutOfTimeError(f"time is over in {label}, seed {seed}, round {round_}")


def store_result(name: str, scale: Scale, folder: Path, partial: bool = False) -> Path:
    """Store what run directories of an experiment file came to, in a few kilobytes next to the files.

    Args:
        name: of the experiment file, without its scale.
        scale: cpu or paper.
        folder: where it was run.
        partial: store the methods and seeds that are finished, and the names of experiments that are not.

    Raises:
        ConfigError: if there is no run, or it was not finished.
    """
    file = find(name, scale)
    if not isinstance(file, Path):  # a figure, which writes its numbers beside its picture
        path = result_path(name, "cpu", folder)
        if not path.is_file():
            raise ConfigError(
                f"there are no numbers of the figure {name} in {folder}; fedfuse reproduce {name} draws it"
            )
        return write_result(read_result(path), results_folder())
    jobs = jobs_of(file, out=folder)
    done = {job.experiment.name: _finished_pairs(job) for job in jobs.each}
    asked = {job.experiment.name: job.method_runs for job in jobs.each}
    unfinished = {run: pairs for run, pairs in done.items() if len(pairs) < asked[run]}
    if unfinished and not (partial and any(done.values())):
        some = ", ".join(list(unfinished)[:3]) + (", …" if len(unfinished) > 3 else "")
        raise ConfigError(
            f"{name} is not finished in {folder}: {some}; "
            f"continue with: fedfuse reproduce {name} --scale {scale} --out {folder} --resume"
        )
    result = collect_result(name, scale, file_digests(scale)[name], folder, unfinished)
    return write_result(result, results_folder())


def _finished_pairs(job: Job) -> set[Pair]:
    """The labels and seeds of an experiment that have left their last model in its directory."""
    run, experiment = RunFolder(job.folder), job.experiment
    pairs = {(label, seed) for label in experiment.recipes() for seed in experiment.seeds}
    return {(label, seed) for label, seed in pairs if run.model(label, seed).exists()}

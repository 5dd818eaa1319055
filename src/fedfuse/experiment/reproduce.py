"""The papers' tables and figures by name, at two scales: one of them, or all that have no stored result."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal

from fedfuse.core.words import suggest
from fedfuse.errors import ConfigError, FuseError
from fedfuse.experiment.claims import SCALES, Scale, file_digests, known_results, load_claims, results_folder
from fedfuse.experiment.figures import PaperFigure, all_figures, experiments_folder
from fedfuse.experiment.folder import RunFolder
from fedfuse.experiment.jobs import Job, jobs_of, run_jobs
from fedfuse.experiment.watch import Callback
from fedfuse.report.stored import Pair, StoredResult, collect_result, read_result, result_path, write_result

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
    digests = file_digests(scale)
    return {name: _state(result, digests.get(name, "")) for name, result in known_results(scale).items()}


def _state(result: StoredResult, digest: str) -> State:
    if digest and result.digest != digest:
        return "older"
    return "in part" if result.unfinished else "stored"


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


def _comment(path: Path) -> str:
    """The first sentence of the comment at a file's head says what it is."""
    lines = takewhile(lambda line: line.startswith("#"), path.read_text(encoding="utf-8").splitlines())
    first, stop, _ = " ".join(line.removeprefix("#").strip() for line in lines).partition(". ")
    return first + stop.strip()


def missing_names(scale: Scale) -> list[str]:
    """Experiment files without a stored result of their present text; those that claims name come first."""
    states, files = stored_states(scale), file_digests(scale)
    claimed = [claim.file for claim in load_claims() if claim.file]
    names = [name for name in dict.fromkeys([*claimed, *files]) if name in files]
    return [name for name in names if states.get(name) != "stored"]


def store_result(name: str, scale: Scale, folder: Path, partial: bool = False) -> Path:
    """Store what run directories of an experiment file came to, in a few kilobytes beside the files.

    Args:
        name: of the experiment file, without its scale.
        scale: cpu or paper.
        folder: where it was run.
        partial: store the methods and seeds that are finished, and the names of experiments that are not.

    Raises:
        ConfigError: if there is no run, or it was not finished.
    """
    file = find(name, scale)
    if not isinstance(file, Path):
        return _store_numbers(name, folder)
    jobs = jobs_of(file, out=folder)
    done = {job.experiment.name: _finished_pairs(job) for job in jobs.each}
    asked = {job.experiment.name: len(job.experiment.methods) * len(job.experiment.seeds) for job in jobs.each}
    unfinished = {run: pairs for run, pairs in done.items() if len(pairs) < asked[run]}
    if unfinished and not (partial and any(done.values())):
        some = list(unfinished)
        raise ConfigError(
            f"{name} is not finished in {folder}: {', '.join(some[:3])}{', …' if len(some) > 3 else ''}; "
            f"continue with: fedfuse reproduce {name} --scale {scale} --out {folder} --resume"
        )
    result = collect_result(name, scale, file_digests(scale)[name], folder, unfinished)
    return write_result(result, results_folder())


def _store_numbers(name: str, folder: Path) -> Path:
    """Store the numbers that a figure wrote beside its picture."""
    path = result_path(name, "cpu", folder)
    if not path.is_file():
        raise ConfigError(f"there are no numbers of the figure {name} in {folder}; fedfuse reproduce {name} draws it")
    return write_result(read_result(path), results_folder())


def _finished_pairs(job: Job) -> set[Pair]:
    """The labels and seeds of an experiment that have left their last model in its directory."""
    run, experiment = RunFolder(job.folder), job.experiment
    pairs = {(label, seed) for label in experiment.recipes() for seed in experiment.seeds}
    return {(label, seed) for label, seed in pairs if run.model(label, seed).exists()}


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


@dataclass(frozen=True, slots=True)
class Attempt:
    """One experiment file of many: what became of it."""

    name: str
    outcome: Literal["stored", "stopped", "failed", "not begun"]
    why: str = ""


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

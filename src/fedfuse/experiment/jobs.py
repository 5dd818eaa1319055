"""An experiment file as jobs: its one experiment, or every one its sweep stands for, each with its folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedfuse.core.files import cache_folder
from fedfuse.errors import ConfigError
from fedfuse.experiment.callbacks import Callback, Several, Watcher
from fedfuse.experiment.config import Experiment, file_name, load_experiments, make_experiments, read_values
from fedfuse.experiment.results import Results
from fedfuse.report.read import find_runs, read_run

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, slots=True)
class Job:
    """One experiment, where it goes, and whether it goes on with what is there."""

    experiment: Experiment
    folder: Path
    resume: bool


@dataclass(frozen=True, slots=True)
class Jobs:
    """All that a file asks for; the experiments of a sweep lie side by side in one folder."""

    name: str
    folder: Path
    each: tuple[Job, ...]

    def merge_results(self, done: Sequence[Results]) -> Results:
        """The jobs' results as one."""
        return Results(self.name, self.folder, tuple(row for results in done for row in results.rows))


def jobs_of(
    source: Path | Mapping[str, Any], sets: Sequence[str] = (), out: Path | None = None, resume: bool = False
) -> Jobs:
    """What a file or a table of values asks for.

    By default it goes to a new folder in `runs`, or goes on in the last one of its name.

    Raises:
        ConfigError: one sentence about the first thing that is wrong.
    """
    cells = load_experiments(source, sets) if isinstance(source, Path) else make_experiments(source, sets)
    whole = source.stem if isinstance(source, Path) else str(source.get("name", "experiment"))
    name = cells[0].name if len(cells) == 1 else whole
    base = out or run_folder(name, resume)
    if len(cells) == 1:
        return Jobs(name, base, (Job(cells[0], base, resume),))
    folders = [(cell, base / file_name(cell.name)) for cell in cells]
    return Jobs(
        name, base, tuple(Job(c, folder, resume and (folder / "config.toml").exists()) for c, folder in folders)
    )


def run_jobs(
    source: Path | Mapping[str, Any],
    *,
    model: nn.Module | None = None,
    data: Any = None,
    sets: Sequence[str] = (),
    out: Path | None = None,
    resume: bool = False,
    workers: int | None = None,
    memo: bool = True,
    progress: bool = False,
    callbacks: Sequence[Watcher] = (),
) -> Results:
    """Run all that a file or a table of values asks for, with a network and data that may come as objects."""
    from fedfuse.experiment.callbacks import show_progress
    from fedfuse.experiment.prepare import GivenObjects
    from fedfuse.experiment.run import execute  # late: they bring torch

    given = GivenObjects.of(model, data)
    if given.settings:
        values = {"name": source.stem} | read_values(source) if isinstance(source, Path) else source
        source = given.replace_names(values)
    jobs, store = jobs_of(source, sets, out, resume), memo_folder() if memo else None
    done = []
    for job in jobs.each:
        what = job.experiment
        shown = show_progress(len(what.methods) * len(what.seeds), what.name) if progress else nullcontext(Callback())
        with shown as watch:
            several = Several(watch, *callbacks)
            done.append(
                execute(what, job.folder, resume=job.resume, workers=workers, memo=store, watch=several, given=given)
            )
    return jobs.merge_results(done)


def load_results(folder: Path) -> Results:
    """The results of a run directory, or of a sweep's folder with one in each of its folders.

    Raises:
        ConfigError: if neither holds any.
    """
    runs = [read_run(path) for path in find_runs([folder])]
    return Results(folder.name, folder, tuple({"experiment": run.name, **row} for run in runs for row in run.rows))


def run_folder(name: str, resume: bool = False, parent: Path = Path("runs")) -> Path:
    """The first of NAME, NAME-2, NAME-3, … that is not there yet; to resume, the last one that is."""
    path, number, last = parent / file_name(name), 1, None
    while path.exists():
        path, number, last = parent / f"{file_name(name)}-{number + 1}", number + 1, path
    if resume and last is None:
        raise ConfigError(f"there is no run called {name!r} in {parent} to resume; name its directory with --out DIR")
    return last if resume and last is not None else path


def memo_folder() -> Path:
    """Where trained updates are kept for reuse by later runs."""
    return cache_folder() / "memo"

"""An experiment file as jobs, run one after another: its one experiment, or every one that its sweep stands for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedfuse.core.files import cache_folder
from fedfuse.errors import ConfigError
from fedfuse.experiment.callbacks import Callback, Several, show_progress
from fedfuse.experiment.config import Experiment, file_name, load_experiments, make_experiments, read_values
from fedfuse.experiment.results import Results
from fedfuse.report.read import find_runs, read_run

if TYPE_CHECKING:
    from torch import nn

    from fedfuse.experiment.prepare import GivenObjects


@dataclass(frozen=True, slots=True)
class Job:
    """One experiment, where it goes, and whether it goes on with what is there."""

    experiment: Experiment
    folder: Path
    resume: bool

    @property
    def method_runs(self) -> int:
        """Methods × seeds."""
        return len(self.experiment.methods) * len(self.experiment.seeds)


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
    if len(cells) == 1:
        base = out or run_folder(cells[0].name, resume)
        return Jobs(cells[0].name, base, (Job(cells[0], base, resume),))
    name = source.stem if isinstance(source, Path) else str(source.get("name", "experiment"))
    base = out or run_folder(name, resume)
    folders = [base / file_name(cell.name) for cell in cells]
    # of a sweep that was stopped, the experiments that had not begun start as new ones
    begun = [resume and (folder / "config.toml").exists() for folder in folders]
    return Jobs(name, base, tuple(map(Job, cells, folders, begun)))


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


def run_each(
    jobs: Jobs,
    *,
    show: Callable[[Job], AbstractContextManager[Callback]] = lambda _: nullcontext(Callback()),
    callbacks: Sequence[Callback] = (),
    workers: int | None = None,
    memo: bool = True,
    given: GivenObjects | None = None,
    announce: Callable[[Mapping[str, float]], None] | None = None,
) -> Iterator[Results]:
    """Run jobs one after another and yield the results of each as it ends; all commands and functions run them here.

    Args:
        jobs: what to run.
        show: opens what shows a job's progress.
        callbacks: called as every job makes progress.
        workers: worker processes; 0 trains in this one, by default there is one per core.
        memo: reuse updates trained before under the same conditions.
        given: a network and data that came as objects.
        announce: called before a job is trained with the seconds each of its methods may take, by label.
    """
    from fedfuse.experiment.run import execute  # late: it brings torch

    options: dict[str, Any] = {"workers": workers, "memo": memo_folder() if memo else None, "given": given}
    for job in jobs.each:
        with show(job) as shown:
            watch = Several(shown, *callbacks)
            results = execute(job.experiment, job.folder, resume=job.resume, watch=watch, announce=announce, **options)
        yield results


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
    callbacks: Sequence[Callback] = (),
) -> Results:
    """Run all that a file or a table of values asks for, with a network and data that may come as objects."""
    from fedfuse.experiment.prepare import GivenObjects  # late: it brings torch

    given = GivenObjects.of(model, data)
    if given.settings:
        values = {"name": source.stem} | read_values(source) if isinstance(source, Path) else source
        source = given.replace_names(values)
    jobs, options = jobs_of(source, sets, out, resume), dict[str, Any]()
    if progress:
        options["show"] = lambda job: show_progress(job.method_runs, job.experiment.name)
    done = run_each(jobs, callbacks=callbacks, workers=workers, memo=memo, given=given, **options)
    return jobs.merge_results(list(done))


def load_results(folder: Path) -> Results:
    """The results of a run directory, or of a sweep's folder with one in each of its folders.

    Raises:
        ConfigError: if neither holds any.
    """
    runs = [read_run(path) for path in find_runs([folder])]
    return Results(folder.name, folder, tuple({"experiment": run.name, **row} for run in runs for row in run.rows))

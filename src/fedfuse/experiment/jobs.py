"""An experiment file as jobs: its one experiment, or every one its sweep stands for, each with its folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fedfuse.data import cache_folder
from fedfuse.errors import ConfigError
from fedfuse.experiment.config import Experiment, file_name, load_experiments
from fedfuse.experiment.execute import Results, execute, free_folder
from fedfuse.report.read import read_run


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

    def together(self, done: Sequence[Results]) -> Results:
        """The jobs' results as one."""
        return Results(self.name, self.folder, tuple(row for results in done for row in results.rows))


def jobs_of(file: Path, sets: Sequence[str] = (), out: Path | None = None, resume: bool = False) -> Jobs:
    """What a file asks for; by default it goes to a new folder in `runs`.

    Raises:
        ConfigError: one sentence about the first thing that is wrong.
    """
    cells = load_experiments(file, sets)
    if resume and out is None:
        raise ConfigError("--resume needs the run directory: add --out DIR")
    name = cells[0].name if len(cells) == 1 else file.stem
    base = out or free_folder(Path("runs"), name)
    if len(cells) == 1:
        return Jobs(name, base, (Job(cells[0], base, resume),))
    places = [(cell, base / file_name(cell.name)) for cell in cells]
    return Jobs(name, base, tuple(Job(c, place, resume and (place / "config.toml").exists()) for c, place in places))


def run_file(
    file: Path,
    *,
    sets: Sequence[str] = (),
    out: Path | None = None,
    resume: bool = False,
    workers: int | None = None,
    memo: bool = True,
) -> Results:
    """Run all that a file asks for, quietly."""
    jobs = jobs_of(file, sets, out, resume)
    store = memo_folder() if memo else None
    done = [execute(j.experiment, j.folder, resume=j.resume, workers=workers, memo=store) for j in jobs.each]
    return jobs.together(done)


def load_results(folder: Path) -> Results:
    """The results of a run directory, or of a sweep's folder with one in each of its folders.

    Raises:
        ConfigError: if neither holds any.
    """
    found = [folder] if (folder / "ledger.jsonl").exists() else sorted(p.parent for p in folder.glob("*/ledger.jsonl"))
    if not found:
        raise ConfigError(f"{folder} holds no run; expected a directory that `fedfuse run` has written")
    runs = [read_run(place) for place in found]
    return Results(folder.name, folder, tuple({"experiment": run.name, **row} for run in runs for row in run.rows))


def memo_folder() -> Path:
    """Where trained updates are kept for reuse by later runs."""
    return cache_folder() / "memo"

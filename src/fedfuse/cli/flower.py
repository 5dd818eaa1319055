"""The command `fedfuse flower`: an experiment as a Flower app, or on Flower's simulation engine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from fedfuse.cli import console
from fedfuse.cli.options import Json, Sets, typer

if TYPE_CHECKING:
    from fedfuse.experiment.config import Experiment


def flower(
    file: Annotated[Path, typer.Argument()],
    sets: Sets = None,
    folder: Annotated[Path | None, typer.Option("--app", help="Where to write the app; by default NAME-app.")] = None,
    run: Annotated[bool, typer.Option("--run", help="Run it on Flower's simulation engine instead.")] = False,
    out: Annotated[Path | None, typer.Option(help="With --run, the run directory; by default runs/NAME.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="With --run, go on with what is there.")] = False,
    deadline: Annotated[
        float | None, typer.Option(min=0.1, help="With --run, seconds a round may take; by default as FILE says.")
    ] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="With --run, clients that train at a time.")] = None,
    as_json: Json = False,
) -> None:
    """Write a Flower app for an experiment, ready for `flwr run`, or run it on Flower's simulation engine.

    FILE is an experiment, a TOML file.
    """
    from fedfuse.experiment.config import load_experiment

    experiment = load_experiment(file, sets or [])
    from fedfuse.flower.version import need_flower  # late: torch and Flower, once the file is sound

    need_flower()
    if run:
        _simulate(experiment, out, resume, deadline, workers, as_json)
    else:
        _write(experiment, folder or Path(f"{experiment.name}-app"), as_json)


def _write(experiment: Experiment, folder: Path, as_json: bool) -> None:
    from fedfuse.flower.app import write_app

    files = [str(path) for path in write_app(experiment, folder)]
    if as_json:
        console.say_json({"app": str(folder), "files": files})
        return
    console.say(f"{folder}: {len(files)} files; run it with: flwr run {folder} SUPERLINK --stream")


def _simulate(
    experiment: Experiment, out: Path | None, resume: bool, deadline: float | None, workers: int | None, as_json: bool
) -> None:
    from fedfuse.experiment.jobs import run_folder
    from fedfuse.flower.run import simulate
    from fedfuse.report import rich_table, summary

    folder = out or run_folder(experiment.name, resume)
    with console.watcher(len(experiment.methods) * len(experiment.seeds), experiment.name) as watch:
        done = simulate(experiment, folder, resume=resume, deadline=deadline, workers=workers, watch=watch)
    if as_json:
        console.say_json(console.results_json(done, folder / "report.html"))
        return
    console.out.print(rich_table(summary(done.rows), experiment.name, console.out.width))
    console.say(f"files: {folder}   page: {folder / 'report.html'}")

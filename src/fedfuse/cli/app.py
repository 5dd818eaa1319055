"""The command line: parse, call, print."""

from __future__ import annotations

import json
import os
import shlex
import sys
import warnings
from importlib import metadata
from importlib.resources import files as resources
from pathlib import Path
from typing import Annotated, Any

from fedfuse.cli import console, files, flower
from fedfuse.cli.options import Json, Sets, Workers
from fedfuse.errors import ConfigError, FuseError

with warnings.catch_warnings():  # typer imports what click will drop in its next version; that is between them
    warnings.simplefilter("ignore", DeprecationWarning)
    import typer

app = typer.Typer(
    help="Fuse models trained apart, on data that may not meet, into one model.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _version(asked: bool) -> None:
    if asked:
        console.say(f"fedfuse {metadata.version('fedfuse')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Say which.")] = False,
) -> None:
    """Fuse models trained apart, on data that may not meet, into one model."""


@app.command()
def demo(
    out: Annotated[Path | None, typer.Option(help="Run directory.")] = None,
    workers: Workers = None,
    as_json: Json = False,
) -> None:
    """Compare several methods on bundled digits: offline, about a minute, with a page to open at the end."""
    path = Path(str(resources("fedfuse.experiment") / "demo.toml"))
    _run(path, [], out, resume=False, workers=workers, memo=False, as_json=as_json, page=True)


@app.command()
def run(
    file: Annotated[Path, typer.Argument()],
    sets: Sets = None,
    out: Annotated[Path | None, typer.Option(help="Run directory; by default runs/NAME.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with what is in the run directory.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Check everything, train nothing.")] = False,
    workers: Workers = None,
    memo: Annotated[bool, typer.Option(help="Reuse updates trained before under the same conditions.")] = True,
    page: Annotated[bool, typer.Option(help="Write report.html at the end.")] = True,
    as_json: Json = False,
) -> None:
    """Run an experiment: every method, every seed, every round, recorded as it happens.

    FILE is a TOML file that says what to run.
    """
    if check:
        _check(file, sets or [], as_json)
        return
    _run(file, sets or [], out, resume=resume, workers=workers, memo=memo, as_json=as_json, page=page)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument()],
    output: Annotated[Path, typer.Option("-o", "--output", help="Where to write the page.")] = Path("report.html"),
    as_json: Json = False,
) -> None:
    """Make one self-contained page of one run or several: tables, curves, heat maps.

    RUNS are run directories.
    """
    from fedfuse.report import write_page

    path = write_page(runs, output)
    console.say_json({"page": str(path)}) if as_json else console.say(f"page: {path}")


@app.command()
def methods(name: Annotated[str | None, typer.Argument()] = None, as_json: Json = False) -> None:
    """List all methods, or say what one does: its options, what clients send and reveal, its paper.

    NAME is the method to tell about.
    """
    from fedfuse.core.catalogue import list_catalogue
    from fedfuse.core.words import suggest

    entries = {entry["name"]: entry for entry in list_catalogue()}
    if name is not None and name not in entries:
        raise ConfigError(f"there is no method {name!r}{suggest(name, entries)} `fedfuse methods` lists them all")
    if as_json:
        chosen = list(entries.values()) if name is None else [entries[name]]
        console.say_json([{key: entry[key] for key in entry if key != "text"} for entry in chosen])
    elif name is not None:
        _show_method(entries[name], entries[name]["text"])
    else:
        rows = [(entry["name"], entry["summary"], entry["paper"]) for entry in entries.values()]
        console.table("", ("method", "what it does", "paper"), rows, right=9)


@app.command()
def partition(
    file: Annotated[Path, typer.Argument()],
    sets: Sets = None,
    output: Annotated[Path, typer.Option("-o", "--output", help="Where to write the picture.")] = Path("partition.png"),
    seed: Annotated[int | None, typer.Option(help="Which seed; by default the file's first.")] = None,
    as_json: Json = False,
) -> None:
    """Show who holds what: a heat map in the terminal and as a picture.

    FILE is an experiment, a TOML file.
    """
    from fedfuse.data import heat_map, save_heat_map
    from fedfuse.experiment.config import load_experiment
    from fedfuse.experiment.prepare import prepare

    experiment = load_experiment(file, sets or [])
    prepared = prepare(experiment)
    setting = prepared.setting(experiment.seeds[0] if seed is None else seed)
    classes = prepared.dataset.classes
    counts = setting.partition.counts(prepared.dataset.train.y, len(classes))
    clients = list(setting.partition.clients)
    save_heat_map(output, counts, clients, classes)
    if as_json:
        console.say_json({"clients": dict(zip(clients, counts.tolist(), strict=True)), "picture": str(output)})
        return
    console.out.print(heat_map(counts, clients, classes))
    console.say(f"picture: {output}")


@app.command()
def reproduce(
    name: Annotated[str | None, typer.Argument()] = None,
    scale: Annotated[str, typer.Option(help="cpu: minutes on a laptop. paper: as published.")] = "cpu",
    sets: Sets = None,
    out: Annotated[Path | None, typer.Option(help="Where to put what is made; by default runs/NAME.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with what is there.")] = False,
    workers: Workers = None,
    as_json: Json = False,
) -> None:
    """Make the papers' tables and figures again.

    NAME is a table or a figure; without one, all are listed.
    """
    from fedfuse.experiment.reproduce import catalogue, find

    if name is None:
        rows = [(r.name, ", ".join(r.scales), r.summary) for r in catalogue()]
        if as_json:
            console.say_json([{"name": n, "scales": s.split(", "), "summary": t} for n, s, t in rows])
        else:
            console.table("", ("name", "scales", "what it is"), rows, right=9)
        return
    if scale not in ("cpu", "paper"):
        raise ConfigError(f"--scale is {scale!r}, expected cpu or paper")
    found = find(name, scale)  # type: ignore[arg-type]
    place = out or Path("runs") / name
    if isinstance(found, Path):
        _run(found, sets or [], place, resume=resume, workers=workers, memo=True, as_json=as_json, page=True)
        return
    place.mkdir(parents=True, exist_ok=True)
    files_made = [str(p) for p in found.draw(place)]
    console.say_json({"files": files_made}) if as_json else console.say("\n".join(files_made))


for command in (files.evaluate, files.update, files.fuse, flower.flower):
    app.command()(command)


@app.command()
def doctor(as_json: Json = False) -> None:
    """Say what is installed, which data are found, and how much room there is."""
    from fedfuse.experiment.doctor import examine

    findings = examine()
    if as_json:
        console.say_json(findings)
        return
    for title, facts in findings.items():
        console.table(title, ("", ""), facts.items(), right=9)
        console.say("")


def _check(file: Path, sets: list[str], as_json: bool) -> None:
    from fedfuse.data import load_or_outline
    from fedfuse.experiment.config import load_experiments
    from fedfuse.experiment.prepare import prepare

    cells = load_experiments(file, sets)
    blank: dict[str, None] = {}
    for cell in cells:
        prepared = prepare(cell, load_or_outline)
        prepared.check()
        if "outline" in prepared.dataset.facts:
            blank[prepared.dataset.name] = None
    if as_json:
        facts = [{"name": c.name, "methods": list(c.recipes()), "seeds": list(c.seeds)} for c in cells]
        console.say_json({"ok": True, "experiments": facts, "data_missing": list(blank)})
        return
    runs = sum(len(c.methods) * len(c.seeds) for c in cells)
    console.say(f"{file} is sound: {_counted(len(cells), 'experiment')}, {_counted(runs, 'run')} of a method on a seed")
    for name in blank:
        console.say(f"{name} is not whole on this machine: its form was checked, not its rows, which a run needs")


def _check_readable(file: Path) -> None:
    """Say at once that there is no such file, before anything heavy is imported."""
    if not file.is_file():
        raise ConfigError(f"cannot read the experiment {file}: there is no such file")


def _counted(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"


def _run(
    file: Path,
    sets: list[str],
    out: Path | None,
    *,
    resume: bool,
    workers: int | None,
    memo: bool,
    as_json: bool,
    page: bool,
) -> None:
    from fedfuse.experiment.doctor import compile_notice

    _check_readable(file)
    from fedfuse.experiment.execute import execute
    from fedfuse.experiment.jobs import jobs_of, memo_folder
    from fedfuse.report import write_page
    from fedfuse.report.tables import rich_table, summary

    jobs, store = jobs_of(file, sets, out, resume), memo_folder() if memo else None
    done = []
    try:
        for job in jobs.each:
            what, where = job.experiment, job.folder
            console.hint(compile_notice(what.local.kernel))
            with console.watching(len(what.methods) * len(what.seeds), what.name) as watch:
                done.append(execute(what, where, resume=job.resume, workers=workers, memo=store, watch=watch))
            if not as_json:
                console.out.print(rich_table(summary(done[-1].rows), what.name, console.out.width))
    except KeyboardInterrupt:
        console.complain(f"stopped; continue with: {_how_to_resume(file, sets, jobs.folder)}")
        raise typer.Exit(1) from None
    made = write_page([job.folder for job in jobs.each], jobs.folder / "report.html") if page else None
    if as_json:
        console.say_json(console.told(jobs.together(done), made))
        return
    console.say(f"files: {jobs.folder}" + (f"   page: {made}" if made else ""))


def _how_to_resume(file: Path, sets: list[str], folder: Path) -> str:
    said = [word for text in sets for word in ("--set", text)]
    return shlex.join(["fedfuse", "run", str(file), *said, "--out", str(folder), "--resume"])


def _show_method(facts: dict[str, Any], text: str) -> None:
    console.say(f"{facts['name']}  {facts['paper']}\n")
    console.say(text.split("\nArgs:")[0].rstrip() + "\n")
    if facts["options"]:
        rows = [(o["name"], o["type"], _as_in_a_file(o["default"]), o["text"]) for o in facts["options"]]
        console.table("options", ("name", "takes", "default", ""), rows, right=9)
    revealed = "; ".join(facts["reveals"]) or "nothing beside the trained weights"
    console.say(f"\nclients reveal: {revealed}")


def _as_in_a_file(default: object) -> str:
    """A default as an experiment file would say it; nothing where it is left out."""
    return "" if default is None else json.dumps(default, ensure_ascii=False, default=str)


def _use_one_thread() -> None:
    """Let torch have one thread, for results must not depend on how many cores happen to be free.

    It is told by its environment, so that whoever asks for help need not wait for torch.
    """
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


def main() -> None:
    """Run the command line; what we raise on purpose is one sentence and an exit code."""
    _use_one_thread()
    sys.path.insert(0, str(Path.cwd()))  # package.module:Class of the user's own folder
    try:
        app()
    except FuseError as why:
        console.complain(str(why))
        raise SystemExit(why.exit_code) from None
    except OSError as why:
        console.complain(f"{why.filename or 'a file'} cannot be used: {why.strerror or why}")
        raise SystemExit(ConfigError.exit_code) from None
    except KeyboardInterrupt:
        console.complain("stopped")
        raise SystemExit(1) from None

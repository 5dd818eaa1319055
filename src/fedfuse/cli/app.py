"""The command line: parse, call, print."""

from __future__ import annotations

import atexit
import gc
import os
import shlex
import sys
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict
from importlib import metadata
from importlib.resources import files as resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from fedfuse.cli import console, flower, models, results, sites
from fedfuse.cli.console import interruption, stop_cleanly, stop_code
from fedfuse.cli.options import Json, Log, Sets, Workers, check_written
from fedfuse.core.files import STREAM
from fedfuse.errors import ClientsDropped, ConfigError, FuseError
from fedfuse.experiment.callbacks import Watcher

if TYPE_CHECKING:
    from fedfuse.experiment.prepare import PreparedExperiment

with warnings.catch_warnings():  # typer imports what click will drop in its next version; that is between them
    warnings.simplefilter("ignore", DeprecationWarning)
    import typer

_LONG = 600.0  # seconds after which a person would have liked to know

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
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with what is in the run directory, by default the last of its name.")
    ] = False,
    check: Annotated[bool, typer.Option("--check", help="Check everything, train nothing.")] = False,
    workers: Workers = None,
    memo: Annotated[bool, typer.Option(help="Reuse updates trained before under the same conditions.")] = True,
    page: Annotated[bool, typer.Option(help="Write report.html at the end.")] = True,
    log: Log = None,
    as_json: Json = False,
) -> None:
    """Run an experiment: every method, every seed, every round, recorded as it happens.

    FILE is a TOML file that says what to run.
    """
    if check:
        _check(file, sets or [], workers, as_json)
        return
    if (out is not None and out.exists() and not out.is_dir()) or out == STREAM:
        raise ConfigError(f"--out is {out}, expected a folder that is there or can be made; name another one")
    _run(file, sets or [], out, resume=resume, workers=workers, memo=memo, as_json=as_json, page=page, log=log)


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
    from fedfuse.experiment.config import load_experiment

    check_written(output, file)
    experiment = load_experiment(file, sets or [])
    from fedfuse.data import heat_map, save_heat_map  # late: torch, once the file is sound
    from fedfuse.experiment.prepare import prepare

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
    run_all: Annotated[bool, typer.Option("--all", help="Run every table that has no stored result; goes on.")] = False,
    hours: Annotated[float | None, typer.Option(help="With --all: stop after so many hours.", min=0)] = None,
    store: Annotated[bool, typer.Option("--store", help="Store results of run directories; trains nothing.")] = False,
    partial: Annotated[bool, typer.Option("--partial", help="With --store: what is finished, if not all.")] = False,
    verdicts: Annotated[bool, typer.Option("--verdicts", help="Judge every claim by stored results.")] = False,
    workers: Workers = None,
    as_json: Json = False,
) -> None:
    """Make the papers' tables and figures again, and say which of their claims hold.

    NAME is a table or a figure; without one, all are listed.
    """
    results.check_request(name, {"--all": run_all, "--store": store, "--verdicts": verdicts}, hours, partial)
    chosen = results.scale_of(scale)
    if run_all:
        results.run_all_missing(chosen, hours, out, workers, as_json)
        return
    if store:
        results.store_runs(name, chosen, out, partial, as_json)
        return
    if verdicts:
        results.write_verdicts(chosen, out, as_json)
        return
    from fedfuse.experiment.reproduce import catalogue, find

    if name is None:
        entries = catalogue()
        if as_json:
            console.say_json([asdict(entry) for entry in entries])
        else:
            rows = [(r.name, ", ".join(r.scales), r.result, r.summary) for r in entries]
            console.table("", ("name", "scales", "result", "what it is"), rows, right=9)
        return
    found = find(name, chosen)
    folder = out or Path("runs") / name
    if isinstance(found, Path):
        _run(found, sets or [], folder, resume=resume, workers=workers, memo=True, as_json=as_json, page=True)
        return
    folder.mkdir(parents=True, exist_ok=True)
    files_made = [str(p) for p in found.draw(folder)]
    console.say_json({"files": files_made}) if as_json else console.say("\n".join(files_made))


for reads in (models.methods, models.models, results.report, results.table, results.plot, results.compare):
    app.command()(reads)
for command in (
    sites.init,
    sites.moments,
    sites.scale,
    sites.update,
    sites.evidence,
    sites.fuse,
    sites.evaluate,
    models.show,
    models.predict,
    models.export,
    flower.flower,
):
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


def _check(file: Path, sets: list[str], workers: int | None, as_json: bool) -> None:
    from fedfuse.experiment.config import load_experiments

    cells = load_experiments(file, sets)
    from fedfuse.data import load_or_outline  # late: torch, once the file is sound
    from fedfuse.experiment.estimate import estimate_seconds
    from fedfuse.experiment.prepare import prepare

    blank: dict[str, None] = {}
    seconds: list[dict[str, float]] = []
    remarks: list[dict[str, tuple[str, ...]]] = []
    for cell in cells:
        prepared = prepare(cell, load_or_outline)
        _tell_flaws(prepared, as_json)
        seconds.append(estimate_seconds(prepared, workers))
        remarks.append(prepared.remarks())
        if "outline" in prepared.dataset.facts:
            blank[prepared.dataset.name] = None
    if as_json:
        facts = [
            {"name": cell.name, "methods": list(cell.recipes()), "seeds": list(cell.seeds), "seconds": each}
            | ({"remarks": told} if told else {})
            for cell, each, told in zip(cells, seconds, remarks, strict=True)
        ]
        console.say_json({"ok": True, "experiments": facts, "data_missing": list(blank)})
        return
    runs = sum(len(c.methods) * len(c.seeds) for c in cells)
    console.say(
        f"{file} is sound: {_count_text(len(cells), 'experiment')}, {_count_text(runs, 'run')} of a method on a seed"
    )
    for cell, each in zip(cells, seconds, strict=True):
        console.say(f"{cell.name} {_time_words(each)}")
    for line in dict.fromkeys(f"{label}: {w}" for told in remarks for label, words in told.items() for w in words):
        console.say(line)
    for name in blank:
        console.say(f"{name} is not whole on this machine: its form was checked, not its rows, which a run needs")


def _tell_flaws(prepared: PreparedExperiment, as_json: bool) -> None:
    """Say of each method whether it works here, where some do not, and end with the first that does not."""
    flaws = prepared.flaws()
    if not flaws:
        return
    methods = {label: str(flaws[label]) if label in flaws else "" for label in prepared.recipes}
    if as_json:
        console.say_json({"ok": False, "name": prepared.experiment.name, "methods": methods})
        raise typer.Exit(ConfigError.exit_code)
    for label, why in methods.items() if len(methods) > 1 else ():
        console.err.print(f"{label}: {why or 'works'}", markup=False, soft_wrap=True)
    raise next(iter(flaws.values()))


def _time_words(seconds: Mapping[str, float]) -> str:
    """How long an experiment may take, and what most of it goes to."""
    from fedfuse.experiment.callbacks import time_text

    longest = sorted(seconds, key=lambda label: -seconds[label])[:3]
    each = ", ".join(f"{label} {time_text(seconds[label])}" for label in longest)
    return f"may take about {time_text(sum(seconds.values()))} ({'most of it ' if len(seconds) > 3 else ''}{each})"


def _announce(seconds: Mapping[str, float]) -> None:
    """Say before a long run how long it may be."""
    if sum(seconds.values()) > _LONG:
        console.note(f"this {_time_words(seconds)}; Ctrl-C stops it, --resume goes on")


def _count_text(number: int, thing: str) -> str:
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
    log: list[str] | None = None,
) -> None:
    if workers != 0:
        from fedfuse.engines.starting import start_early

        start_early()  # workers' server imports torch while we do
    from fedfuse.experiment.jobs import Job, jobs_of, run_each

    jobs = jobs_of(file, sets, out, resume)
    from fedfuse.experiment.doctor import compile_notice  # late: torch, once the file is sound
    from fedfuse.loggers import find_logger
    from fedfuse.report import rich_table, summary, write_page

    def show(job: Job) -> AbstractContextManager[Watcher]:
        console.hint(compile_notice(job.experiment.local.kernel))
        return console.watcher(job.method_runs, job.experiment.name)

    loggers, done = [find_logger(words) for words in log or []], []
    try:
        for found in run_each(jobs, show=show, callbacks=loggers, workers=workers, memo=memo, announce=_announce):
            done.append(found)
            if not as_json:
                console.out.print(rich_table(summary(found.rows), found.name, console.out.width))
    except KeyboardInterrupt as why:
        console.complain(f"stopped; continue with: {_how_to_resume(file, sets, jobs.folder)}")
        raise typer.Exit(stop_code(why)) from None
    page_file = write_page([job.folder for job in jobs.each], jobs.folder / "report.html") if page else None
    if as_json:
        console.say_json(console.results_json(jobs.merge_results(done), page_file))
    else:
        console.say(f"files: {jobs.folder}" + (f"   page: {page_file}" if page_file else ""))
    for job, run_results in zip(jobs.each, done, strict=True):
        if judged := run_results.judged_clients():
            more = f"; and {len(judged) - 3} more in {job.folder / 'ledger.jsonl'}" if len(judged) > 3 else ""
            console.note(f"{'; '.join(judged[:3])}{more}", "yellow")
        _tell_dropped(run_results.dropped_clients(), job.experiment.server.allow_dropped)


def _tell_dropped(dropped: list[str], allowed: bool) -> None:
    """Say who was left out of a round because it crashed; unless the file allows that, the run was no success.

    Raises:
        ClientsDropped: which ends the command with its own exit code; the results are written by then.
    """
    if not dropped:
        return
    more = f" and {len(dropped) - 3} more times" if len(dropped) > 3 else ""
    text = f"rounds went on without clients that crashed: {', '.join(dropped[:3])}{more}"
    if not allowed:
        raise ClientsDropped(f"{text}; mend the cause and run again, or set server.allow_dropped = true to allow it")
    console.warn(f"{text}; server.allow_dropped allows it")


def _how_to_resume(file: Path, sets: list[str], folder: Path) -> str:
    flags = [word for text in sets for word in ("--set", text)]
    return shlex.join(["fedfuse", "run", str(file), *flags, "--out", str(folder), "--resume"])


def _use_one_thread() -> None:
    """Let torch have one thread, for results must not depend on how many cores happen to be free.

    The environment sets it, because importing torch for that would make `--help` wait.
    """
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


def _import_path(path: list[str], arguments: list[str], here: str) -> list[str]:
    """Where modules are looked for: the user's own folder last, and not at all where files of others are read.

    A folder of received files may hold a `PIL.py` too: it must neither stand before the installed one, nor be found
    by `fuse`, `evaluate` and whatever else reads models unless the user names a package.module: of his own.

    Example:
        >>> _import_path(["", "/lib"], ["fuse", "a.safetensors"], "/inbox")
        ['/lib']
        >>> _import_path(["", "/lib"], ["run", "mine.toml"], "/inbox")
        ['/lib', '/inbox']
    """
    elsewhere = [folder for folder in path if folder not in ("", here)]
    reads_files = bool({"fuse", "evaluate", "show", "predict", "export"}.intersection(arguments[:1]))
    named = any(":" in argument for argument in arguments[1:])
    return elsewhere if reads_files and not named else [*elsewhere, here]


def main() -> None:
    """Run the command line; what we raise on purpose is one sentence and an exit code."""
    _use_one_thread()
    atexit.register(gc.freeze)  # or the end looks for garbage among a million objects of torch, for half a second
    sys.path[:] = _import_path(sys.path, sys.argv[1:], str(Path.cwd()))
    try:
        with stop_cleanly():
            app()
    except FuseError as why:
        console.complain(str(why))
        raise SystemExit(why.exit_code) from None
    except OSError as why:
        console.complain(f"{why.filename or 'a file'} cannot be used: {why.strerror or why}")
        raise SystemExit(ConfigError.exit_code) from None
    except (KeyboardInterrupt, SystemExit) as end:
        if (stopped := interruption(end)) is None:
            raise
        console.complain("stopped")
        raise SystemExit(stop_code(stopped)) from None

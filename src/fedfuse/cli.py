"""The command line: parse, call, print."""

from __future__ import annotations

import os
import sys
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import typer

from fedfuse import console
from fedfuse.errors import ConfigError, FuseError

app = typer.Typer(
    help="Fuse models trained apart, on data that may not meet, into one model.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Sets = Annotated[list[str] | None, typer.Option("--set", help="key.key=value; beats the file. May be repeated.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]
Workers = Annotated[int, typer.Option(min=0, help="Worker processes; 0 trains in this one.")]
Trust = Annotated[list[str] | None, typer.Option("--model", help="package.module:Class that a file may name.")]
Source = Annotated[str, typer.Option("--data", help="digits, mnist, …, a folder, an .npz or package.module:function.")]

CORES = max(1, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


@app.command()
def demo(
    out: Annotated[Path | None, typer.Option(help="Run directory.")] = None,
    workers: Workers = CORES,
    as_json: Json = False,
) -> None:
    """Compare several methods on bundled digits: offline, about a minute, with a page to open at the end."""
    path = Path(str(files("fedfuse.experiment") / "demo.toml"))
    _run(path, [], out, resume=False, workers=workers, memo=None, as_json=as_json, page=True)


@app.command()
def run(
    file: Annotated[Path, typer.Argument(help="The experiment, a TOML file.")],
    sets: Sets = None,
    out: Annotated[Path | None, typer.Option(help="Run directory; by default runs/NAME.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with what is in the run directory.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Check everything, train nothing.")] = False,
    workers: Workers = CORES,
    memo: Annotated[bool, typer.Option(help="Reuse updates trained before under the same conditions.")] = True,
    page: Annotated[bool, typer.Option(help="Write report.html at the end.")] = True,
    as_json: Json = False,
) -> None:
    """Run an experiment: every method, every seed, every round, recorded as it happens."""
    if check:
        _check(file, sets or [], as_json)
        return
    store = _memo_folder() if memo else None
    _run(file, sets or [], out, resume=resume, workers=workers, memo=store, as_json=as_json, page=page)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Run directories.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Where to write the page.")] = Path("report.html"),
    as_json: Json = False,
) -> None:
    """Make one self-contained page of one run or several: tables, curves, heat maps."""
    from fedfuse.report import write_page

    path = write_page(runs, output)
    console.say_json({"page": str(path)}) if as_json else console.say(f"page: {path}")


@app.command()
def methods(name: Annotated[str | None, typer.Argument(help="One method.")] = None, as_json: Json = False) -> None:
    """List all methods, or say what one does: its options, what clients send and reveal, its paper."""
    from fedfuse.core.registry import Method, all_methods, find_method

    def facts(m: Method) -> dict[str, Any]:
        options = [{"name": o.name, "type": o.type, "default": o.default, "text": o.text} for o in m.options]
        reveals = list(m.recipe().reveals)
        return {"name": m.name, "summary": m.summary, "paper": m.paper, "reveals": reveals, "options": options}

    if as_json:
        chosen = [find_method(name)] if name else list(all_methods().values())
        console.say_json([facts(m) for m in chosen])
    elif name:
        _show_method(facts(find_method(name)), find_method(name).text)
    else:
        rows = [(m.name, m.summary, m.paper) for m in all_methods().values()]
        console.table("", ("method", "what it does", "paper"), rows, right=9)


@app.command()
def evaluate(
    models: Annotated[list[Path], typer.Argument(help="Model files.")],
    data: Source,
    test_limit: Annotated[int | None, typer.Option(min=1, help="Use only so many test rows.")] = None,
    train_limit: Annotated[int | None, typer.Option(min=1, help="Needed where only part of a set is there.")] = None,
    standardise: Annotated[bool, typer.Option(help="Standardise by the training rows, as the run did.")] = False,
    bins: Annotated[int, typer.Option(min=1, help="Calibration bins.")] = 15,
    trust: Trust = None,
    as_json: Json = False,
) -> None:
    """Score model files on a data set's test rows."""
    from fedfuse.experiment.evaluate import evaluate_files

    scores = evaluate_files(models, data, test_limit, train_limit, standardise, bins, frozenset(trust or []))
    console.say_json(scores) if as_json else console.show_scores(f"{data}, test rows", scores)


@app.command()
def partition(
    file: Annotated[Path, typer.Argument(help="The experiment, a TOML file.")],
    sets: Sets = None,
    output: Annotated[Path, typer.Option("-o", "--output", help="Where to write the picture.")] = Path("partition.png"),
    seed: Annotated[int | None, typer.Option(help="Which seed; by default the file's first.")] = None,
    as_json: Json = False,
) -> None:
    """Show who holds what: a heat map in the terminal and as a picture."""
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
def update(
    data: Source,
    output: Annotated[Path, typer.Option("-o", "--output", help="The file to send.")],
    model: Annotated[str, typer.Option(help="A model's name, or package.module:Class.")] = "mlp",
    method: Annotated[str, typer.Option(help="The method that will fuse.")] = "fedavg",
    sets: Annotated[
        list[str] | None, typer.Option("--set", help="model.key=…, local.key=… or method.key=…; may be repeated.")
    ] = None,
    start: Annotated[Path | None, typer.Option(help="Common weights to start from.")] = None,
    client: Annotated[str | None, typer.Option(help="This site's name; by default the file's.")] = None,
    train_limit: Annotated[int | None, typer.Option(min=1, help="Use only so many rows.")] = None,
    seed: Annotated[int, typer.Option(help="Fixes every random draw.")] = 0,
    as_json: Json = False,
) -> None:
    """At a site: train on its own rows, bring the evidence a method asks for, write one file."""
    from fedfuse.experiment.site import site_update

    made = site_update(data, model, method, sets or [], start, client or output.stem, train_limit, seed)
    made.save(output)
    facts = {"file": str(output), "examples": made.mass, "bytes": output.stat().st_size, "reveals": list(made.reveals)}
    if as_json:
        console.say_json(facts)
        return
    console.say(f"{output}: {facts['bytes']:,} bytes, {made.mass:,.0f} examples behind it")
    console.say(f"it reveals: {'; '.join(made.reveals) or 'nothing beside the trained weights'}")


@app.command()
def fuse(
    updates: Annotated[list[Path], typer.Argument(help="Update files, or safetensors of weights.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The fused model's file.")],
    method: Annotated[str, typer.Option(help="How to fuse.")] = "fedavg",
    sets: Annotated[list[str] | None, typer.Option("--set", help="An option of the method; may be repeated.")] = None,
    start: Annotated[Path | None, typer.Option(help="The weights all started from, where a method needs them.")] = None,
    mass: Annotated[list[float] | None, typer.Option(help="Examples behind each file, in order.")] = None,
    quorum: Annotated[float, typer.Option(min=0.0, max=1.0, help="The share that must be admitted.")] = 0.5,
    model: Annotated[str | None, typer.Option(help="The network, where it is not fedfuse's own.")] = None,
    as_json: Json = False,
) -> None:
    """Anywhere: admit update files, fuse them, write one model file; no server needed."""
    from fedfuse.experiment.site import fuse_files

    fused = fuse_files(updates, method, sets or [], start, mass, quorum, model)
    fused.save(output)
    if as_json:
        facts = {"file": str(output), "refused": [dict(r) for r in fused.refused], "facts": _plain(fused.facts)}
        console.say_json(facts)
        return
    for refusal in fused.refused:
        said = f"{refusal['client']}: {refusal['field']} is {refusal['got']}, expected {refusal['expected']}"
        console.err.print(f"refused {said}", style="yellow", markup=False, soft_wrap=True)
    console.say(f"{output}: {len(updates) - len(fused.refused)} of {len(updates)} updates fused by {method}")


@app.command()
def reproduce(
    name: Annotated[str | None, typer.Argument(help="A table or a figure; without one, all are listed.")] = None,
    scale: Annotated[str, typer.Option(help="cpu: minutes on a laptop. paper: as published.")] = "cpu",
    sets: Sets = None,
    out: Annotated[Path | None, typer.Option(help="Where to put what is made; by default runs/NAME.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with what is there.")] = False,
    workers: Workers = CORES,
    as_json: Json = False,
) -> None:
    """Make the papers' tables and figures again."""
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
        _run(found, sets or [], place, resume=resume, workers=workers, memo=_memo_folder(), as_json=as_json, page=True)
        return
    place.mkdir(parents=True, exist_ok=True)
    files_made = [str(p) for p in found.draw(place)]
    console.say_json({"files": files_made}) if as_json else console.say("\n".join(files_made))


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
    from fedfuse.experiment.config import load_experiments
    from fedfuse.experiment.prepare import prepare

    cells = load_experiments(file, sets)
    for cell in cells:
        prepare(cell).check()
    if as_json:
        facts = [{"name": c.name, "methods": list(c.recipes()), "seeds": list(c.seeds)} for c in cells]
        console.say_json({"ok": True, "experiments": facts})
    else:
        runs = sum(len(c.methods) * len(c.seeds) for c in cells)
        console.say(f"{file} is sound: {len(cells)} experiments, {runs} runs of a method on a seed")


def _run(
    file: Path,
    sets: list[str],
    out: Path | None,
    *,
    resume: bool,
    workers: int,
    memo: Path | None,
    as_json: bool,
    page: bool,
) -> None:
    from fedfuse.experiment.config import load_experiments
    from fedfuse.experiment.execute import Results, execute, free_folder
    from fedfuse.report import write_page
    from fedfuse.report.tables import rich_table, summary

    cells = load_experiments(file, sets)
    if resume and out is None:
        raise ConfigError("--resume needs the run directory: add --out DIR")
    base = out or free_folder(Path("runs"), cells[0].name if len(cells) == 1 else file.stem)
    folders = [base] if len(cells) == 1 else [base / c.name for c in cells]
    done: list[Results] = []
    try:
        for cell, folder in zip(cells, folders, strict=True):
            begun = (folder / "config.toml").exists()
            with console.watching(len(cell.methods) * len(cell.seeds), cell.name) as watch:
                goes_on = resume and (begun or len(cells) == 1)
                done.append(execute(cell, folder, resume=goes_on, workers=workers, memo=memo, watch=watch))
            if not as_json:
                console.out.print(rich_table(summary(done[-1].rows), cell.name, console.out.width))
    except KeyboardInterrupt:
        console.complain(f"stopped; continue with: fedfuse run {file} --out {base} --resume")
        raise typer.Exit(1) from None
    made = write_page(folders, base / "report.html") if page else None
    if as_json:
        rows = [{"experiment": r.name, **_flat(row)} for r in done for row in r.rows]
        console.say_json({"name": cells[0].name if len(cells) == 1 else file.stem, "folder": str(base), "rows": rows})
        return
    console.say(f"files: {base}" + (f"   page: {made}" if made else ""))


def _flat(row: Any) -> dict[str, Any]:
    return {k: v for k, v in row.items() if isinstance(v, str | int | float | bool) or v is None}


def _plain(value: Any) -> Any:
    from fedfuse.experiment.ledger import plain

    return plain(value)


def _memo_folder() -> Path:
    from fedfuse.data import cache_folder

    return cache_folder() / "memo"


def _show_method(facts: dict[str, Any], text: str) -> None:
    console.say(f"{facts['name']}  {facts['paper']}\n")
    console.say(text.split("\nArgs:")[0].rstrip() + "\n")
    if facts["options"]:
        rows = [(o["name"], o["type"], repr(o["default"]), o["text"]) for o in facts["options"]]
        console.table("options", ("name", "type", "default", ""), rows, right=9)
    revealed = "; ".join(facts["reveals"]) or "nothing beside the trained weights"
    console.say(f"\nclients reveal: {revealed}")


def main() -> None:
    """Run the command line; what we raise on purpose is one sentence and an exit code."""
    import torch

    torch.set_num_threads(1)  # results must not depend on how many cores happen to be free
    sys.path.insert(0, str(Path.cwd()))  # package.module:Class of the user's own folder
    try:
        app()
    except FuseError as why:
        console.complain(str(why))
        raise SystemExit(why.exit_code) from None
    except KeyboardInterrupt:
        console.complain("stopped")
        raise SystemExit(1) from None

"""Commands of a site and of whoever fuses: update, fuse, evaluate; all by files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from fedfuse.cli import console
from fedfuse.cli.options import Json, Source, Trust, typer


def evaluate(
    models: Annotated[list[Path], typer.Argument()],
    data: Source,
    test_limit: Annotated[int | None, typer.Option(min=1, help="Use only so many test rows.")] = None,
    train_limit: Annotated[int | None, typer.Option(min=1, help="Needed where only part of a set is there.")] = None,
    standardise: Annotated[bool, typer.Option(help="Standardise by the training rows, as the run did.")] = False,
    bins: Annotated[int, typer.Option(min=1, help="Calibration bins.")] = 15,
    trust: Trust = None,
    as_json: Json = False,
) -> None:
    """Score model files on a data set's test rows.

    MODELS are files that `fuse` or `run` wrote.
    """
    from fedfuse.experiment.evaluate import evaluate_files

    scores = evaluate_files(models, data, test_limit, train_limit, standardise, bins, frozenset(trust or []))
    console.say_json(scores) if as_json else console.show_scores(f"{data}, test rows", scores)


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

    with console.err.status(f"training on {data}"):
        made = site_update(data, model, method, sets or [], start, client or output.stem, train_limit, seed)
    made.save(output)
    facts = {
        "file": str(output),
        "examples": made.num_examples,
        "bytes": output.stat().st_size,
        "reveals": list(made.reveals),
    }
    if as_json:
        console.say_json(facts)
        return
    console.say(f"{output}: {facts['bytes']:,} bytes, {made.num_examples:,.0f} examples behind it")
    console.say(f"it reveals: {'; '.join(made.reveals) or 'nothing beside the trained weights'}")


def fuse(
    updates: Annotated[list[Path], typer.Argument()],
    output: Annotated[Path, typer.Option("-o", "--output", help="The fused model's file.")],
    method: Annotated[str, typer.Option(help="How to fuse.")] = "fedavg",
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", help="An option of the method, or guard.key=…, align.key=…; may be repeated."),
    ] = None,
    start: Annotated[Path | None, typer.Option(help="The weights all started from, where a method needs them.")] = None,
    num_examples: Annotated[list[float] | None, typer.Option(help="Examples behind each file, in order.")] = None,
    quorum: Annotated[float, typer.Option(min=0.0, max=1.0, help="The share that must be admitted.")] = 0.5,
    model: Annotated[
        list[str] | None,
        typer.Option(help="A network that is not fedfuse's own, where it must be run; may be repeated."),
    ] = None,
    guard: Annotated[str | None, typer.Option(help="A robust filter first: clip, krum, median or trimmed.")] = None,
    align: Annotated[
        str | None, typer.Option(help="Align hidden units first: by weights, activations, transport or graph.")
    ] = None,
    server_data: Annotated[
        str | None, typer.Option(help="Labelled rows the server holds, where a method needs them.")
    ] = None,
    unlabelled: Annotated[
        str | None, typer.Option(help="Inputs the server holds, their labels unseen, for distillation.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Fixes every random draw of the server.")] = 0,
    as_json: Json = False,
) -> None:
    """Anywhere: admit update files, fuse them, write one model file; no server needed.

    UPDATES are files that `update` wrote, or plain safetensors of weights.
    """
    from fedfuse.experiment.site import fuse_files

    with console.err.status(f"fusing {len(updates)} updates"):
        fused = fuse_files(
            updates,
            method,
            sets or [],
            start=start,
            num_examples=num_examples,
            quorum=quorum,
            models=model or [],
            guard=guard,
            align=align,
            server_data=server_data,
            unlabelled=unlabelled,
            seed=seed,
        )
        fused.save(output)
    if as_json:
        facts = {"file": str(output), "refused": [dict(r) for r in fused.refused], "facts": fused.facts}
        console.say_json(facts)
        return
    for refusal in fused.refused:
        said = f"{refusal['client']}: {refusal['field']} is {refusal['got']}, expected {refusal['expected']}"
        console.err.print(f"refused {said}", style="yellow", markup=False, soft_wrap=True)
    console.say(f"{output}: {len(updates) - len(fused.refused)} of {len(updates)} updates fused by {method}")

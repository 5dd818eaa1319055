"""Commands on a model's file (show, predict, export), and the lists of methods and of networks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from fedfuse.cli import console
from fedfuse.cli.options import (
    Columns,
    ImageSize,
    Json,
    MomentsFiles,
    SkipBroken,
    Source,
    Target,
    TaskName,
    Trust,
    check_written,
    said_of_table,
    typer,
)
from fedfuse.core.files import STREAM


def show(
    file: Annotated[Path, typer.Argument()],
    card: Annotated[
        Path | None, typer.Option(help="Also write a model card in Markdown here; - prints it alone.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Say what a file is, from its header alone: its network, classes, inputs, method, sites and what it reveals.

    FILE is what `fuse`, `run` or `update` wrote. Nothing that it names is imported.
    """
    from fedfuse.federation.show import describe_file, facts_in_words, save_card

    facts = describe_file(file)
    if card is not None:
        check_written(card, file, streams=True, as_json=as_json)
        save_card(facts, card)
    if card == STREAM:
        return
    if as_json:
        console.say_json(facts | ({} if card is None else {"card": str(card)}))
        return
    lines = facts_in_words(facts)
    width = max(len(name) for name, _ in lines)
    for name, words in lines:
        console.say(f"{name:<{width}}  {words}")
    if card is not None:
        console.say(f"model card: {card}")


def predict(
    model: Annotated[Path, typer.Argument()],
    data: Source,
    output: Annotated[Path, typer.Option("-o", "--output", help="The CSV file to write; - prints it.")],
    limit: Annotated[int | None, typer.Option(min=1, help="Use only so many rows.")] = None,
    image_size: ImageSize = None,
    skip_broken: SkipBroken = False,
    task: TaskName = None,
    target: Target = None,
    columns: Columns = None,
    moments: MomentsFiles = None,
    trust: Trust = None,
    as_json: Json = False,
) -> None:
    """Write a model's answer for every row, which needs no labels: class, probabilities, entropy, and who answered.

    MODEL is a file that `fuse`, `run` or `update` wrote. Of a source with halves the test half is taken.
    """
    from fedfuse.federation.evaluate import Reading
    from fedfuse.federation.predict import predict_file

    check_written(output, model, *(moments or []), data=[data], streams=True, as_json=as_json)
    table = said_of_table(target, columns, moments)
    reading = Reading(limit, image_size, skip_broken, task=task, table=table)
    found = predict_file(model, data, reading, frozenset(trust or []))
    found.save(output)
    for remark in found.remarks:
        console.warn(remark)
    if found.broken:
        console.warn(f"{len(found.broken)} broken pictures were left out: {', '.join(found.broken)}")
    if as_json:
        facts = {"file": str(output), "rows": len(found), "predicted": found.counts, "broken": list(found.broken)}
        console.say_json(facts)
        return
    counts = ", ".join(f"{name} {count:,}" for name, count in found.counts.items() if count)
    say = console.note if output == STREAM else console.say
    say(f"{output}: {len(found):,} rows ({counts or ', '.join(found.classes)})")


def export(
    model: Annotated[Path, typer.Argument()],
    to: Annotated[str, typer.Option(help="onnx, torchscript or state-dict.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The file to write; a note in JSON goes beside it.")],
    trust: Trust = None,
    as_json: Json = False,
) -> None:
    """Write a model for other programs: as ONNX, as TorchScript, or as its weights alone.

    MODEL is a file that `fuse`, `run` or `update` wrote.
    """
    from fedfuse.federation.export import export_model

    with console.err.status(f"exporting {model}"):
        made = export_model(model, to, output, frozenset(trust or []))
    if as_json:
        console.say_json({"files": [str(file) for file in made]})
        return
    for file in made:
        console.say(f"{file}: {file.stat().st_size:,} bytes")


def methods(name: Annotated[str | None, typer.Argument()] = None, as_json: Json = False) -> None:
    """List all methods, or say what one does: its options, what clients send and reveal, its paper.

    NAME is the method to tell about; one of yours is module:function or file.py:function.
    """
    from fedfuse.core.catalogue import FAMILIES, describe_local_method, list_catalogue, unknown_method

    entries = {entry["name"]: entry for entry in list_catalogue()}
    if name is not None and ":" in name:
        entries[name] = describe_local_method(name)
    if name is not None and name not in entries:
        raise unknown_method(name, entries)
    if as_json:
        _say_json(list(entries.values()) if name is None else [entries[name]])
    elif name is None:
        rows = [(entry["name"], entry["summary"], entry["paper"]) for entry in entries.values()]
        console.table("", ("method", "what it does", "paper"), rows, right=9)
    else:
        facts = entries[name]
        _show(facts, f"{facts['name']}  {facts['paper']}")
        console.say(f"\nthe mean is taken {FAMILIES[facts['family']]}")
        console.say(f"clients reveal: {'; '.join(facts['reveals']) or 'nothing beside the trained weights'}")
        sums = "sums over clients alone: secure aggregation fits" if facts["only_sums"] else "each client's own message"
        console.say(f"the server needs {sums}")


def models(name: Annotated[str | None, typer.Argument()] = None, as_json: Json = False) -> None:
    """List all networks, or say what one is: its layers and its options.

    NAME is the network to tell about.
    """
    from fedfuse.models import describe_models, model_factory

    entries = {entry["name"]: entry for entry in describe_models()}
    if name is not None and name not in entries:
        model_factory(name)  # says which there are
    if as_json:
        _say_json(list(entries.values()) if name is None else [entries[name]])
    elif name is None:
        options = {key: ", ".join(o["name"] for o in entry["options"]) for key, entry in entries.items()}
        rows = [(key, entry["summary"], options[key]) for key, entry in entries.items()]
        console.table("", ("model", "what it is", "options"), rows, right=9)
        console.say("\na network of yours is named package.module:Class")
    else:
        _show(entries[name], name)


def _say_json(entries: Sequence[Mapping[str, Any]]) -> None:
    console.say_json([{key: entry[key] for key in entry if key != "text"} for entry in entries])


def _show(facts: Mapping[str, Any], head: str) -> None:
    """Documentation and options of one thing."""
    console.say(f"{head}\n")
    console.say(facts["text"].split("\nArgs:")[0].rstrip() + "\n")
    if facts["options"]:
        rows = [(o["name"], o["type"], _as_in_a_file(o["default"]), o["text"]) for o in facts["options"]]
        console.table("options", ("name", "takes", "default", ""), rows, right=9)


def _as_in_a_file(default: object) -> str:
    """A default as an experiment file would say it; nothing where it is left out."""
    return "" if default is None else json.dumps(default, ensure_ascii=False, default=str)

"""Commands that list what there is: methods and networks, each with its options."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from fedfuse.cli import console
from fedfuse.cli.options import Json, typer


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
    from fedfuse.models.listing import describe_models, model_factory

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

"""All methods as plain data, so that listing them costs no import of what they are made of.

The file beside the methods is written by `make catalogue`; a test compares it with the registry.
"""

from __future__ import annotations

import json
from importlib.metadata import entry_points
from importlib.resources import files
from typing import Any

_FILE = "methods/catalogue.json"


def list_catalogue() -> list[dict[str, Any]]:
    """Every method's name, first sentence, paper, options and what clients reveal.

    Methods of other packages are asked for theirs, which imports them.

    Example:
        >>> [entry["name"] for entry in list_catalogue()][:2]
        ['aalv', 'alpha']
    """
    if entry_points(group="fedfuse.methods"):
        return describe_methods()
    entries: list[dict[str, Any]] = json.loads((files("fedfuse") / _FILE).read_text(encoding="utf-8"))
    return entries


def describe_methods() -> list[dict[str, Any]]:
    """The same, asked of the methods themselves."""
    from fedfuse.core.registry import all_methods  # late: it brings every method, and torch with them

    described = []
    for method in all_methods().values():
        options = [{"name": o.name, "type": o.type, "default": o.default, "text": o.text} for o in method.options]
        facts = {"name": method.name, "summary": method.summary, "paper": method.paper, "text": method.text}
        described.append({**facts, "reveals": list(method.recipe().reveals), "options": options})
    return described


def write_catalogue() -> None:
    """Write the file anew."""
    text = json.dumps(describe_methods(), indent=1, ensure_ascii=False, default=str)
    with open(str(files("fedfuse") / _FILE), "w", encoding="utf-8") as file:  # noqa: PTH123 - a resource, not a path
        file.write(text + "\n")

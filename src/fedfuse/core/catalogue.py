"""All methods as plain data, so that listing them costs no import of what they are made of.

The file next to the methods is written by `make catalogue`; a test compares it with the registry.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from importlib.metadata import entry_points
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Literal

from fedfuse.errors import ConfigError, suggest

if TYPE_CHECKING:
    from fedfuse.core.registry import Method

Family = Literal[
    "weights", "base", "adapters", "posterior", "statistics", "predictions", "matched", "server rows", "pruned"
]

# Where a method takes its mean, in the order in which families are listed.
FAMILIES: dict[Family, str] = {
    "weights": "of the weights",
    "base": "of moves from a common base",
    "adapters": "of low-rank adapters",
    "posterior": "in a chart of the posterior",
    "statistics": "of sufficient statistics",
    "predictions": "of predictions",
    "matched": "after hidden units are matched",
    "server rows": "of the weights, beside rows of the server's own",
    "pruned": "of a network that shrinks",
}

_FILE = "methods/catalogue.json"


def list_catalogue() -> list[dict[str, Any]]:
    """Every method's name, first sentence, paper, family, options and what clients reveal.

    Methods of other packages are asked for theirs, which imports them.

    Example:
        >>> [entry["name"] for entry in list_catalogue()][:2]
        ['aalv', 'alpha']
    """
    return describe_methods() if entry_points(group="fedfuse.methods") else _read_file()


def method_options(name: str) -> tuple[str, ...]:
    """The names of a method's options, without importing what methods are made of where that can be avoided.

    Raises:
        ConfigError: if there is no such method, with the nearest name.

    Example:
        >>> method_options("fedprox")
        ('mu',)
    """
    others = "fedfuse.core.registry" in sys.modules or entry_points(group="fedfuse.methods")  # may have brought more
    if ":" in name or others:
        from fedfuse.core.registry import load_method  # late, as below

        return tuple(load_method(name).schema.model_fields)
    entries = {entry["name"]: entry for entry in _read_file()}
    if name not in entries:
        raise unknown_method(name, entries)
    return tuple(option["name"] for option in entries[name]["options"])


def unknown_method(name: str, known: Iterable[str]) -> ConfigError:
    """One sentence about a method that does not exist, with the nearest one that does."""
    return ConfigError(f"there is no method {name!r}{suggest(name, known)} `fedfuse methods` lists them all")


def _read_file() -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = json.loads((files("fedfuse") / _FILE).read_text(encoding="utf-8"))
    return entries


def describe_methods() -> list[dict[str, Any]]:
    """The same, asked of the methods themselves."""
    from fedfuse.core.registry import all_methods  # late: it brings every method, and torch with them

    return [_describe(method) for method in all_methods().values()]


def describe_local_method(name: str) -> dict[str, Any]:
    """The same of one method of the user's own, named module:function or file.py:function."""
    from fedfuse.core.registry import load_method  # late, as above

    return _describe(load_method(name))


def _describe(method: Method) -> dict[str, Any]:
    options = [{"name": o.name, "type": o.type, "default": o.default, "text": o.text} for o in method.options]
    facts = {"name": method.name, "summary": method.summary, "paper": method.paper, "family": method.family}
    recipe = method.recipe()
    told = {"reveals": list(recipe.reveals), "only_sums": recipe.only_sums}
    return {**facts, "text": method.text, **told, "options": options}


def write_catalogue() -> None:
    """Write the file again, from the methods themselves."""
    text = json.dumps(describe_methods(), indent=1, ensure_ascii=False, default=str)
    with open(str(files("fedfuse") / _FILE), "w", encoding="utf-8") as file:  # noqa: PTH123 - a resource, not a path
        file.write(text + "\n")

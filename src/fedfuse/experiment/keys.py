"""Dotted keys of an experiment file: set from the command line, swept over, compared between two runs."""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

from fedfuse.errors import ConfigError


def assign(values: dict[str, Any], text: str) -> None:
    """Put one `a.b=c` into the values; c is TOML, or else a plain word.

    Example:
        >>> values = {"methods": [{"name": "fedprox"}]}
        >>> assign(values, "methods.0.mu=0.5")
        >>> values
        {'methods': [{'name': 'fedprox', 'mu': 0.5}]}
    """
    path, equals, given = text.partition("=")
    if not equals or not path:
        raise ConfigError(f"--set {text!r} is not of the form key.key=value")
    try:
        value = tomllib.loads(f"v = {given}")["v"]
    except tomllib.TOMLDecodeError:
        value = given
    set_at_path(values, path.strip(), value, f"--set {text!r}")


def set_at_path(values: dict[str, Any], path: str, value: Any, text: str) -> None:
    """Put a value at a dotted path; numbers are places in a list."""
    *parents, leaf = path.split(".")
    container: Any = values
    for key in parents:
        container = _descend(container, key, text)
    if isinstance(container, list):
        container[_index(leaf, container, text)] = value
    else:
        container[leaf] = value


def _descend(container: Any, key: str, text: str) -> Any:
    if isinstance(container, list):
        return container[_index(key, container, text)]
    found = container.setdefault(key, {})
    if not isinstance(found, dict | list):
        raise ConfigError(f"{text}: {key!r} is a value, not a table")
    return found


def _index(key: str, container: list[Any], text: str) -> int:
    if not key.isdecimal() or int(key) >= len(container):
        raise ConfigError(f"{text}: {key!r} is not a place in a list of {len(container)}")
    return int(key)


def sweep_cells(values: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Every combination of the sweep's values, written into the rest of the file."""
    sweep = dict(flatten_keys(values.pop("sweep", {})))
    if not all(key and isinstance(choices, list) and choices for key, choices in sweep.items()):
        raise ConfigError("sweep must be a table of keys with a list of values each")
    for choice in itertools.product(*sweep.values()):
        cell = copy.deepcopy(values)
        for key, value in zip(sweep, choice, strict=True):
            set_at_path(cell, key, value, f"sweep.{key}")
        words = [name_part(value) for value in choice]
        yield cell | {"name": "-".join([str(values["name"]), *words])}


def flatten_keys(table: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """A table's entries by dotted key, whether the user quoted the dots or not.

    Example:
        >>> dict(flatten_keys({"data": {"clients": [5, 10]}, "local.epochs": [1]}))
        {'data.clients': [5, 10], 'local.epochs': [1]}
    """
    if not isinstance(table, dict):
        yield prefix.rstrip("."), table
        return
    for key, value in table.items():
        yield from flatten_keys(value, f"{prefix}{key}.")


def changed_keys(old: object, new: object) -> dict[str, str]:
    """What differs between two tables, by dotted key, in words; places in a list are keys too.

    Example:
        >>> changed_keys({"data": {"clients": 3}, "rounds": 2}, {"data": {"clients": 5}, "rounds": 2, "select": "last"})
        {'data.clients': 'was 3 and is now 5', 'select': 'was not set and is now "last"'}
    """
    before, after = dict(_leaves(old)), dict(_leaves(new))
    keys = dict.fromkeys([*before, *after])
    return {
        key: f"was {_value_text(before, key)} and is now {_value_text(after, key)}"
        for key in keys
        if key not in before or key not in after or before[key] != after[key]
    }


def _leaves(value: object, prefix: str = "") -> Iterator[tuple[str, object]]:
    entries = value.items() if isinstance(value, dict) else list(enumerate(value)) if isinstance(value, list) else ()
    if not entries:
        yield prefix.rstrip("."), value
    for key, part in entries:
        yield from _leaves(part, f"{prefix}{key}.")


def _value_text(values: Mapping[str, object], key: str) -> str:
    text = json.dumps(values[key], default=str) if key in values else "not set"
    return text if len(text) <= 60 else text[:59] + "…"


def name_part(value: Any) -> str:
    """A swept value as part of a name.

    Example:
        >>> name_part({"kind": "dirichlet", "alpha": 0.1})
        'dirichlet-0.1'
    """
    if isinstance(value, dict):
        return "-".join(name_part(v) for v in value.values())
    if isinstance(value, list):
        return "-".join(name_part(v) for v in value)
    return str(value)


def file_name(label: str) -> str:
    """A label as part of a file's name.

    Example:
        >>> file_name("fedprox(mu=0.1)")
        'fedprox_mu_0.1'
    """
    name = re.sub(r"[^A-Za-z0-9.+-]+", "_", label).strip("_.")
    if name and len(name) <= 100:
        return name
    return f"{name[:80]}{hashlib.sha256(label.encode()).hexdigest()[:12]}"

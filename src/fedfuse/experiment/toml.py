"""Plain values as TOML text that reads back as the same values."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def to_toml(values: Mapping[str, Any]) -> str:
    """A table of plain values as a TOML file: numbers, words, lists and tables, each on a line of its own.

    Example:
        >>> print(to_toml({"rounds": 2, "data": {"source": "digits"}, "methods": [{"name": "fedavg"}]}), end="")
        rounds = 2
        <BLANKLINE>
        [data]
        source = "digits"
        <BLANKLINE>
        [[methods]]
        name = "fedavg"
    """
    return "".join(_lines(values, ""))


def _lines(values: Mapping[str, Any], prefix: str) -> Iterator[str]:
    """Plain values first, then tables and lists of tables, as TOML wants them."""
    tables = {key: value for key, value in values.items() if isinstance(value, Mapping) or _is_tables(value)}
    for key, value in values.items():
        if key not in tables:
            yield f"{_key(key)} = {_value(value)}\n"
    for key, value in tables.items():
        name = f"{prefix}{_key(key)}"
        for head, each in [(f"[{name}]", value)] if isinstance(value, Mapping) else [(f"[[{name}]]", v) for v in value]:
            yield f"\n{head}\n"
            yield from _lines(each, f"{name}.")


def _is_tables(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(v, Mapping) for v in value)


def _key(key: str) -> str:
    return key if _BARE.fullmatch(key) else _value(key)


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(k)} = {_value(v)}" for k, v in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(v) for v in value) + "]"
    if isinstance(value, float):
        return repr(value)  # inf and nan are words of TOML, and not of JSON
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")

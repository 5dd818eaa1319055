"""Show what aggregators and steps noted, whatever it is: numbers, words, weights by layer and client."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedfuse.report.heat import heat_map
from fedfuse.report.layers import layer_lines
from fedfuse.report.plots import Figure, Groups
from fedfuse.report.read import Row, finite, part
from fedfuse.report.scores import last_rows, mean_sd
from fedfuse.report.svg import short

LIMIT = 40
"""Lines per method; the ledger has them all."""

BY_ROUND = {"gaussianity": "Distance from Gaussian of each layer"}
"""Tables by layer and client that are shown round by round, with their titles."""


@dataclass(frozen=True, slots=True)
class MethodFacts:
    """What one method noted in its last round.

    Attributes:
        label: the method.
        lines: name and value, over all seeds.
        more: how many lines were left out.
        maps: tables of numbers, those of the first seed.
    """

    label: str
    lines: tuple[tuple[str, str], ...]
    more: int
    maps: tuple[Figure, ...]


def remarks(groups: Groups) -> list[str]:
    """What parts of a method wanted a reader to know before comparing (the fact `remark`), once per method.

    Example:
        >>> remarks({"feddu": [{"seed": 0, "round": r, "facts": {"remark": "it is FedAvg"}} for r in (1, 2)]})
        ['feddu: it is FedAvg.']
    """
    found = {(label, words) for label, rows in groups.items() for row in rows if (words := _remark(row))}
    return [f"{label}: {words.rstrip('.')}." for label in groups for name, words in sorted(found) if name == label]


def _remark(row: Row) -> str:
    words = part(row, "facts").get("remark")
    return words if isinstance(words, str) else ""


def method_facts(groups: Groups) -> list[MethodFacts]:
    """What each method noted in its last round, without those that noted nothing.

    Example:
        >>> method_facts({"wb": [{"seed": 0, "round": 1, "facts": {"steps": 3}}]})[0].lines
        (('steps', '3'),)
    """
    found = [_facts_of(label, rows) for label, rows in groups.items()]
    return [note for note in found if note.lines or note.maps]


def flatten(facts: Mapping[str, Any], prefix: str = "") -> dict[str, object]:
    """Nested facts as one level with dotted names; tables of numbers are left to the heat maps.

    Example:
        >>> flatten({"rounds": 3, "damping": {"fc1": 0.1}})
        {'rounds': 3, 'damping.fc1': 0.1}
    """
    flat: dict[str, object] = {}
    for key, value in facts.items():
        name = f"{prefix}{key}"
        if not isinstance(value, Mapping) or (value and _only_numbers(value) and len(value) > 8):
            flat[name] = value
        elif not _is_table(value):
            flat |= flatten(value, f"{name}.")
    return flat


def tables(facts: Mapping[str, Any], prefix: str = "") -> dict[str, Mapping[str, Mapping[str, Any]]]:
    """The parts of nested facts that are tables: names → names → numbers.

    Example:
        >>> tables({"solver": "cg", "weights": {"fc1": {"site-1": 0.5}}})
        {'weights': {'fc1': {'site-1': 0.5}}}
    """
    found: dict[str, Mapping[str, Mapping[str, Any]]] = {}
    for key, value in facts.items():
        if isinstance(value, Mapping):
            name = f"{prefix}{key}"
            found |= {name: value} if _is_table(value) else tables(value, f"{name}.")
    return found


def fact_name(key: str) -> str:
    """A fact's key as words.

    Example:
        >>> fact_name("damping.conv1_weight")
        'damping · conv1 weight'
    """
    return key.replace("_", " ").replace(".", " · ")


def fact_text(value: object) -> str:
    """A fact as text: long lists of numbers by their range.

    Example:
        >>> fact_text(0.123456), fact_text(True), fact_text([1, 2]), fact_text(list(range(100)))
        ('0.1235', 'yes', '1, 2', '100 numbers: least 0, median 49.5, most 99')
    """
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return fact_text(list(value.values()))
    if isinstance(value, list):
        return _list_text(value)
    given = finite(value)
    if given is not None:
        return f"{given:,.0f}" if given.is_integer() and abs(given) < 1e15 else f"{given:.4g}"
    return "–" if value is None else short(str(value), 200)


def _facts_of(label: str, rows: Sequence[Row]) -> MethodFacts:
    last = last_rows(rows)
    flats = [flatten(part(row, "facts")) for row in last]
    names = list(dict.fromkeys(name for flat in flats for name in flat))
    lines = [(fact_name(name), _over_seeds([flat[name] for flat in flats if name in flat])) for name in names]
    maps = [_draw_table(name, table, rows, last[0]) for name, table in tables(part(last[0], "facts")).items()]
    return MethodFacts(label, tuple(lines[:LIMIT]), max(0, len(lines) - LIMIT), tuple(maps))


def _draw_table(name: str, table: Mapping[str, Mapping[str, Any]], rows: Sequence[Row], last: Row) -> Figure:
    """A table over the rounds where that is wanted and there are some, else as it was in the last one."""
    lines = layer_lines(rows, name, BY_ROUND[name]) if name in BY_ROUND else None
    return lines or _map(name, table, last)


def _over_seeds(values: Sequence[object]) -> str:
    """Numbers as mean ± sd, anything else as its different values."""
    numbers = [finite(value) for value in values]
    whole = mean_sd(numbers)
    if whole is None or None in numbers:
        return "; ".join(dict.fromkeys(map(fact_text, values)))
    return fact_text(whole.mean) + (f" ± {whole.sd:.2g}" if whole.sd else "")


def _map(name: str, table: Mapping[str, Mapping[str, Any]], row: Row) -> Figure:
    columns = list(dict.fromkeys(str(key) for line in table.values() for key in line))
    values = np.full((len(table), len(columns)), np.nan)
    for i, line in enumerate(table.values()):
        for key, value in line.items():
            given = finite(value)
            values[i, columns.index(str(key))] = np.nan if given is None else given
    picture = heat_map(name, [str(key) for key in table], columns, np.abs(values), "number")
    signed = " Shaded by size, without the sign." if np.nanmin(values, initial=0.0) < 0 else ""
    return Figure(name.replace("_", " "), picture, f"Seed {row['seed']}, round {row['round']}.{signed}")


def _is_table(value: Mapping[str, Any]) -> bool:
    return bool(value) and all(isinstance(line, Mapping) and line and _only_numbers(line) for line in value.values())


def _only_numbers(value: Mapping[str, Any]) -> bool:
    return all(entry is None or finite(entry) is not None for entry in value.values())


def _list_text(values: Sequence[object]) -> str:
    numbers = [given for value in values if (given := finite(value)) is not None]
    if len(values) > 8 and len(numbers) == len(values):
        least, middle, most = min(numbers), statistics.median(numbers), max(numbers)
        return f"{len(numbers)} numbers: least {fact_text(least)}, median {fact_text(middle)}, most {fact_text(most)}"
    shown = ", ".join(fact_text(value) for value in values[:8])
    return shown + (f", … ({len(values)} in all)" if len(values) > 8 else "")

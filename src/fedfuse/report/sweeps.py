"""What several runs differ in, so that they are named and ordered by it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedfuse.report.read import Run, finite, settings_in

MANY_KEYS = 3
"""Runs that differ in more keys than this are told apart by their names."""


@dataclass(frozen=True, slots=True)
class Swept:
    """A key whose value is a number in every run, and the values in the runs' order."""

    key: str
    values: tuple[float, ...]

    @property
    def title(self) -> str:
        """The key for readers."""
        return key_words(self.key)


def differing_keys(runs: Sequence[Run]) -> dict[str, tuple[Any, ...]]:
    """The configuration's keys in which runs differ, with the value of each run; the name aside.

    Example:
        >>> one, two = (Run("", f"data.clients = {n}", {}, {}, ()) for n in (5, 10))
        >>> differing_keys([one, two])
        {'data.clients': (5, 10)}
    """
    flats = [dict(_flatten(settings_in(run.config_text))) for run in runs]
    keys = dict.fromkeys(key for flat in flats for key in flat if key != "name")
    found = {key: tuple(flat.get(key) for flat in flats) for key in keys}
    return {key: values for key, values in found.items() if any(value != values[0] for value in values)}


def swept_key(runs: Sequence[Run]) -> Swept | None:
    """The one key with numbers that a sweep varies; None if the runs differ in anything else too.

    Example:
        >>> swept_key([Run("", f"data.partition.alpha = {a}", {}, {}, ()) for a in (0.1, 1.0)])
        Swept(key='data.partition.alpha', values=(0.1, 1.0))
    """
    found = differing_keys(runs)
    if len(found) != 1:
        return None
    (key, values), *_ = found.items()
    numbers = [finite(value) for value in values]
    given = tuple(value for value in numbers if value is not None)
    return Swept(key, given) if len(set(given)) == len(runs) else None


def run_titles(runs: Sequence[Run]) -> list[str]:
    """A short title per run: what it differs in, or its name where that says less.

    Example:
        >>> run_titles([Run("study-0.1", "data.partition.alpha = 0.1", {}, {}, ()),
        ...             Run("study-1", "data.partition.alpha = 1.0", {}, {}, ())])
        ['alpha = 0.1', 'alpha = 1']
    """
    found = differing_keys(runs)
    titles = [", ".join(_value_words(key, values[at]) for key, values in found.items()) for at in range(len(runs))]
    telling = 0 < len(found) <= MANY_KEYS and len(set(titles)) == len(runs)
    return titles if telling else [run.name for run in runs]


def key_words(key: str) -> str:
    """A key of the configuration for readers: its last words.

    Example:
        >>> key_words("data.partition.classes_per_client"), key_words("methods.0.mu")
        ('classes per client', 'mu')
    """
    return key.rsplit(".", 1)[-1].replace("_", " ")


def _value_words(key: str, value: Any) -> str:
    """A value, with its key where the value alone does not say what it is."""
    if isinstance(value, str):
        return value
    given = finite(value)
    return f"{key_words(key)} = {value if given is None else f'{given:g}'}"


def _flatten(table: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Entries by dotted key; a list of tables by its places."""
    if isinstance(table, Mapping):
        for key, value in table.items():
            yield from _flatten(value, f"{prefix}{key}.")
    elif isinstance(table, list) and any(isinstance(entry, Mapping) for entry in table):
        for at, entry in enumerate(table):
            yield from _flatten(entry, f"{prefix}{at}.")
    else:
        yield prefix.rstrip("."), table

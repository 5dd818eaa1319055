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


@dataclass(frozen=True, slots=True)
class Panel:
    """The runs of a sweep that differ in one key alone, and what the other keys are there."""

    title: str
    runs: tuple[Run, ...]
    swept: Swept


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


def sweep_panels(runs: Sequence[Run], along: str = "") -> tuple[Panel, ...]:
    """A sweep as curves: against one key with numbers, and a panel for every value of the other keys.

    Args:
        runs: those of a sweep.
        along: the key that curves run along; by default the one with most values.

    Returns:
        Nothing where no key has numbers at which all panels have at least two runs, one run each.

    Example:
        >>> text = "data = {{ clients = {}, source = '{}' }}"
        >>> runs = [Run("", text.format(k, m), {}, {}, ()) for m in "ab" for k in (5, 9)]
        >>> [(panel.title, panel.swept) for panel in sweep_panels(runs)]
        [('a', Swept(key='data.clients', values=(5.0, 9.0))), ('b', Swept(key='data.clients', values=(5.0, 9.0)))]
    """
    found = differing_keys(runs)
    if not 1 <= len(found) <= MANY_KEYS:
        return ()
    keys = [key for key in found if not along or along in (key, key.rsplit(".", 1)[-1])]
    for key in sorted(keys, key=lambda key: -len({repr(value) for value in found[key]})):
        panels = _panels_along(key, runs, found)
        if all(len(set(panel.swept.values)) == len(panel.runs) > 1 for panel in panels):
            return panels
    return ()


def _panels_along(key: str, runs: Sequence[Run], found: Mapping[str, tuple[Any, ...]]) -> tuple[Panel, ...]:
    """The runs by the values of all keys but one; numbers in rising order. Without numbers a panel is empty."""
    others = {other: values for other, values in found.items() if other != key}
    places: dict[tuple[str, ...], list[int]] = {}
    for at in sorted(range(len(runs)), key=lambda at: [_rank(values[at]) for values in others.values()]):
        places.setdefault(tuple(_value_words(other, values[at]) for other, values in others.items()), []).append(at)
    numbers = [finite(value) for value in found[key]]
    return tuple(
        Panel(
            ", ".join(words),
            tuple(runs[at] for at in here),
            Swept(key, tuple(given for at in here if (given := numbers[at]) is not None)),
        )
        for words, here in places.items()
    )


def _rank(value: Any) -> float:
    """Numbers by their size, anything else as it comes."""
    given = finite(value)
    return 0.0 if given is None else given


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

"""Read run directories: what experiments left on disk, and what several of them differ in."""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedfuse.core.files import open_line, regular
from fedfuse.errors import ConfigError

Row = Mapping[str, Any]
"""One ledger line: the scores and facts of one method, seed and round."""


@dataclass(frozen=True, slots=True)
class Run:
    """What one run directory says.

    Attributes:
        name: the experiment's name, or the directory's when the configuration has none.
        config_text: the resolved configuration, as written.
        environment: versions, platform, threads and facts about the data.
        partition: class names, and per seed the rows of each class that each client holds.
        rows: the ledger, one row per label, seed and round, in order of first appearance.
        made_of: the digests of the code and the rows it was made of; nothing of a run from before they were noted.
    """

    name: str
    config_text: str
    environment: Mapping[str, Any]
    partition: Mapping[str, Any]
    rows: tuple[Row, ...]
    made_of: Mapping[str, Any] = field(default_factory=dict)


def read_run(directory: Path) -> Run:
    """Read a run directory; only its ledger must be there.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> line = '{"method": "fedavg", "seed": 0, "round": 1, "accuracy": 0.5}'
        >>> _ = (folder / "ledger.jsonl").write_text(line)
        >>> [row["label"] for row in read_run(folder).rows]
        ['fedavg']
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise ConfigError(f"{directory} is not a directory, expected one that `fedfuse run` has written")
    rows = _read_ledger(directory / "ledger.jsonl")
    config = _read_text(directory / "config.toml") or ""
    name = settings_in(config).get("name")
    return Run(
        name=name if isinstance(name, str) and name else directory.resolve().name,
        config_text=config,
        environment=_read_object(directory / "environment.json"),
        partition=_read_object(directory / "partition.json"),
        rows=rows,
        made_of=_read_object(directory / "made-of.json"),
    )


def _read_ledger(path: Path) -> tuple[Row, ...]:
    text = _read_text(path)
    if text is None:
        raise ConfigError(f"{path.parent} has no ledger.jsonl, expected a directory that `fedfuse run` has written")
    rows: dict[tuple[str, int, int], Row] = {}
    for at, line in enumerate(text.split("\n"), start=1):
        # empty, or what a crash leaves of a line: an object that was begun and not closed
        if not line.strip() or (line.startswith("{") and not line.rstrip().endswith("}")):
            continue
        row = _parse(line)
        if row is None:
            raise ConfigError(
                f"{path} line {at} is no ledger line or damaged, expected a JSON object with method, seed and round: "
                "remove that line, then continue the run with --resume"
            )
        rows[row["label"], row["seed"], row["round"]] = row  # a line written again after a resume replaces the first
    if not rows:
        raise ConfigError(f"{path} records no finished round, expected at least one: let the run reach its first score")
    return tuple(rows.values())


def _parse(line: str) -> Row | None:
    """The line as a row that has its label, seed and round, or None."""
    try:
        row = open_line(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict):
        return None
    label = row.get("label") or row.get("method")
    whole = all(type(row.get(key)) is int for key in ("seed", "round"))
    if not isinstance(label, str) or not whole:
        return None
    return {**row, "label": label, "method": str(row.get("method") or label)}


def _read_text(path: Path) -> str | None:
    try:
        return regular(path).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}), expected a readable file") from error


def _read_object(path: Path) -> Mapping[str, Any]:
    text = _read_text(path)
    try:
        value = {} if text is None else json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is damaged, expected JSON: remove it to do without it") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds {type(value).__name__}, expected a JSON object: remove it to do without it")
    return value


def settings_in(config: str) -> Mapping[str, Any]:
    """A configuration's settings, none where it cannot be read.

    Example:
        >>> settings_in("rounds = 3"), settings_in("rounds = ")
        ({'rounds': 3}, {})
    """
    try:
        return tomllib.loads(config)
    except tomllib.TOMLDecodeError:
        return {}


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """The run directories that paths stand for: a sweep's folder stands for every run in it, a page for none.

    So `runs/*` and `runs/sweep/*` mean what one would think. A directory given twice counts once.

    Raises:
        ConfigError: for a path that is neither, and where no run is found at all.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> for name in ("alpha-10", "alpha-2"):
        ...     (folder / name).mkdir()
        ...     _ = (folder / name / "ledger.jsonl").write_text("")
        >>> [path.name for path in find_runs([folder])]
        ['alpha-2', 'alpha-10']
    """
    found: dict[Path, Path] = {}
    for path in map(Path, paths):
        if path.is_file() and path.suffix == ".html":
            continue
        inside = sorted((ledger.parent for ledger in path.glob("*/ledger.jsonl")), key=_natural)
        is_sweep = inside and not (path / "ledger.jsonl").exists()
        found |= {run.resolve(): run for run in (inside if is_sweep else [path])}
    if not found:
        raise ConfigError("no run directory was given, expected at least one that `fedfuse run` has written")
    return list(found.values())


def _natural(path: Path) -> list[tuple[float, str]]:
    """Sort key that puts alpha-2 before alpha-10, and 0.5 before 10."""
    words = re.split(r"(\d+(?:\.\d+)?)", path.name)
    return [(float(word), "") if at % 2 else (-1.0, word) for at, word in enumerate(words)]


def number(row: Row, key: str) -> float | None:
    """A finite number from a row, or None when it is absent, null, infinite or no number.

    Example:
        >>> number({"nll": 2}, "nll"), number({"nll": float("nan")}, "nll"), number({}, "nll")
        (2.0, None, None)
    """
    return finite(row.get(key))


def finite(value: object) -> float | None:
    """The value as a finite float, or None when it is not one.

    What no run can mean (beyond 1e100) counts as infinite, and what it cannot measure (below
    1e-100) as zero, so that no sum, square or ratio of two such numbers overflows.

    Example:
        >>> finite(1), finite(True), finite("1")
        (1.0, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        given = float(value)
    except OverflowError:  # JSON allows integers of any length
        return None
    if math.isnan(given) or abs(given) > 1e100:
        return None
    return given if abs(given) > 1e-100 else 0.0


def part(row: Row, key: str) -> Mapping[str, Any]:
    """A mapping from a row, empty when it is absent or something else.

    Example:
        >>> part({"facts": {"steps": 3}}, "facts"), part({"facts": None}, "facts")
        ({'steps': 3}, {})
    """
    value = row.get(key)
    return value if isinstance(value, Mapping) else {}


def items(row: Row, key: str) -> list[Any]:
    """A list from a row, empty when it is absent or something else.

    Example:
        >>> items({"refused": [1]}, "refused"), items({}, "refused")
        ([1], [])
    """
    value = row.get(key)
    return value if isinstance(value, list) else []


MANY_KEYS = 3
"""Runs that differ in more keys than this are told apart by their names."""


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


def _value_words(key: str, value: Any) -> str:
    """A value, with its key where the value alone does not say what it is."""
    if isinstance(value, str):
        return value
    given = finite(value)
    return f"{key_words(key)} = {value if given is None else f'{given:g}'}"


def key_words(key: str) -> str:
    """A key of the configuration for readers: its last words.

    Example:
        >>> key_words("data.partition.classes_per_client"), key_words("methods.0.mu")
        ('classes per client', 'mu')
    """
    return key.rsplit(".", 1)[-1].replace("_", " ")


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
    # numbers by their size, anything else as it comes
    for at in sorted(range(len(runs)), key=lambda at: [finite(values[at]) or 0.0 for values in others.values()]):
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

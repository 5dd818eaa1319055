"""What a run records and gives: the lines of its ledger, and rows for a person, a page or a program."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedfuse.core.files import open_line, seal_line, write_atomically
from fedfuse.errors import ConfigError

if TYPE_CHECKING:
    import pandas as pd


@dataclass(slots=True)
class Ledger:
    """A file of JSON lines, each with its checksum, appended and flushed; one that was cut or damaged is ignored.

    The file is read once: a run holds its directory (`RunFolder.lock`), so no other process writes there meanwhile.
    """

    path: Path
    _lines: dict[tuple[object, ...], dict[str, Any]] | None = field(default=None, init=False, repr=False, compare=False)

    def lines(self) -> list[dict[str, Any]]:
        """Every whole line; the last one for a label, seed and round wins."""
        if self._lines is None:
            texts = self._read().decode(errors="replace").splitlines()
            self._lines = {_place(line): line for text in texts if (line := _open(text)) is not None}
        return list(self._lines.values())

    def append(self, line: Mapping[str, Any]) -> None:
        """Write one line and make sure it is on disk."""
        text = seal_line(plain(line))
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(text + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as why:
            raise ConfigError(f"cannot write {self.path}: {why.strerror or why}; free some space and --resume") from why
        if self._lines is not None and (written := _open(text)) is not None:
            self._lines[_place(written)] = written

    def keep(self, wanted: Callable[[Mapping[str, Any]], bool]) -> None:
        """Rewrite the file with the lines that pass; it is replaced whole."""
        kept = [line for line in self.lines() if wanted(line)]
        with write_atomically(self.path) as file:
            for line in kept:
                file.write((seal_line(line) + "\n").encode())
        self._lines = {_place(line): line for line in kept}

    def mend(self) -> None:
        """Remove a line that a crash left unfinished, so that the next one starts on a new line, and damaged ones."""
        data = self._read()
        if (whole := data.rfind(b"\n") + 1) < len(data):
            os.truncate(self.path, whole)
            self._lines = None
        if any(_open(text) is None for text in data[:whole].decode(errors="replace").splitlines()):
            self.keep(lambda _: True)

    def _read(self) -> bytes:
        """The file's bytes, none where there is no file."""
        try:
            return self.path.read_bytes()
        except FileNotFoundError:
            return b""
        except OSError as why:
            raise ConfigError(
                f"the ledger {self.path} cannot be read: {why.strerror or why}; remove what lies there or choose "
                "another --out"
            ) from why


def _open(text: str) -> dict[str, Any] | None:
    """A line as it was written, None where it was not."""
    try:
        line = open_line(text)
    except (ValueError, RecursionError):
        return None
    return line if isinstance(line, dict) and {"label", "seed", "round"} <= line.keys() else None


def _place(line: Mapping[str, Any]) -> tuple[object, ...]:
    return line["label"], line["seed"], line["round"]


FLAT = (
    "method",
    "label",
    "seed",
    "round",
    "accuracy",
    "nll",
    "perplexity",
    "ece",
    "brier",
    "client_accuracy_mean",
    "client_accuracy_worst10",
    "bytes_up",
    "bytes_down",
    "flops",
    "parameters",
    "weights",
    "train_seconds",
    "server_seconds",
)


def write_results(path: Path, name: str, lines: Iterable[Mapping[str, Any]]) -> None:
    """The flat table of all rows, for machines."""
    write_json(path, {"name": name, "rows": [flat(line) for line in lines]})


def flat(line: Mapping[str, Any]) -> dict[str, Any]:
    """A ledger line as a row of results.json: plain numbers only, and how many clients were refused or weakened.

    Example:
        >>> row = flat({"method": "fedavg", "round": 1, "refused": [{"client": "a"}]})
        >>> row["round"], row["refused"], row["accuracy"]
        (1, 1, None)
    """
    clipped = {entry["client"] for entry in line.get("clipped", ())}  # who has an entry for each lever
    row = {key: line.get(key) for key in FLAT} | {"refused": len(line.get("refused", ())), "clipped": len(clipped)}
    return row | ({"selected": line["selected"]} if "selected" in line else {})


def write_json(path: Path, value: object) -> None:
    """A JSON file that appears whole or not at all."""
    with write_atomically(path) as file:
        file.write((json.dumps(plain(value), indent=1) + "\n").encode())


def plain(value: Any) -> Any:
    """A value that JSON can hold: numbers that are not finite become null.

    Example:
        >>> plain({"a": (1, float("nan"))})
        {'a': [1, None]}
    """
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(v) for v in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, bool | int | str) or value is None:
        return value
    return plain(value.tolist()) if hasattr(value, "tolist") else str(value)


@dataclass(frozen=True, slots=True, repr=False)
class Results:
    """What a run gives: its rows, one for each method, seed and round, and where its files are."""

    name: str
    folder: Path
    rows: tuple[Mapping[str, Any], ...]

    def table(self) -> str:
        """Mean ± standard deviation over seeds, as a markdown table; of a sweep, one table per experiment."""
        each = self._by_experiment()
        if len(each) == 1:
            return _markdown(self.rows)
        return "\n\n".join(f"### {name}\n\n{_markdown(rows)}" for name, rows in each.items())

    def frame(self) -> pd.DataFrame:
        """The rows as a pandas data frame: experiment, method, label, seed, round, scores and costs.

        Raises:
            ConfigError: if pandas is not installed.
        """
        try:
            import pandas as pd
        except ImportError as why:
            raise ConfigError("Results.frame needs pandas; install fedfuse[tables]") from why
        return pd.DataFrame([{"experiment": row["experiment"], **flat(row)} for row in self.rows])

    def __repr__(self) -> str:
        labels = list(dict.fromkeys(row["label"] for row in self.rows))
        seeds = len({row["seed"] for row in self.rows})
        rounds = max((row["round"] for row in self.rows), default=0)
        shown = ", ".join(labels[:6]) + (", …" if len(labels) > 6 else "")
        return f"Results({self.name!r}: {shown}; seeds {seeds}, rounds {rounds}; files in {str(self.folder)!r})"

    def _repr_html_(self) -> str:
        """The tables as a notebook shows them."""
        parts = [
            f"<p><b>{escape(name)}</b></p>{_html(_markdown(rows))}" for name, rows in self._by_experiment().items()
        ]
        return "\n".join([*parts, f"<p>files: <code>{escape(str(self.folder))}</code></p>"])

    def dropped_clients(self) -> list[str]:
        """Who was left out of a round for a crash, each in words: client, method, seed, round and reason."""
        return [
            f"{entry['client']} in round {row['round']} of {row['label']}, seed {row['seed']} ({entry['reason']})"
            for row in self.rows
            for entry in row.get("dropped", ())
        ]

    def judged_clients(self) -> list[str]:
        """Whom the door refused or weakened, each in words: client, method, seed, round and the first reason."""
        found: dict[tuple[object, ...], str] = {}
        for row in self.rows:
            for what in ("refused", "clipped"):
                for entry in row.get(what, ()):
                    when = f"{what} in round {row['round']} of {row['label']}, seed {row['seed']}"
                    why = f"{entry['field']} is {entry['got']}, expected {entry['expected']}"
                    found.setdefault((when, entry["client"]), f"{entry['client']} was {when} ({why})")
        return list(found.values())

    def _by_experiment(self) -> dict[str, list[Mapping[str, Any]]]:
        each: dict[str, list[Mapping[str, Any]]] = {}
        for row in self.rows:
            each.setdefault(row["experiment"], []).append(row)
        return each


def _markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    from fedfuse.report import markdown, summary  # late: a command with a misspelt key does not wait for the page

    return markdown(summary(rows))


def _html(table: str) -> str:
    """A markdown table as HTML, so that both say the same.

    Example:
        >>> _html(chr(10).join(["| method | NLL |", "|---|---:|", "| fedavg | **0.9** |"]))
        '<table><tr><th>method</th><th>NLL</th></tr><tr><td>fedavg</td><td><b>0.9</b></td></tr></table>'
    """
    rows = []
    for place, line in enumerate(line.strip() for line in table.splitlines() if line.startswith("|")):
        if place == 1:  # the rule below the heads
            continue
        tag, cells = "th" if place == 0 else "td", [cell.strip() for cell in line.strip("|").split("|")]
        inner = [(escape(cell.removeprefix("**").removesuffix("**")), cell.startswith("**")) for cell in cells]
        rows.append("".join(f"<{tag}>{f'<b>{text}</b>' if bold else text}</{tag}>" for text, bold in inner))
    return "<table>" + "".join(f"<tr>{row}</tr>" for row in rows) + "</table>"

"""The ledger: one line per method, seed and round, on disk before anything else happens."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedfuse.core.files import write_atomically
from fedfuse.core.sealed import open_line, seal_line
from fedfuse.errors import ConfigError

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


@dataclass(frozen=True, slots=True)
class Ledger:
    """A file of JSON lines, each with its checksum, appended and flushed; one that was cut or damaged is ignored."""

    path: Path

    def append(self, line: Mapping[str, Any]) -> None:
        """Write one line and make sure it is on disk."""
        text = seal_line(plain(line)) + "\n"
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
        except OSError as why:
            raise ConfigError(f"cannot write {self.path}: {why.strerror or why}; free some space and --resume") from why

    def mend(self) -> None:
        """Remove a line that a crash left unfinished, so that the next one starts on a new line, and damaged ones."""
        data = self._read()
        if (whole := data.rfind(b"\n") + 1) < len(data):
            os.truncate(self.path, whole)
        if any(_open(text) is None for text in data[:whole].decode(errors="replace").splitlines()):
            self.keep(lambda _: True)

    def lines(self) -> list[dict[str, Any]]:
        """Every whole line; the last one for a label, seed and round wins."""
        found: dict[tuple[object, ...], dict[str, Any]] = {}
        for text in self._read().decode(errors="replace").splitlines():
            if (line := _open(text)) is not None:
                found[line["label"], line["seed"], line["round"]] = line
        return list(found.values())

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

    def keep(self, wanted: Callable[[Mapping[str, Any]], bool]) -> None:
        """Rewrite the file with the lines that pass; it is replaced whole."""
        kept = [line for line in self.lines() if wanted(line)]
        with write_atomically(self.path) as file:
            for line in kept:
                file.write((seal_line(line) + "\n").encode())


def _open(text: str) -> dict[str, Any] | None:
    """A line as it was written, None where it was not."""
    try:
        line = open_line(text)
    except (ValueError, RecursionError):
        return None
    return line if isinstance(line, dict) and {"label", "seed", "round"} <= line.keys() else None


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

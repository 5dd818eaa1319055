"""Stored results: what a table came to, seed by seed, in a few kilobytes that live beside the experiment files."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedfuse.errors import ConfigError
from fedfuse.report.read import Row, find_runs, number, read_run
from fedfuse.report.scores import COLUMNS, Column, MeanSd, by_label, mean_sd, summary

STORED = (
    "accuracy",
    "nll",
    "ece",
    "auroc",
    "client_accuracy_weighted",
    "client_accuracy_worst10",
    "bytes_up",
    "flops",
    "server_seconds",
)
"""The scores that are stored; columns nobody recorded are left out."""

SPAN = Column("last_rounds", "last five rounds", "share", "high", "Accuracy, the mean of the last five rounds.")
FIRST = Column("first_round", "round one", "share", "high", "Accuracy after the first round.")
STORED_COLUMNS: Mapping[str, Column] = {
    **{column.key: column for column in COLUMNS if column.key in STORED},
    **{column.key: column for column in (SPAN, FIRST)},
}

DIGITS = 4  # significant digits: a ten-thousandth of an accuracy is one test row of ten thousand

Values = Mapping[int, float]
"""A score by seed."""

Pair = tuple[str, int]
"""A method's label and a seed."""


@dataclass(frozen=True, slots=True)
class StoredResult:
    """What an experiment file came to.

    Attributes:
        name: of the experiment file, without its scale.
        scale: cpu or paper.
        digest: of the file's text when it was run, so that a changed file is noticed.
        cells: per experiment of its sweep, per label, per score, the value of each seed.
        unfinished: experiments that were not run to the end; of these the cells have the methods and seeds that were.
    """

    name: str
    scale: str
    digest: str
    cells: Mapping[str, Mapping[str, Mapping[str, Values]]]
    unfinished: tuple[str, ...] = ()

    @property
    def labels(self) -> list[str]:
        """Every method's label, in order of first appearance."""
        return list(dict.fromkeys(label for methods in self.cells.values() for label in methods))

    def summarize(self, cell: str, label: str, score: str) -> MeanSd | None:
        """Mean and standard deviation of a score over seeds; None where nothing was measured."""
        return mean_sd(self.cells.get(cell, {}).get(label, {}).get(score, {}).values())


def digest_of(file: Path) -> str:
    """What tells one text of an experiment file from another; its comments do not count.

    Example:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp()) / "a.toml"
        >>> _ = file.write_text("# words" + chr(10) + "rounds = 1")
        >>> before = digest_of(file)
        >>> _ = file.write_text("rounds = 1")
        >>> before == digest_of(file)
        True
    """
    lines = (line.strip() for line in file.read_text(encoding="utf-8").splitlines())
    text = "\n".join(line for line in lines if line and not line.startswith("#"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def collect_result(
    name: str, scale: str, digest: str, folder: Path, unfinished: Mapping[str, Collection[Pair]] | None = None
) -> StoredResult:
    """The result that run directories hold: one experiment, or those of a sweep side by side.

    Args:
        name: of the experiment file, without its scale.
        scale: cpu or paper.
        digest: of the file's text.
        folder: of the run, or of the sweep's runs.
        unfinished: experiments that were not run to the end, with the labels and seeds of each that were.

    Raises:
        ConfigError: if there is no run.
    """
    base, partly = name.rpartition("/")[2], unfinished or {}
    runs = [read_run(path) for path in find_runs([folder])]
    rows = {
        run.name: [r for r in run.rows if run.name not in partly or (r["label"], r["seed"]) in partly[run.name]]
        for run in runs
    }
    cells = {_cell_name(run, base): _scores_of(each) for run, each in rows.items() if each}
    return StoredResult(name, scale, digest, cells, tuple(_cell_name(run, base) for run in partly))


def _cell_name(run: str, base: str) -> str:
    """What a sweep's experiment is called beside the file's own name; the file's name where it is alone.

    Example:
        >>> _cell_name("table5-mnist-0.1", "table5"), _cell_name("table5", "table5")
        ('mnist-0.1', 'table5')
    """
    return run.removeprefix(f"{base}-").removesuffix("-niid-bench") if run != base else base


def _scores_of(rows: Sequence[Row]) -> dict[str, dict[str, Values]]:
    """Per label and score the value of each seed that reached the label's last round."""
    groups, found = by_label(rows), dict[str, dict[str, Values]]()
    for row in summary(rows):
        scores = {key: row.by_seed[key] for key in STORED if key in row.by_seed}
        if row.round > 1:
            scores |= _curve_scores(groups[row.label], row.seeds, row.round)
        found[row.label] = {key: _shorten(values) for key, values in scores.items()}
    return found


def _curve_scores(rows: Sequence[Row], seeds: Sequence[int], last: int) -> dict[str, Values]:
    """Round one, and the mean of the last five rounds, for single rounds swing under skew."""
    spans = {SPAN.key: range(last - 4, last + 1), FIRST.key: range(1, 2)}
    return {key: {seed: _mean_accuracy(rows, seed, rounds) for seed in seeds} for key, rounds in spans.items()}


def _mean_accuracy(rows: Sequence[Row], seed: int, rounds: range) -> float:
    given = [number(row, "accuracy") for row in rows if row["seed"] == seed and row["round"] in rounds]
    found = mean_sd(given)
    return math.nan if found is None else found.mean


def _shorten(values: Values) -> Values:
    """Values to so many digits; a seed that was not scored is left out."""
    return {seed: float(f"{value:.{DIGITS}g}") for seed, value in values.items() if not math.isnan(value)}


def write_result(result: StoredResult, folder: Path) -> Path:
    """Write a result beside the others, one line per method, so that a change is a short difference."""
    path = result_path(result.name, result.scale, folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    head = {"name": result.name, "scale": result.scale, "digest": result.digest, "unfinished": result.unfinished}
    lines = []
    for cell, methods in result.cells.items():
        inner = [f"   {json.dumps(label)}: {_compact(scores)}" for label, scores in methods.items()]
        lines.append(f"  {json.dumps(cell)}: {{\n" + ",\n".join(inner) + "\n  }")
    text = json.dumps(head)[:-1] + ', "cells": {\n' + ",\n".join(lines) + "\n}}\n"
    path.write_text(text, encoding="utf-8")
    return path


def _compact(scores: Mapping[str, Values]) -> str:
    """Seeds once, then a list per score, or one number where all seeds have the same; null where a seed has none."""
    seeds = sorted({seed for values in scores.values() for seed in values})
    lists = {key: [values.get(seed) for seed in seeds] for key, values in scores.items()}
    short = {key: each[0] if len(set(each)) == 1 else each for key, each in lists.items()}
    return json.dumps({"seeds": seeds, **short}, separators=(",", ":"))


def result_path(name: str, scale: str, folder: Path) -> Path:
    """Where a result is stored."""
    return folder / f"{name}.{scale}.json"


def read_result(path: Path) -> StoredResult:
    """A stored result.

    Raises:
        ConfigError: if the file is not one.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        cells = {
            str(cell): {str(label): _by_seed(scores) for label, scores in methods.items()}
            for cell, methods in data["cells"].items()
        }
        return StoredResult(data["name"], data["scale"], data["digest"], cells, tuple(data.get("unfinished", ())))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as why:
        raise ConfigError(
            f"{path} is no stored result ({type(why).__name__}: {why}); write it again: fedfuse reproduce --store"
        ) from why


def _by_seed(scores: Mapping[str, Any]) -> dict[str, Values]:
    seeds = scores["seeds"]
    lists = {key: v if isinstance(v, list) else [v] * len(seeds) for key, v in scores.items() if key != "seeds"}
    return {
        key: {int(seed): float(v) for seed, v in zip(seeds, values, strict=True) if v is not None}
        for key, values in lists.items()
    }


def read_results(folder: Path, scale: str = "cpu") -> dict[str, StoredResult]:
    """Every stored result of a scale, by the name of its experiment file; none where there is no folder."""
    found = [read_result(path) for path in sorted(folder.rglob(f"*.{scale}.json"))]
    return {result.name: result for result in found}

"""Claims as data, and what stored results say of each: the verdict is computed, never written.

A claim compares a score of one or more methods with that of others, or with a number, in some experiments of a file.
Each method, rival and experiment is one *case*; cases are paired seed by seed, for within an experiment all methods
that train alike fuse the same updates.
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from fedfuse.errors import ConfigError, suggest
from fedfuse.report.read import Row, find_runs, number, read_run
from fedfuse.report.scores import COLUMNS, Column, MeanSd, by_label, mean_sd, summary
from fedfuse.report.stats import Difference, paired_difference

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
"""The scores that are stored; columns that no run recorded are left out."""

# single rounds swing where clients hold different classes, so five of them are averaged
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
    """What a sweep's experiment is called without the file's own name; the file's name where it is alone.

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
            spans = {SPAN.key: range(row.round - 4, row.round + 1), FIRST.key: range(1, 2)}
            scores |= {
                key: {seed: _mean_accuracy(groups[row.label], seed, rounds) for seed in row.seeds}
                for key, rounds in spans.items()
            }
        # a seed that was not scored is left out
        found[row.label] = {
            key: {seed: float(f"{value:.{DIGITS}g}") for seed, value in values.items() if not math.isnan(value)}
            for key, values in scores.items()
        }
    return found


def _mean_accuracy(rows: Sequence[Row], seed: int, rounds: range) -> float:
    found = mean_sd(number(row, "accuracy") for row in rows if row["seed"] == seed and row["round"] in rounds)
    return math.nan if found is None else found.mean


def write_result(result: StoredResult, folder: Path) -> Path:
    """Write a result into the folder of all, one line per method, so that a change is a short difference."""
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


def read_results(folder: Path, scale: str = "cpu") -> dict[str, StoredResult]:
    """Every stored result of a scale, by the name of its experiment file; none where there is no folder."""
    found = [read_result(path) for path in sorted(folder.rglob(f"*.{scale}.json"))]
    return {result.name: result for result in found}


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


Direction = Literal["above", "below", "level"]
Words = Annotated[str, Field(min_length=1)]


class Claim(BaseModel):
    """One sentence of a paper, or of ours, and the comparison that tests it: a `[[claims]]` table of the register.

    Attributes:
        id: a short name of its own.
        paper: whose claim it is.
        place: where it is made: table, figure, section.
        says: the sentence, in our words.
        methods: whose pages show it.
        published: the published numbers, in words.
        file: the experiment file that tests it, without its scale.
        score: what is compared.
        first: labels of the methods the claim is about.
        second: labels of those they are compared with; none compares the score itself with the margin.
        direction: where the first stand: above, below, or level with the second.
        margin: how far above or below at least, 0 if not given, or how far from level at most; in points for shares.
        effect: the first less the second, or the first over the second.
        cells: patterns of the experiments it is about.
        beside: a pattern of the one experiment where the second are read; by default the same one.
        untestable: why no small file can test it.
        picture: the figure that shows it and stores its numbers, where there is no experiment file.
        note: what a reader should know of the comparison.
        scale: the smallest at which there is such a file; it is looked up, whatever the register says.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    id: Words
    paper: Words
    place: Words
    says: Words
    methods: tuple[str, ...] = ()
    published: str = ""
    file: str = ""
    score: str = "accuracy"
    first: tuple[str, ...] = ()
    second: tuple[str, ...] = ()
    direction: Direction = "above"
    margin: float | None = None
    effect: Literal["difference", "ratio"] = "difference"
    cells: tuple[str, ...] = ("*",)
    beside: str = ""
    untestable: str = ""
    picture: str = ""
    note: str = ""
    scale: str = "cpu"

    @model_validator(mode="after")
    def _check_comparison(self) -> Claim:
        """A claim is tested by a whole comparison, or says why it cannot be."""
        if self.untestable:
            if self.file or self.picture or self.first:
                raise ValueError("a claim with `untestable` has no `file`, `picture` or `first`; leave them out")
            return self
        if bool(self.file) == bool(self.picture) or not self.first:
            raise ValueError("it needs `file` or `picture`, and `first`; or `untestable` with the reason")
        if self.score not in STORED_COLUMNS:
            near = suggest(self.score, STORED_COLUMNS)
            raise ValueError(f"score is {self.score!r}{near} expected one of {', '.join(STORED_COLUMNS)}")
        needs_margin = self.direction == "level" or self.effect == "ratio" or not self.second
        if self.margin is None and needs_margin:
            raise ValueError("a level, a ratio and a score by itself need a `margin`: how far from what counts")
        return self

    @property
    def source(self) -> str:
        """The name of the stored result that tests it: of an experiment file, or of a figure."""
        return self.file or self.picture

    @property
    def column(self) -> Column:
        """The score that is compared."""
        return STORED_COLUMNS[self.score]

    @property
    def command(self) -> str:
        """What makes its numbers, or its picture; nothing where it cannot be tested."""
        if self.file:
            return f"fedfuse reproduce {self.file} --scale {self.scale}"
        return f"fedfuse reproduce {self.picture}" if self.picture else ""

    @property
    def in_points(self) -> bool:
        """Whether effects are points of a percentage."""
        return self.column.kind == "share" and self.effect == "difference"


Verdict = Literal["holds", "holds in part", "does not hold", "not testable at this scale", "not run"]

VERDICTS: Mapping[Verdict, str] = {
    "holds": "the mean effect is beyond the margin in every case, and so is its whole 95 % interval",
    "holds in part": "the mean effect over all cases is beyond the margin, but not in each, or not its whole interval",
    "does not hold": "the mean effect over all cases is not beyond the margin",
    "not testable at this scale": "the claim needs data or a size that the small files do not have",
    "not run": "no stored result has what the claim compares",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """What stored results say of a claim.

    Attributes:
        claim: the claim.
        verdict: one of five.
        effect: the mean over all cases, with its 95 % interval over seeds; None where nothing was measured.
        cases: how many comparisons there are.
        agreeing: in how many of them the mean is on the claimed side.
        missing: labels or experiments that the claim names and no result has.
        older: whether the result is of another text of the experiment file.
    """

    claim: Claim
    verdict: Verdict
    effect: Difference | None = None
    cases: int = 0
    agreeing: int = 0
    missing: tuple[str, ...] = field(default=())
    older: bool = False


def judge_all(
    claims: Sequence[Claim], results: Mapping[str, StoredResult], digests: Mapping[str, str] | None = None
) -> list[Finding]:
    """The verdicts on all claims, in their order."""
    return [judge_claim(claim, results, digests) for claim in claims]


def judge_claim(claim: Claim, results: Mapping[str, StoredResult], digests: Mapping[str, str] | None = None) -> Finding:
    """The verdict on a claim, by the stored results of experiment files.

    Args:
        claim: what is claimed.
        results: stored results by the name of their file.
        digests: of the files as they are now; a result of another text is marked as older.

    Example:
        >>> scores = {"a": {"accuracy": {0: 0.8, 1: 0.9}}, "b": {"accuracy": {0: 0.5, 1: 0.61}}}
        >>> result = StoredResult("x/t", "cpu", "", {"t": scores})
        >>> words = {"id": "a-b", "paper": "X", "place": "Table 1", "says": "a is above b"}
        >>> claim = Claim(**words, file="x/t", first=("a",), second=("b",))
        >>> found = judge_claim(claim, {"x/t": result})
        >>> found.verdict, round(found.effect.mean, 1), found.effect.n
        ('holds', 29.5, 2)
    """
    if claim.untestable:
        return Finding(claim, "not testable at this scale")
    result = results.get(claim.source)
    if result is None:
        return Finding(claim, "not run", missing=(claim.source,))
    older = digests is not None and digests.get(claim.source, result.digest) != result.digest
    cases = list(_cases(claim, result))
    found = {name: values for name, values in cases if values}
    missing = tuple(name for name, values in cases if not values)
    if not found:
        return Finding(claim, "not run", missing=missing or claim.cells, older=older)
    effect = _pool(list(found.values()))
    agreeing = sum(_agrees(claim, statistics.fmean(values.values())) for values in found.values())
    verdict: Verdict = "does not hold"
    if _agrees(claim, effect.mean):
        sure = all(end is not None and _agrees(claim, end) for end in (effect.low, effect.high))
        verdict = "holds" if sure and agreeing == len(found) and not missing else "holds in part"
    return Finding(claim, verdict, effect, len(found), agreeing, missing, older)


def _cases(claim: Claim, result: StoredResult) -> Iterator[tuple[str, Values]]:
    """Every case by name, with its effect on each seed; none where something is missing."""

    def matching(cells: Iterable[str]) -> list[str]:
        return [cell for cell in cells if any(fnmatchcase(cell, pattern) for pattern in claim.cells)]

    yield from ((cell, {}) for cell in matching(result.unfinished))
    for cell in matching(result.cells):
        other = next((c for c in result.cells if fnmatchcase(c, claim.beside)), "") if claim.beside else cell
        for first in claim.first:
            ours = result.cells[cell].get(first, {}).get(claim.score, {})
            if not claim.second:
                yield f"{first}, {cell}", {seed: _in_points(claim, value) for seed, value in ours.items()}
            for second in claim.second:
                theirs = result.cells.get(other, {}).get(second, {}).get(claim.score, {})
                yield f"{first} and {second}, {cell}", _effects(claim, ours, theirs)


def _effects(claim: Claim, ours: Values, theirs: Values) -> Values:
    """Seed by seed the difference, in points for shares, or the ratio."""
    shared = sorted(ours.keys() & theirs.keys())
    if claim.effect == "ratio":
        return {seed: ours[seed] / theirs[seed] for seed in shared if theirs[seed]}
    return {seed: _in_points(claim, ours[seed] - theirs[seed]) for seed in shared}


def _in_points(claim: Claim, value: float) -> float:
    return 100.0 * value if claim.column.kind == "share" else value


def _pool(cases: Sequence[Values]) -> Difference:
    """The mean over cases of each seed that all of them have, and its interval over seeds."""
    seeds = set.intersection(*(set(values) for values in cases)) or set.union(*(set(values) for values in cases))
    means = {seed: statistics.fmean(v[seed] for v in cases if seed in v) for seed in seeds}
    found = paired_difference(means, dict.fromkeys(means, 0.0))
    if found is None:  # there is a case, so there is a seed
        raise ValueError("no case has a seed")
    return found


def _agrees(claim: Claim, value: float) -> bool:
    """Whether an effect is on the claimed side of the margin."""
    margin = claim.margin or 0.0
    if claim.direction == "level":
        return abs(value - (1.0 if claim.effect == "ratio" else 0.0)) <= margin
    return value > margin if claim.direction == "above" else value < margin

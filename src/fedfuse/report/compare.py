"""Compare methods, or runs, seed by seed; over several data sets, by their ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from fedfuse.errors import ConfigError
from fedfuse.report.read import Run, run_titles
from fedfuse.report.scores import COLUMNS, Column, headline_of, summary
from fedfuse.report.stats import LEVEL, Difference, Ranking, holm, paired_difference, rank_methods


@dataclass(frozen=True, slots=True)
class Comparison:
    """The paired difference of a score of two things.

    Attributes:
        first: a method or a run.
        second: what it is compared with.
        difference: first less second, over the pairs both have.
        p_holm: the t-test's p among all comparisons made at once, by Holm; None for a single pair.
    """

    first: str
    second: str
    difference: Difference
    p_holm: float | None = None


@dataclass(frozen=True, slots=True)
class Comparisons:
    """All that was compared at once.

    Attributes:
        column: the score.
        about: what is subtracted from what.
        pairs: what is paired: seeds or runs.
        made: each comparison with the name of its line.
        ranking: of several runs, the methods' ranks.
    """

    column: Column
    about: str
    pairs: str
    made: tuple[tuple[str, Comparison], ...]
    ranking: Ranking | None = None

    @property
    def title(self) -> str:
        """What the table of differences shows."""
        unit = ", points" if self.column.kind == "share" else ""
        return f"{self.column.title}{unit}: {self.about}"

    @property
    def headings(self) -> tuple[str, ...]:
        """Of the table of differences."""
        return ("", self.pairs, "difference", "95 % interval", "t-test", "Holm", "Wilcoxon", "higher")

    @property
    def lines(self) -> list[tuple[str, ...]]:
        """Of the table of differences."""
        factor, digits = (100.0, 1) if self.column.kind == "share" else (1.0, 3)
        lines = []
        for name, found in self.made:
            gap = found.difference
            ends = [f"{factor * end:+.{digits}f}" for end in (gap.low, gap.high) if end is not None]
            tests = [
                "–" if p is None else "< 0.001" if p < 0.001 else f"{p:.3f}"
                for p in (gap.p, found.p_holm, gap.wilcoxon)
            ]
            mean, ahead = f"{factor * gap.mean:+.{digits}f}", f"{gap.ahead} of {gap.n}"
            lines.append((name, str(gap.n), mean, "…".join(ends) or "–", *tests, ahead))
        return lines

    @property
    def note(self) -> str:
        """What a reader must know of the tests."""
        most = max(found.difference.n for _, found in self.made)
        words = f"Differences are paired over {self.pairs}; p-values are two-sided, Holm's for all lines at once."
        if most < 2:
            return f"{words} One pair says nothing of chance."
        least = 2.0 ** (1 - most)
        return words + (
            f" With {most} pairs no p of Wilcoxon's test is below {least:.3g}." if least > LEVEL / 2 else ""
        )

    def as_json(self) -> dict[str, Any]:
        """All of it for machines."""
        made = [{"name": name, **asdict(found)} for name, found in self.made]
        return {
            "score": self.column.key,
            "pairs": self.pairs,
            "comparisons": made,
            "ranking": None if self.ranking is None else asdict(self.ranking),
        }


def compare_all(runs: Sequence[Run], score: str = "", against: str | None = None) -> Comparisons:
    """Compare what was given: the methods of one run, two runs, or methods over several runs.

    Args:
        runs: what was run.
        score: what is compared; by default what their task is judged by first.
        against: of one run, the method that the others are compared with.

    Raises:
        ConfigError: if they cannot be compared.
    """
    column = column_of(score or headline_of(row for run in runs for row in run.rows).key)
    if len(runs) == 1:
        made = compare_methods(runs[0], column, against)
        return Comparisons(column, f"{made[0].first} less …", "seeds", tuple((c.second, c) for c in made))
    if against is not None:
        raise ConfigError(f"--against chooses a method of one run and {len(runs)} runs were given; leave it out")
    titles = run_titles(runs)
    if len(runs) == 2:
        named = compare_runs(runs[0], runs[1], titles, column)
        return Comparisons(column, f"{titles[0]} less {titles[1]}", "seeds", tuple(named.items()))
    ranking, over = compare_over(runs, column)
    return Comparisons(column, f"{over[0].first} less …", "runs", tuple((c.second, c) for c in over), ranking)


def column_of(key: str) -> Column:
    """The score of a key.

    Raises:
        ConfigError: if there is none, or neither end of it is better.
    """
    known = {column.key: column for column in COLUMNS if column.better}
    if key not in known:
        raise ConfigError(f"there is no score {key!r} to compare; expected one of {', '.join(known)}")
    return known[key]


def compare_methods(run: Run, column: Column, against: str | None = None) -> list[Comparison]:
    """One method of a run, by default the best, against every other, seed by seed."""
    table = {row.label: row for row in summary(run.rows) if column.key in row.values}
    if len(table) < 2:
        raise ConfigError(f"{run.name} has {column.key} of {len(table)} method, expected at least two to compare")
    if against is not None and against not in table:
        raise ConfigError(f"there is no method {against!r} in {run.name}; it has {', '.join(table)}")
    sign = 1.0 if column.better == "high" else -1.0
    first = against or max(table, key=lambda label: sign * table[label].values[column.key].mean)
    others = {label: row.by_seed[column.key] for label, row in table.items() if label != first}
    return _compare({first: table[first].by_seed[column.key]}, others)


def compare_runs(one: Run, two: Run, titles: Sequence[str], column: Column) -> dict[str, Comparison]:
    """Every method that two runs share: the first run less the second, seed by seed."""
    tables = [{row.label: row for row in summary(run.rows) if column.key in row.values} for run in (one, two)]
    shared = [label for label in tables[0] if label in tables[1]]
    if not shared:
        raise ConfigError(f"{one.name} and {two.name} have no method in common; compare runs of the same methods")
    pairs = {label: [table[label].by_seed[column.key] for table in tables] for label in shared}
    found = {label: paired_difference(*pair) for label, pair in pairs.items()}
    made = {label: Comparison(titles[0], titles[1], gap) for label, gap in found.items() if gap is not None}
    return dict(zip(made, _correct(list(made.values())), strict=True))


def compare_over(runs: Sequence[Run], column: Column) -> tuple[Ranking, list[Comparison]]:
    """Methods over data sets: their ranks, and the best-ranked against every other, data set by data set."""
    means = [{r.label: r.values[column.key].mean for r in summary(run.rows) if column.key in r.values} for run in runs]
    shared = [label for label in means[0] if all(label in table for table in means)]
    if len(shared) < 2:
        raise ConfigError(f"{len(shared)} method is in all {len(runs)} runs, expected at least two to rank")
    sign = 1.0 if column.better == "high" else -1.0
    ranking = rank_methods([{label: sign * table[label] for label in shared} for table in means])
    values = {label: {at: table[label] for at, table in enumerate(means)} for label in ranking.ranks}
    first = next(iter(values))
    return ranking, _compare({first: values.pop(first)}, values)


def _compare(one: Mapping[str, Mapping[int, float]], others: Mapping[str, Mapping[int, float]]) -> list[Comparison]:
    (first, ours), *_ = one.items()
    found = {label: paired_difference(ours, theirs) for label, theirs in others.items()}
    return _correct([Comparison(first, label, gap) for label, gap in found.items() if gap is not None])


def _correct(made: Sequence[Comparison]) -> list[Comparison]:
    """The comparisons with Holm's p added to their own."""
    tested = {at: p for at, found in enumerate(made) if (p := found.difference.p) is not None}
    adjusted = dict(zip(tested, holm(list(tested.values())), strict=True))
    return [replace(found, p_holm=adjusted.get(at)) for at, found in enumerate(made)]

"""Which differences are more than chance: paired tests over seeds, intervals, ranks over data sets."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

LEVEL = 0.05
"""Differences that chance alone would exceed more often than this are called ties."""


@dataclass(frozen=True, slots=True)
class Difference:
    """What pairs of two methods, seed by seed, say of their difference.

    Attributes:
        n: how many seeds both have.
        mean: the mean of the differences, first less second.
        low: the lower end of its 95 % interval by Student's t; None for a single pair.
        high: the upper end.
        p: of the paired t-test, that the differences have mean zero; None for a single pair.
        wilcoxon: of the signed-rank test, that they are symmetric about zero; None for a single pair.
        ahead: on how many seeds the first has the larger value.
    """

    n: int
    mean: float
    low: float | None
    high: float | None
    p: float | None
    wilcoxon: float | None
    ahead: int


def half_width(sd: float, n: int, level: float = LEVEL) -> float:
    """Half of the interval of a mean by Student's t: t · sd / √n.

    Example:
        >>> round(half_width(1.0, 4), 4)  # 3.1824 / 2
        1.5912
    """
    from scipy.special import stdtrit

    return float(stdtrit(n - 1, 1 - level / 2)) * sd / math.sqrt(n)


def paired_difference(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Difference | None:
    """The difference of two methods over the seeds they share; None where they share none.

    Example:
        >>> found = paired_difference({0: 3.0, 1: 5.0, 2: 4.0}, {0: 1.0, 1: 2.0, 2: 3.0, 9: 0.0})
        >>> found.n, found.mean, round(found.p, 4), found.wilcoxon, found.ahead
        (3, 2.0, 0.0742, 0.25, 3)
    """
    gaps = [ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())]
    if not gaps:
        return None
    mean, ahead = statistics.fmean(gaps), sum(gap > 0 for gap in gaps)
    if len(gaps) == 1:
        return Difference(1, mean, None, None, None, None, ahead)
    sd = statistics.stdev(gaps)
    if sd <= 1e-12 * abs(mean):  # all gaps are equal, and this is what rounding leaves
        sd = 0.0
    half = half_width(sd, len(gaps))
    return Difference(len(gaps), mean, mean - half, mean + half, _t_test(mean, sd, len(gaps)), signed_rank(gaps), ahead)


def _t_test(mean: float, sd: float, n: int) -> float:
    """Two-sided p of t = mean √n / sd with n − 1 degrees of freedom."""
    from scipy.special import stdtr

    if sd == 0.0:
        return 1.0 if mean == 0.0 else 0.0
    return 2 * float(stdtr(n - 1, -abs(mean) * math.sqrt(n) / sd))


def signed_rank(gaps: Sequence[float]) -> float:
    """Two-sided p of Wilcoxon's signed-rank test; exact, conditional on zeros left out and on equal ranks.

    Every difference that is not zero is as likely to be positive as negative, so the 2ⁿ sums of ranks are counted.
    With n pairs no p is below 2 / 2ⁿ: five seeds cannot reach 0.05.

    Example:
        >>> signed_rank([1.0, 2.0, 3.0, 4.0, -5.0]), signed_rank([1.0, 1.0, 1.0, 1.0, 1.0, 1.0])
        (0.625, 0.03125)
    """
    moved = [gap for gap in gaps if gap != 0.0]
    if not moved:
        return 1.0
    doubled = [round(2 * rank) for rank in ranks([abs(gap) for gap in moved])]  # whole numbers where ranks are shared
    # counts[s] is how many of the sign patterns seen so far have positive ranks that add up to s / 2
    counts = [1.0] + [0.0] * sum(doubled)
    for rank in doubled:
        for at in range(len(counts) - 1, rank - 1, -1):
            counts[at] += counts[at - rank]
    up = sum(rank for rank, gap in zip(doubled, moved, strict=True) if gap > 0)
    least = min(up, sum(doubled) - up)
    return min(1.0, 2 * sum(counts[: least + 1]) / 2.0 ** len(moved))


def ranks(values: Sequence[float]) -> list[float]:
    """The rank of each value, 1 for the least; equal values share the mean of their ranks.

    Example:
        >>> ranks([0.3, 0.1, 0.3])
        [2.5, 1.0, 2.5]
    """
    order = sorted(values)
    return [order.index(value) + (order.count(value) + 1) / 2 for value in values]


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's p-values: the chance of any false claim among all of them stays below the level.

    Example:
        >>> holm([0.01, 0.04, 0.03])
        [0.03, 0.06, 0.06]
    """
    order = sorted(range(len(p_values)), key=lambda at: p_values[at])
    adjusted, largest = [0.0] * len(p_values), 0.0
    for place, at in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - place) * p_values[at]))
        adjusted[at] = largest
    return adjusted


@dataclass(frozen=True, slots=True)
class Ranking:
    """Methods ranked over data sets.

    Attributes:
        ranks: the mean rank of each method, 1 for the best, best first.
        sets: how many data sets.
        p: of Friedman's test that all methods are alike.
        distance: Nemenyi's critical difference: mean ranks nearer than this are not told apart.
        alike: the largest groups of neighbours that are not told apart.
    """

    ranks: Mapping[str, float]
    sets: int
    p: float
    distance: float
    alike: tuple[tuple[str, ...], ...]


def rank_methods(scores: Sequence[Mapping[str, float]], level: float = LEVEL) -> Ranking:
    """Friedman's test and Nemenyi's critical difference of methods over data sets (Demšar, JMLR 2006).

    CD = q √(k (k + 1) / (6 N)) with q the studentized range's quantile over √2, for k methods on N data sets.

    Args:
        scores: per data set the score of each method, higher is better; methods missing somewhere are left out.
        level: of the test.

    Example:
        >>> found = rank_methods([{"a": 0.9, "b": 0.8}, {"a": 0.7, "b": 0.6}, {"a": 0.5, "b": 0.5}])
        >>> {name: round(rank, 2) for name, rank in found.ranks.items()}, found.alike
        ({'a': 1.17, 'b': 1.83}, (('a', 'b'),))
    """
    from scipy.special import gammaincc
    from scipy.stats import studentized_range

    names = [name for name in scores[0] if all(name in entry for entry in scores)]
    k, n = len(names), len(scores)
    if k < 2 or n < 2:
        raise ValueError(f"{k} methods on {n} data sets cannot be ranked, expected at least two of both")
    table = [ranks([-entry[name] for name in names]) for entry in scores]
    means = [statistics.fmean(column) for column in zip(*table, strict=True)]
    spread = sum(rank * rank for row in table for rank in row) - n * k * (k + 1) ** 2 / 4
    chi = (k - 1) * n * n * sum((mean - (k + 1) / 2) ** 2 for mean in means) / spread if spread else 0.0
    distance = float(studentized_range.ppf(1 - level, k, math.inf)) / math.sqrt(2) * math.sqrt(k * (k + 1) / (6 * n))
    ordered = dict(sorted(zip(names, means, strict=True), key=lambda item: item[1]))
    return Ranking(ordered, n, float(gammaincc((k - 1) / 2, chi / 2)), distance, _neighbours(ordered, distance))


def _neighbours(ordered: Mapping[str, float], distance: float) -> tuple[tuple[str, ...], ...]:
    """Runs of methods whose best and worst mean rank are within the distance, without runs inside others."""
    names, found, reached = list(ordered), list[tuple[str, ...]](), 0
    for first, name in enumerate(names):
        end = max(at for at, other in enumerate(names) if ordered[other] - ordered[name] <= distance) + 1
        if end - first > 1 and end > reached:
            found.append(tuple(names[first:end]))
        reached = max(reached, end)
    return tuple(found)

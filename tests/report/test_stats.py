"""Our statistics against scipy's and against closed forms."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
from scipy import stats

from fedfuse.report.stats import half_width, holm, paired_difference, rank_methods, ranks, signed_rank


@pytest.mark.parametrize("n", [2, 3, 5, 12])
def test_a_paired_difference_is_scipys(n: int) -> None:
    draw = np.random.default_rng(n)
    a, b = draw.normal(1.0, 1.0, n), draw.normal(0.3, 2.0, n)
    found = paired_difference(dict(enumerate(a)), dict(enumerate(b)))
    asked = stats.ttest_rel(a, b)
    low, high = asked.confidence_interval(0.95)
    assert found is not None
    assert found.mean == pytest.approx(float((a - b).mean()))
    assert (found.low, found.high) == pytest.approx((low, high))
    assert found.p == pytest.approx(asked.pvalue)
    assert found.wilcoxon == pytest.approx(stats.wilcoxon(a - b, method="exact").pvalue)
    assert found.ahead == int((a > b).sum())


def test_only_shared_seeds_are_paired() -> None:
    found = paired_difference({0: 1.0, 1: 2.0, 7: 99.0}, {1: 1.0, 0: 0.5, 8: -99.0})
    assert found is not None
    assert (found.n, found.mean) == (2, 0.75)
    assert paired_difference({0: 1.0}, {1: 1.0}) is None


def test_one_pair_says_nothing_of_chance() -> None:
    found = paired_difference({0: 1.0}, {0: 0.5})
    assert found is not None
    assert (found.mean, found.p, found.low, found.wilcoxon) == (0.5, None, None, None)


def test_differences_without_spread() -> None:
    same = paired_difference({0: 0.3, 1: 0.7}, {0: 0.3, 1: 0.7})
    always = paired_difference({0: 0.3, 1: 0.7, 2: 0.1}, {0: 0.2, 1: 0.6, 2: 0.0})  # 0.1 but for rounding
    assert same is not None
    assert always is not None
    assert (same.p, same.wilcoxon) == (1.0, 1.0)
    assert (always.p, always.wilcoxon) == (0.0, 0.25)


def test_signed_ranks_with_zeros_and_shared_ranks_are_counted_exactly() -> None:
    # Zeros left out; |d| = 1, 1, 2 have ranks 1.5, 1.5, 3. Sums of negative ranks over 2³ signs: only {} gives 0.
    assert signed_rank([0.0, 1.0, 1.0, 2.0]) == 2 / 8
    assert signed_rank([1.0, -1.0, 2.0]) == 2 * 3 / 8  # sums ≤ 1.5: {}, {first}, {second}


def test_signed_ranks_of_many_seeds_near_the_normal_limit() -> None:
    gaps = np.random.default_rng(0).normal(0.2, 1.0, 60)
    assert signed_rank([*map(float, gaps)]) == pytest.approx(stats.wilcoxon(gaps, method="exact").pvalue)


def test_ranks_share() -> None:
    values = [3.0, 1.0, 3.0, 2.0, 3.0]
    assert ranks(values) == list(stats.rankdata(values))


def test_holm_is_statsmodels() -> None:
    multitest = pytest.importorskip("statsmodels.stats.multitest")
    p = [0.001, 0.2, 0.02, 0.9, 0.013]
    assert holm(p) == pytest.approx(list(multitest.multipletests(p, method="holm")[1]))
    assert holm([]) == []


def test_the_interval_is_students() -> None:
    values = [0.1, 0.4, 0.35, 0.8]
    low, high = stats.t.interval(0.95, 3, statistics.fmean(values), stats.sem(values))
    assert half_width(statistics.stdev(values), 4) == pytest.approx((high - low) / 2)


def test_friedman_is_scipys_ties_and_all() -> None:
    draw = np.random.default_rng(5)
    table = np.round(draw.random((7, 4)), 1)  # rounding makes ties
    found = rank_methods([dict(zip("abcd", row, strict=True)) for row in table])
    assert found.p == pytest.approx(stats.friedmanchisquare(*table.T).pvalue)
    means = stats.rankdata(-table, axis=1).mean(axis=0)
    assert found.ranks == pytest.approx(dict(zip("abcd", means, strict=True)))
    assert list(found.ranks.values()) == sorted(found.ranks.values())


def test_nemenyis_distance_is_demsars() -> None:
    # Demšar 2006, section 3.2.2: q = 2.569 for 4 methods, CD = 2.569 √(4·5 / (6·14)) = 1.25.
    sets = [{"a": 4.0, "b": 3.0, "c": 2.0, "d": 1.0}] * 14
    found = rank_methods(sets)
    assert found.distance == pytest.approx(2.569 * math.sqrt(20 / 84), abs=1e-3)
    assert found.alike == (("a", "b"), ("b", "c"), ("c", "d"))


def test_all_alike_is_no_difference() -> None:
    found = rank_methods([{"a": 0.5, "b": 0.5}] * 3)
    assert (found.p, found.alike) == (1.0, (("a", "b"),))


def test_methods_missing_somewhere_are_left_out() -> None:
    found = rank_methods([{"a": 1.0, "b": 0.5, "c": 0.7}, {"a": 1.0, "b": 0.5}])
    assert set(found.ranks) == {"a", "b"}
    with pytest.raises(ValueError, match="expected at least two"):
        rank_methods([{"a": 1.0}, {"a": 1.0}])

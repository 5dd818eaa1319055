from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from fedfuse.data import partitions
from fedfuse.data.partitions import deal, dirichlet_shares
from fedfuse.data.schemes import Classes, Dirichlet, Iid, Labels, Quantity, Shards, Shares
from fedfuse.errors import ConfigError

LABELS = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 100))


def counts(rows: list[np.ndarray], labels: np.ndarray = LABELS) -> np.ndarray:
    return np.stack([np.bincount(labels[own], minlength=labels.max() + 1) for own in rows])


# --- the Dirichlet draw ----------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0.05, 0.5, 3.0])
def test_shares_follow_the_dirichlet_law(alpha):
    """Each share of a symmetric Dirichlet is Beta(alpha, (n − 1) alpha)."""
    rng, n = np.random.default_rng(1), 5
    draws = np.array([dirichlet_shares(rng, alpha, np.ones(n, dtype=bool)) for _ in range(4000)])
    for share in draws.T:
        assert stats.kstest(share, stats.beta(alpha, (n - 1) * alpha).cdf).pvalue > 1e-3
    assert np.allclose(draws.sum(1), 1)


@given(
    st.floats(5e-324, 1e3),
    st.lists(st.booleans(), min_size=1, max_size=30).filter(any),
    st.integers(0, 2**32 - 1),
)
def test_shares_are_numbers_for_every_alpha_and_stay_with_the_allowed(alpha, allowed, seed):
    shares = dirichlet_shares(np.random.default_rng(seed), alpha, np.array(allowed))
    assert np.isfinite(shares).all()
    assert shares.sum() == pytest.approx(1)
    assert (shares[~np.array(allowed)] == 0).all()


@given(st.lists(st.floats(0, 1), min_size=1, max_size=20).filter(lambda s: sum(s) > 1e-3), st.integers(0, 1000))
def test_a_cut_gives_away_everything_nearly_in_proportion(weights, size):
    shares = np.array(weights) / sum(weights)
    parts = partitions._counts_from_shares(shares, size)
    assert parts.sum() == size
    assert (parts >= 0).all()
    assert (np.abs(parts - shares * size) <= 1 + 1e-6).all()


# --- every scheme ----------------------------------------------------------------------------------------


def test_iid_is_even_and_like_the_whole():
    dealt = counts(deal(Iid(), LABELS, 4, 0).rows)
    assert dealt.sum(1).tolist() == [250] * 4
    assert stats.chi2_contingency(dealt).pvalue > 1e-3


def test_shares_cut_where_they_say_and_leave_the_rest():
    rows = deal(Shares(shares=(0.6, 0.15, 0.15)), LABELS, 3, 0).rows
    assert [len(own) for own in rows] == [600, 150, 150]
    with pytest.raises(ConfigError, match="3 shares for 4 clients"):
        deal(Shares(shares=(0.6, 0.15, 0.15)), LABELS, 4, 0)
    assert sum(len(own) for own in deal(Shares(shares=(0.1,) * 10), LABELS, 10, 0).rows) == 1000


def skew(dealt: np.ndarray) -> float:
    """The mean share of the largest owner of a class."""
    return float((dealt.max(0) / dealt.sum(0)).mean())


def test_smaller_alpha_means_more_skew():
    values = [
        np.mean([skew(counts(deal(Dirichlet(alpha=alpha), LABELS, 5, seed).rows)) for seed in range(5)])
        for alpha in (100.0, 1.0, 0.1, 0.001)
    ]
    assert values == sorted(values)
    assert values[0] < 0.3
    assert values[-1] > 0.95


def test_balance_keeps_a_client_from_collecting_class_after_class():
    balanced = [counts(deal(Dirichlet(alpha=0.01), LABELS, 4, s).rows).sum(1).max() for s in range(10)]
    free = [counts(deal(Dirichlet(alpha=0.01, balance=False), LABELS, 4, s).rows).sum(1).max() for s in range(10)]
    # With balance a client stops at a fair number plus, at most, one more class.
    assert max(balanced) <= 250 + 100
    assert max(free) > 350


@pytest.mark.parametrize(("clients", "alpha"), [(5, 5e-4), (50, 0.01), (5, 1e-9), (100, 1e-300)])
def test_extreme_dirichlets_are_dealt_where_the_common_loop_fails(clients, alpha):
    labels = np.repeat(np.arange(10), 600)
    for seed in range(5):
        dealt = deal(Dirichlet(alpha=alpha), labels, clients, seed)
        table = counts(dealt.rows, labels)
        assert table.sum() == len(labels)
        assert table.sum(1).min() >= 10
        assert dealt.facts["min_rows"] == 10
        lacking = dealt.facts["rows_moved"]
        assert 0 <= lacking <= 10 * clients
        assert (dealt.facts["smallest_drawn"] < 10) == (lacking > 0)
        assert (dealt.facts["retries"] == 100) == (lacking > 0)


def test_the_minimum_sinks_when_there_are_too_few_rows():
    dealt = deal(Dirichlet(alpha=0.1), LABELS[:35], 10, 0)
    assert dealt.facts["min_rows"] == 3
    assert min(len(own) for own in dealt.rows) >= 3


def test_mending_moves_as_few_rows_as_needed():
    before = np.array([[50, 50], [0, 0], [0, 4], [20, 0]])
    after = partitions._move_rows_to_minimum(np.random.default_rng(0), before, 10)
    assert after.sum(0).tolist() == before.sum(0).tolist()
    assert after.sum(1).tolist() == [84, 10, 10, 20]
    assert (after >= 0).all()
    assert np.abs(after - before).sum() == 2 * partitions._missing_rows(before, 10)


def test_classes_own_exactly_k_and_the_first_by_number():
    for k in (1, 2, 3, 10):
        dealt = counts(deal(Classes(per_client=k), LABELS, 10, 0).rows)
        assert ((dealt > 0).sum(1) == k).all()
        assert (np.diag(dealt) > 0).all()
        owners = (dealt > 0).sum(0)
        for label in range(10):
            held = dealt[dealt[:, label] > 0, label]
            assert held.sum() == 100
            assert held.max() - held.min() <= 1
            assert len(held) == owners[label]


@pytest.mark.parametrize("share", ["copy", "split"])
def test_labels_own_three_to_six(share):
    sizes = set()
    for seed in range(20):
        dealt = counts(deal(Labels(share=share), LABELS, 5, seed).rows)
        owned = (dealt > 0).sum(1)
        sizes |= set(owned.tolist())
        assert ((owned >= 3) & (owned <= 6)).all()
        held = dealt.sum(0)
        if share == "copy":
            assert set(np.unique(dealt)) <= {0, 100}
        else:
            assert set(np.unique(held)) <= {0, 100}  # a class is held whole or by nobody
    assert sizes == {3, 4, 5, 6}


def test_two_shards_hold_few_classes_and_equal_sizes():
    labels = np.repeat(np.arange(10), 600)
    dealt = counts(deal(Shards(per_client=2), labels, 100, 0).rows, labels)
    assert (dealt.sum(1) == 60).all()
    assert (dealt > 0).sum(1).max() <= 4
    # 200 shards of 30 rows divide classes of 600 evenly, so no shard crosses a class.
    assert (dealt > 0).sum(1).max() <= 2
    assert dealt.sum() == 6000


@pytest.mark.parametrize("scheme", [Quantity(alpha=0.5), Quantity(sigma=1.5)])
def test_quantity_changes_sizes_but_not_labels(scheme):
    labels = np.repeat(np.arange(4), 1000)
    dealt = counts(deal(scheme, labels, 6, 3).rows, labels)
    sizes = dealt.sum(1)
    assert sizes.sum() == 4000
    assert sizes.max() > 2 * np.median(sizes)
    assert sizes.min() >= 10
    assert stats.chi2_contingency(dealt).pvalue > 1e-3


def test_log_normal_sizes_have_their_spread():
    labels = np.zeros(2_000_000, dtype=np.int64)
    sizes = [len(own) for own in deal(Quantity(sigma=0.7), labels, 1000, 0).rows]
    assert np.log(sizes).std() == pytest.approx(0.7, rel=0.1)


# --- impossible ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scheme", "clients", "reason"),
    [
        (Classes(per_client=11), 3, "per_client is 11, but there are 10 classes"),
        (Classes(per_client=11, compat="niid-bench"), 3, "per_client is 11"),
        (Labels(low=3, high=12), 3, "high is 12, but there are 10 classes"),
        (Shards(per_client=30), 40, "1200 shards of 1000 rows"),
        ("dirichlet", 3, "'dirichlet' is no scheme"),
    ],
)
def test_impossible_deals_say_why(scheme, clients, reason):
    with pytest.raises(ConfigError, match=reason):
        deal(scheme, LABELS, clients, 0)

from __future__ import annotations

import pickle  # noqa: TID251 (our own values, on their way to our own workers)
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from fedfuse.data import partitions
from fedfuse.data.partitions import Partition, client_ids, deal, dirichlet_shares, partition
from fedfuse.data.schemes import Classes, Dirichlet, Iid, Labels, Quantity, Scheme, ServerRowsConfig, Shards, Shares
from fedfuse.errors import ConfigError

LABELS = torch.from_numpy(np.random.default_rng(0).permutation(np.repeat(np.arange(10), 60)))


MNIST_COUNTS = (5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949)


SCHEMES: list[Scheme] = [
    Iid(),
    Dirichlet(alpha=0.3, min_rows=2),
    Dirichlet(alpha=1e-3),
    Dirichlet(alpha=0.5, min_rows=1, compat="niid-bench"),
    Classes(per_client=2),
    Classes(per_client=2, compat="niid-bench"),
    Labels(low=2, high=3),
    Labels(low=2, high=3, share="copy"),
    Shards(per_client=2),
    Quantity(alpha=0.5, min_rows=1),
    Quantity(sigma=1.0, min_rows=3),
]


NAMES = [f"{s.kind}-{i}" for i, s in enumerate(SCHEMES)]


def pieces(split: Partition) -> list[Tensor]:
    return [*split.clients.values(), *split.validation.values(), split.server, split.held_out]


def same(one: Partition, other: Partition) -> bool:
    return list(one.clients) == list(other.clients) and all(
        torch.equal(a, b) for a, b in zip(pieces(one), pieces(other), strict=True)
    )


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(SCHEMES),
    st.integers(1, 12),
    st.integers(0, 2**32 - 1),
    st.sampled_from([0.0, 0.05, 0.3]),
    st.sampled_from([0.0, 0.1, 0.5]),
)
def test_every_row_has_one_place(scheme, clients, seed, server_fraction, validation_fraction):
    split = partition(
        LABELS, scheme, clients, seed, server_fraction=server_fraction, validation_fraction=validation_fraction
    )
    overlapping = isinstance(scheme, Labels) and scheme.share == "copy"
    given_out = torch.cat(pieces(split))
    assert given_out.dtype == torch.int64
    assert sorted(set(given_out.tolist())) == list(range(len(LABELS)))
    if not overlapping:
        assert len(given_out) == len(LABELS)
    # Server, held-out rows and validation rows are nobody's training rows, whatever the scheme.
    training = set(torch.cat([*split.clients.values()]).tolist())
    others = [split.server, split.held_out, *split.validation.values()]
    assert not training & set(torch.cat(others).tolist())
    assert not set(split.server.tolist()) & set(split.held_out.tolist())
    assert list(split.clients) == client_ids(clients)
    assert all(len(own) for own in split.clients.values())
    assert len(split.server) == round(server_fraction * len(LABELS))
    assert list(split.validation) == (client_ids(clients) if validation_fraction else [])
    assert split.counts(LABELS, 10).sum() == sum(len(own) for own in split.clients.values())


@pytest.mark.parametrize("scheme", SCHEMES, ids=NAMES)
def test_the_seed_decides(scheme):
    first = partition(LABELS, scheme, 5, 3, server_fraction=0.1, validation_fraction=0.2)
    again = partition(LABELS, scheme, 5, 3, server_fraction=0.1, validation_fraction=0.2)
    other = partition(LABELS, scheme, 5, 4, server_fraction=0.1, validation_fraction=0.2)
    assert same(first, again)
    assert not same(first, other)


@pytest.mark.parametrize("scheme", SCHEMES, ids=NAMES)
def test_validation_does_not_change_who_gets_what(scheme):
    plain, kept = partition(LABELS, scheme, 5, 3), partition(LABELS, scheme, 5, 3, validation_fraction=0.25)
    for name, rows in plain.clients.items():
        both = torch.cat((kept.clients[name], kept.validation[name]))
        assert torch.equal(both.sort().values, rows.sort().values)
        assert len(kept.validation[name]) == pytest.approx(0.25 * len(rows), abs=2)


def test_a_row_kept_for_validation_is_no_other_clients_training_row():
    split = partition(LABELS, Labels(low=8, high=9, share="copy"), 4, 0, validation_fraction=0.2)
    kept = set(torch.cat([*split.validation.values()]).tolist())
    trained = set(torch.cat([*split.clients.values()]).tolist())
    assert kept
    assert not kept & trained
    assert len(torch.cat([*split.clients.values()])) > len(trained)  # they do overlap


def test_a_client_of_one_row_trains_on_it():
    split = partition(torch.zeros(3, dtype=torch.int64), Iid(), 3, 0, validation_fraction=0.5)
    assert [len(rows) for rows in split.clients.values()] == [1, 1, 1]
    assert [len(rows) for rows in split.validation.values()] == [0, 0, 0]


def test_the_published_table_through_the_front_door():
    labels = torch.repeat_interleave(torch.arange(10), torch.tensor(MNIST_COUNTS))
    split = partition(labels, Dirichlet(alpha=0.05, compat="niid-bench"), 10, 0)
    table = split.counts(labels, 10)
    assert table[0].tolist() == [0, 0, 0, 0, 2, 12, 2847, 0, 0, 16]
    assert table[7].tolist() == [4914] + [0] * 9
    assert table[9].tolist() == [70, 417, 1, 2175, 1, 1, 0, 1, 450, 1]
    assert torch.equal(table.sum(0), torch.tensor(MNIST_COUNTS))
    assert split.facts["retries"] == 1
    # Published rows come shuffled, not sorted.
    assert split.clients["client-07"][:50].tolist() != sorted(split.clients["client-07"][:50].tolist())


def test_counts_are_a_histogram_of_training_rows():
    split = partition(LABELS, Dirichlet(alpha=0.3), 6, 1, validation_fraction=0.2)
    table = split.counts(LABELS, 12)
    assert table.shape == (6, 12)
    for line, rows in zip(table, split.clients.values(), strict=True):
        assert line.tolist() == np.bincount(LABELS[rows], minlength=12).tolist()


def test_facts_tell_the_story():
    split = partition(LABELS, Labels(low=1, high=1), 2, 0, server_fraction=0.1)
    assert split.facts["kind"] == "labels"
    assert split.facts["scheme"]["share"] == "split"
    assert split.facts["server_rows"] == 60
    assert split.facts["classes_held"] + len(split.facts["classes_missing"]) == 10
    held = {int(label) for rows in split.clients.values() for label in LABELS[rows].unique()}
    assert set(split.facts["classes_missing"]) == set(range(10)) - held
    assert split.facts["held_out_rows"] == len(split.held_out)
    assert pickle.loads(pickle.dumps(split)).facts == split.facts


def test_server_rows_come_from_the_chosen_classes():
    split = partition(LABELS, Iid(), 4, 0, server_rows=ServerRowsConfig(count=50, classes=5))
    assert len(split.server) == 50
    assert len(LABELS[split.server].unique()) == 5
    split = partition(LABELS, Iid(), 4, 0, server_rows=ServerRowsConfig(fraction=0.1, classes=(2, 7)))
    assert set(LABELS[split.server].tolist()) == {2, 7}
    assert len(split.server) == 60


def test_reserved_rows_go_to_no_client_as_in_feddua():
    rows = ServerRowsConfig(count=40, classes=5, reserve=120)
    split = partition(LABELS, Shards(per_client=2), 12, 0, server_rows=rows)
    clients = torch.cat([*split.clients.values()])
    assert clients.sort().values.tolist() == list(range(480))
    assert split.server.min() >= 480
    assert len(split.held_out) == 80


def test_a_random_share_looks_like_the_whole():
    labels = torch.repeat_interleave(torch.arange(10), torch.tensor(MNIST_COUNTS))
    split = partition(labels, Iid(), 10, 0, server_fraction=0.1)
    share = torch.bincount(labels[split.server]) / torch.tensor(MNIST_COUNTS)
    assert share.tolist() == pytest.approx([0.1] * 10, abs=0.02)


@pytest.mark.parametrize(
    ("clients", "options", "reason"),
    [
        (0, {}, "0 clients are to share 600 rows"),
        (-1, {}, "-1 clients"),
        (601, {}, "601 clients are to share 600 rows"),
        (400, {"server_fraction": 0.5}, "400 clients are to share 300 rows"),
        (3, {"server_fraction": 1.0}, "server_fraction is 1.0"),
        (3, {"server_fraction": -0.1}, "server_fraction is -0.1"),
        (3, {"server_fraction": float("nan")}, "server_fraction is nan"),
        (3, {"validation_fraction": 1.5}, "validation_fraction is 1.5"),
        (3, {"server_fraction": 0.1, "server_rows": ServerRowsConfig(count=3)}, "both given"),
        (3, {"server_fraction": 1e-6}, "the server is to hold 0 rows"),
        (3, {"server_rows": ServerRowsConfig(count=61, classes=(1,))}, "hold 61 rows, but its classes have 60"),
        (3, {"server_rows": ServerRowsConfig(count=5, classes=(1, 33))}, "names class 33"),
        (3, {"server_rows": ServerRowsConfig(count=5, classes=11)}, "asks for 11 classes, but there are 10"),
        (3, {"server_rows": ServerRowsConfig(count=5, reserve=600)}, "reserve is 600 of 600"),
    ],
)
def test_impossible_requests_are_refused(clients, options, reason):
    with pytest.raises(ConfigError, match=reason):
        partition(LABELS, Iid(), clients, 0, **options)


def test_a_client_that_would_be_empty_is_named():
    labels = torch.tensor([0] * 20 + [1])
    with pytest.raises(ConfigError, match=r"client-03 would hold no rows under the scheme 'classes'"):
        partition(labels, Classes(per_client=1), 4, 0)
    with pytest.raises(ConfigError, match="client-01 would hold no rows"):
        partition(labels[:20], Shares(shares=(0.5, 0.001)), 2, 0)


def test_labels_must_be_whole_numbers():
    for labels in (torch.zeros(5), torch.zeros(5, 1, dtype=torch.int64), torch.tensor([-1, 0, 1])):
        with pytest.raises(ConfigError, match="labels are"):
            partition(labels, Iid(), 2, 0)


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_a_seed_no_generator_takes_is_refused(seed):
    with pytest.raises(ConfigError, match="the seed is"):
        partition(LABELS, Iid(), 2, seed)


@given(st.integers(1, 2000))
def test_ids_sort_in_the_order_of_their_numbers(clients):
    ids = client_ids(clients)
    assert ids == sorted(ids)
    assert len(set(ids)) == clients


# --- dealing -------------------------------------------------------------------------------------------------------


TEN_BY_100 = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 100))


def counts(rows: list[np.ndarray], labels: np.ndarray = TEN_BY_100) -> np.ndarray:
    return np.stack([np.bincount(labels[own], minlength=labels.max() + 1) for own in rows])


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


def test_iid_is_even_and_like_the_whole():
    dealt = counts(deal(Iid(), TEN_BY_100, 4, 0).rows)
    assert dealt.sum(1).tolist() == [250] * 4
    assert stats.chi2_contingency(dealt).pvalue > 1e-3


def test_shares_cut_where_they_say_and_leave_the_rest():
    rows = deal(Shares(shares=(0.6, 0.15, 0.15)), TEN_BY_100, 3, 0).rows
    assert [len(own) for own in rows] == [600, 150, 150]
    with pytest.raises(ConfigError, match="3 shares for 4 clients"):
        deal(Shares(shares=(0.6, 0.15, 0.15)), TEN_BY_100, 4, 0)
    assert sum(len(own) for own in deal(Shares(shares=(0.1,) * 10), TEN_BY_100, 10, 0).rows) == 1000


def skew(dealt: np.ndarray) -> float:
    """The mean share of the largest owner of a class."""
    return float((dealt.max(0) / dealt.sum(0)).mean())


def test_smaller_alpha_means_more_skew():
    values = [
        np.mean([skew(counts(deal(Dirichlet(alpha=alpha), TEN_BY_100, 5, seed).rows)) for seed in range(5)])
        for alpha in (100.0, 1.0, 0.1, 0.001)
    ]
    assert values == sorted(values)
    assert values[0] < 0.3
    assert values[-1] > 0.95


def test_balance_keeps_a_client_from_collecting_class_after_class():
    balanced = [counts(deal(Dirichlet(alpha=0.01), TEN_BY_100, 4, s).rows).sum(1).max() for s in range(10)]
    free = [counts(deal(Dirichlet(alpha=0.01, balance=False), TEN_BY_100, 4, s).rows).sum(1).max() for s in range(10)]
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
    dealt = deal(Dirichlet(alpha=0.1), TEN_BY_100[:35], 10, 0)
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
        dealt = counts(deal(Classes(per_client=k), TEN_BY_100, 10, 0).rows)
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
        dealt = counts(deal(Labels(share=share), TEN_BY_100, 5, seed).rows)
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
        deal(scheme, TEN_BY_100, clients, 0)


# --- niid bench ----------------------------------------------------------------------------------------------------


MNIST_LABELS = np.repeat(np.arange(10), MNIST_COUNTS)


# FedLPA (arXiv:2310.00339), appendix G.2: MNIST, beta 0.05, ten clients, seed 0.
FEDLPA_G2 = [
    {4: 2, 5: 12, 6: 2847, 9: 16},
    {1: 20, 4: 189, 5: 5349},
    {0: 669, 1: 476, 2: 67, 6: 15, 7: 6068},
    {0: 266, 1: 375, 3: 3956, 7: 196, 9: 5932},
    {0: 4, 1: 418, 2: 5862},
    {1: 2, 2: 25, 4: 5195, 5: 24, 6: 80, 8: 28},
    {1: 5034, 2: 3, 4: 22, 5: 6, 6: 2669},
    {0: 4914},
    {4: 433, 5: 29, 6: 307, 8: 5373},
    {0: 70, 1: 417, 2: 1, 3: 2175, 4: 1, 5: 1, 7: 1, 8: 450, 9: 1},
]


def table(rows: list[np.ndarray], labels: np.ndarray) -> list[dict[int, int]]:
    return [{int(k): int(n) for k, n in zip(*np.unique(labels[r], return_counts=True), strict=True)} for r in rows]


def test_the_published_table_comes_out_exactly():
    rows, retries = partitions.published_dirichlet(MNIST_LABELS, 10, 0.05, 10, seed=0)
    assert table(rows, MNIST_LABELS) == FEDLPA_G2
    assert retries == 1  # the second attempt is the first with ten rows for everybody


def test_the_order_of_labels_does_not_change_the_table():
    mixed = np.random.default_rng(1).permutation(MNIST_LABELS)
    rows, _ = partitions.published_dirichlet(mixed, 10, 0.05, 10, seed=0)
    assert table(rows, mixed) == FEDLPA_G2


def plain_dirichlet(labels: np.ndarray, clients: int, beta: float) -> dict[int, list[int]]:
    """The loop as described, on the global generator, with Python lists and real casts of NaN."""
    total, smallest = len(labels), 0
    while smallest < 10:
        lists: list[list[int]] = [[] for _ in range(clients)]
        for label in range(labels.max() + 1):
            members = np.where(labels == label)[0]
            np.random.shuffle(members)
            p = np.random.dirichlet(np.full(clients, beta))
            p = np.array(
                [share if len(own) < total / clients else share * 0 for share, own in zip(p, lists, strict=True)]
            )
            p = p / p.sum()
            at = (np.cumsum(p) * len(members)).astype(int)[:-1]
            for own, part in zip(lists, np.split(members, at), strict=True):
                own.extend(part.tolist())
        smallest = min(map(len, lists))
    for own in lists:
        np.random.shuffle(own)
    return dict(enumerate(lists))


@pytest.fixture
def global_seed():
    """Sets the global generators for an oracle and puts them back."""
    numpy_state, python_state = np.random.get_state(), random.getstate()

    def seed(value: int) -> None:
        np.random.seed(value)
        random.seed(value)

    yield seed
    np.random.set_state(numpy_state)
    random.setstate(python_state)


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize(("clients", "beta"), [(10, 0.5), (10, 0.1), (5, 0.01), (3, 0.002)])
def test_rows_come_in_the_published_order_even_where_the_draw_breaks_down(global_seed, clients, beta):
    labels = np.random.default_rng(3).integers(0, 6, 900)
    for seed in range(6):
        global_seed(seed)
        expected = plain_dirichlet(labels, clients, beta)
        rows, _ = partitions.published_dirichlet(labels, clients, beta, 10, seed)
        assert {i: own.tolist() for i, own in enumerate(rows)} == expected


def plain_classes(labels: np.ndarray, clients: int, k: int) -> list[list[int]]:
    """Client i owns i mod K and k − 1 others; each class is dealt evenly, in client order."""
    total = int(labels.max()) + 1
    owned = []
    for client in range(clients):
        own = [client % total]
        while len(own) < k:
            if (pick := random.randint(0, total - 1)) not in own:
                own.append(pick)
        owned.append(own)
    lists: list[list[int]] = [[] for _ in range(clients)]
    for label in range(total):
        members = np.where(labels == label)[0]
        np.random.shuffle(members)
        owners = [client for client in range(clients) if label in owned[client]]
        for owner, part in zip(owners, np.array_split(members, len(owners)), strict=True):
            lists[owner].extend(part.tolist())
    return lists


@pytest.mark.parametrize(("clients", "k"), [(10, 1), (10, 2), (10, 3), (10, 10), (23, 2)])
def test_classes_come_in_the_published_order(global_seed, clients, k):
    labels = np.random.default_rng(4).integers(0, 10, 1200)
    for seed in range(3):
        global_seed(seed)
        expected = plain_classes(labels, clients, k)
        assert [own.tolist() for own in partitions.published_classes(labels, clients, k, seed)] == expected


def test_one_class_per_client_gives_each_client_a_whole_class():
    rows = partitions.published_classes(MNIST_LABELS, 10, 1, seed=0)
    assert table(rows, MNIST_LABELS) == [{k: n} for k, n in enumerate(MNIST_COUNTS)]


def test_global_generators_are_left_alone():
    np_state, py_state = np.random.get_state()[1].copy(), random.getstate()
    partitions.published_dirichlet(MNIST_LABELS[::50], 3, 0.5, 1, seed=0)
    partitions.published_classes(MNIST_LABELS[::50], 3, 2, seed=0)
    assert np.array_equal(np.random.get_state()[1], np_state)
    assert random.getstate() == py_state


def test_a_split_the_published_loop_never_finds_is_an_error(monkeypatch):
    monkeypatch.setattr(partitions, "_ATTEMPTS", 20)
    with pytest.raises(ConfigError, match=r"no split with 10 rows for each of 50 clients in 20 attempts"):
        partitions.published_dirichlet(MNIST_LABELS[::20], 50, 0.01, 10, seed=0)

from __future__ import annotations

import pickle  # noqa: TID251 (our own values, on their way to our own workers)

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedfuse.data.partitions import Partition, client_ids, partition
from fedfuse.data.schemes import Classes, Dirichlet, Iid, Labels, Quantity, Scheme, ServerRowsConfig, Shards, Shares
from fedfuse.errors import ConfigError

LABELS = torch.from_numpy(np.random.default_rng(0).permutation(np.repeat(np.arange(10), 60)))
MNIST_COUNTS = torch.tensor((5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949))

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
    labels = torch.repeat_interleave(torch.arange(10), MNIST_COUNTS)
    split = partition(labels, Dirichlet(alpha=0.05, compat="niid-bench"), 10, 0)
    table = split.counts(labels, 10)
    assert table[0].tolist() == [0, 0, 0, 0, 2, 12, 2847, 0, 0, 16]
    assert table[7].tolist() == [4914] + [0] * 9
    assert table[9].tolist() == [70, 417, 1, 2175, 1, 1, 0, 1, 450, 1]
    assert torch.equal(table.sum(0), MNIST_COUNTS)
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


# --- the server's rows -----------------------------------------------------------------------------------


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
    labels = torch.repeat_interleave(torch.arange(10), MNIST_COUNTS)
    split = partition(labels, Iid(), 10, 0, server_fraction=0.1)
    share = torch.bincount(labels[split.server]) / MNIST_COUNTS
    assert share.tolist() == pytest.approx([0.1] * 10, abs=0.02)


# --- impossible requests ---------------------------------------------------------------------------------


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

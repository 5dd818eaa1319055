from __future__ import annotations

import random

import numpy as np
import pytest

from fedfuse.data import partitions
from fedfuse.errors import ConfigError

MNIST_COUNTS = (5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949)
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

from __future__ import annotations

import pickle  # noqa: TID251 (our own values, on their way to our own workers)

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedfuse.data.rows import Dataset, Rows, stratified_split
from fedfuse.errors import ConfigError


def rows(n: int, classes: int = 2, shape: tuple[int, ...] = (3,)) -> Rows:
    return Rows(torch.arange(n * int(np.prod(shape))).float().view(n, *shape), torch.arange(n) % classes)


def test_take_keeps_pairs_together():
    some = rows(6).take(torch.tensor([4, 1]))
    assert some.y.tolist() == [0, 1]
    assert some.x.tolist() == [[12, 13, 14], [3, 4, 5]]
    assert len(rows(6).take([])) == 0


def test_rows_travel_to_worker_processes():
    copy = pickle.loads(pickle.dumps(rows(4)))
    assert torch.equal(copy.x, rows(4).x)


@pytest.mark.parametrize(
    ("x", "y", "what"),
    [
        (torch.zeros(2, 3, dtype=torch.float64), torch.zeros(2, dtype=torch.int64), "x is float64"),
        (torch.zeros(2, 3, 4), torch.zeros(2, dtype=torch.int64), "x is float32 of shape"),
        (torch.zeros(2, 3), torch.zeros(3, dtype=torch.int64), "y is int64 of shape"),
        (torch.zeros(2, 3), torch.zeros(2), "labels are float32"),
    ],
)
def test_rows_of_the_wrong_kind_are_refused(x, y, what):
    with pytest.raises(ConfigError, match=what):
        Dataset("mine", Rows(x, y), Rows(x, y), ("a", "b"))


def test_a_dataset_checks_labels_shapes_and_emptiness():
    with pytest.raises(ConfigError, match="training labels run from 0 to 2, expected 0 to 1"):
        Dataset("mine", rows(6, classes=3), rows(6), ("a", "b"))
    with pytest.raises(ConfigError, match="test row"):
        Dataset("mine", rows(6), rows(6, shape=(4,)), ("a", "b"))
    with pytest.raises(ConfigError, match="no test rows"):
        Dataset("mine", rows(6), rows(0), ("a", "b"))


@given(st.lists(st.integers(0, 4), min_size=1, max_size=80), st.floats(0.05, 0.95))
def test_a_stratified_split_covers_every_row_once_in_proportion(labels, fraction):
    y = np.array(labels)
    train, test = stratified_split(y, fraction)
    assert sorted([*train, *test]) == list(range(len(y)))
    for label in set(labels):
        n = labels.count(label)
        assert (y[test] == label).sum() == (round(fraction * n) if n > 1 else 0)
    assert np.array_equal(stratified_split(y, fraction)[1], test)


def test_a_silly_test_fraction_is_refused():
    with pytest.raises(ConfigError, match="test_fraction is 1"):
        stratified_split(np.zeros(3, dtype=int), 1.0)

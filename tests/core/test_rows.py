"""Rows."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, islice
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import fedfuse
from fedfuse.core.rows import Rows, as_rows
from fedfuse.errors import ConfigError


def test_rows_keep_inputs_and_labels_together() -> None:
    rows = Rows(torch.arange(6.0).view(3, 2), torch.tensor([2, 0, 2]))
    taken = rows.take(torch.tensor([2, 2, 1]))
    assert taken.x.tolist() == [[4.0, 5.0], [4.0, 5.0], [2.0, 3.0]]
    assert taken.y.tolist() == [2, 2, 0]
    assert rows.counts(4).tolist() == [1, 0, 2, 0]
    assert len(rows.take([])) == 0


@pytest.mark.parametrize(
    ("x", "y"),
    [
        (torch.zeros(3, 2), torch.zeros(3, dtype=torch.int32)),
        (torch.zeros(3, 2), torch.zeros(3, 1, 1)),
        (torch.zeros(3, 2), torch.zeros(2, dtype=torch.int64)),
        (torch.zeros(3, 2), torch.zeros(3, 1, 1, dtype=torch.int64)),
    ],
)
def test_labels_that_do_not_fit_are_refused_in_one_sentence(x: torch.Tensor, y: torch.Tensor) -> None:
    with pytest.raises(ConfigError, match="rows: y is"):
        Rows(x, y)


X, Y = torch.arange(24.0).view(6, 2, 2), torch.tensor([0, 1, 2, 0, 1, 2])


class Endless(Dataset[tuple[Tensor, int]]):
    """A map-style data set that takes any index, as many do that compute a file's name from it."""

    def __len__(self) -> int:
        return len(Y)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return X[index % len(Y)], int(Y[index % len(Y)])


class Odd(Endless):
    """The same with one row replaced."""

    def __init__(self, at: int, item: Any) -> None:
        self.at, self.item = at, item

    def __getitem__(self, index: int) -> Any:
        if index == self.at and isinstance(self.item, Exception):
            raise self.item
        return self.item if index == self.at else super().__getitem__(index)


class Stream(IterableDataset[Any]):
    """Rows one after the other, as many as it likes."""

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        return ((X[i % 6], int(Y[i % 6])) for i in count())


class Promising(Stream):
    """A stream that says how long it is, and has fewer rows or more."""

    def __init__(self, says: int, has: int) -> None:
        self.says, self.has = says, has

    def __len__(self) -> int:
        return self.says

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        return islice(super().__iter__(), self.has)


@pytest.mark.parametrize(
    "given",
    [
        Rows(X, Y),
        (X, Y),
        [X, Y],
        (X.double().numpy(), Y.int().numpy()),
        Endless(),
        TensorDataset(X, Y),
        [(X[i].numpy(), np.int32(Y[i])) for i in range(6)],
        Promising(6, 6),
        DataLoader(Endless(), batch_size=4),
    ],
    ids=lambda given: type(given).__name__,
)
def test_rows_are_read_from_whatever_form_they_are_given_in(given: Any) -> None:
    rows = as_rows(given)
    assert rows.x.equal(X)
    assert rows.x.dtype == torch.float32
    assert rows.y.equal(Y)


def test_a_loader_that_shuffles_gives_the_same_rows_each_time_and_leaves_global_draws_alone() -> None:
    before = torch.random.get_rng_state()
    first, second = (as_rows(DataLoader(Endless(), batch_size=2, shuffle=True)) for _ in range(2))
    assert torch.random.get_rng_state().equal(before)
    assert first.x.equal(second.x)
    assert not first.x.equal(X)
    assert sorted(first.x[:, 0, 0].tolist()) == X[:, 0, 0].tolist()


def test_targets_may_be_numbers_or_several_per_row() -> None:
    assert as_rows([(X[0], 0.5), (X[1], 1.5)]).y.dtype == torch.float32
    assert as_rows([(X[0], torch.zeros(3)), (X[1], torch.ones(3))]).y.shape == (2, 3)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (Stream(), "Stream, which has no length"),
        (DataLoader(Stream()), "DataLoader, which has no length"),
        (iter(Endless()), "no length"),
        (Promising(6, 5), "ends before row 5 .* 6"),
        (Promising(6, 7), "goes on at row 6 .* 6"),
        ([], "no rows"),
        ({"x": X, "y": Y}, "row 0 cannot be read"),
        ((X, Y, Y), "a tuple of 3"),
        ((X, [0] * 6), "a list of 6 as targets"),
        (Odd(3, {"image": X[0]}), "row 3 is a dict"),
        (Odd(3, (X[0],)), "row 3 is a tuple of 1"),
        (Odd(3, (X[0, :1], 1)), r"row 3's input is float32 of shape \(1, 2\)"),
        (Odd(3, (X[0].double(), 1)), "row 3's input is float64"),
        (Odd(1, (X[0], np.array(["cat"]))), "row 1: target cannot be a tensor"),
        (Odd(3, (X[0], 0.5)), "row 3's target is float32"),
        (Odd(0, (X[0], None)), "row 0: found a NoneType as target"),
        (Odd(2, ("cat.png", 1)), "row 2: found a str as input"),
        (Odd(4, KeyError("gone")), "row 4 cannot be read .*KeyError"),
        (DataLoader(Odd(4, (X[0, :1], 1)), batch_size=2), "batch 2 cannot be read"),
        (DataLoader([(X[i // 2, : 1 + i // 2], 0) for i in range(4)], batch_size=2), r"batch 1's input"),  # type: ignore[arg-type]
    ],
)
def test_what_are_no_rows_is_refused_in_one_sentence_and_at_once(given: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=f"rows.*{words}"):
        as_rows(given)


def test_a_data_set_without_an_end_is_trained_on_by_its_length() -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    update = fedfuse.local_update(network, Endless(), epochs=1, batch_size=2, lr=0.1)
    same = fedfuse.local_update(network, (X, Y), epochs=1, batch_size=2, lr=0.1)
    assert update.num_examples == 6
    assert all(update.state_dict()[name].equal(tensor) for name, tensor in same.state_dict().items())

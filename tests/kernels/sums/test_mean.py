"""Weighted sums of rows: summed in float64 in the order of the rows, rounded step by step, divided once."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("numba")

from fedfuse.kernels.sums.mean import add_rows, weighted_sums
from fedfuse.kernels.target import SUMS

Rows = list[np.ndarray[tuple[int], np.dtype[np.float32]]]


def _rows(clients: int, count: int) -> tuple[Rows, np.ndarray, np.ndarray]:
    draw = np.random.default_rng(clients * count)
    rows = [draw.normal(size=count).astype(np.float32) for _ in range(clients)]
    return rows, np.array([row.ctypes.data for row in rows], np.int64), draw.uniform(0.1, 9.0, clients)


def _sums(rows: Rows, weights: np.ndarray, begin: int, start: np.ndarray) -> np.ndarray:
    """The definition, one rounding for each product and one for each sum."""
    total = start.copy()
    for row, weight in zip(rows, weights, strict=True):
        total = total + weight * row[begin:].astype(np.float64)
    return total


@pytest.mark.parametrize("clients", [1, 2, 5, 12, 13, 20, 25, 31])
@pytest.mark.parametrize("count", [1, SUMS - 1, SUMS, SUMS + 3, 5 * SUMS + 7, 3000])
def test_sums_are_those_of_the_definition_to_the_last_bit(clients: int, count: int) -> None:
    rows, addresses, weights = _rows(clients, count + 2)
    out = np.zeros(count, np.float32)
    weighted_sums(addresses, weights, weights.sum(), 2, out)
    wanted = (_sums(rows, weights, 2, np.zeros(count)) / weights.sum()).astype(np.float32)
    np.testing.assert_array_equal(out, wanted)


@pytest.mark.parametrize("clients", [1, 4, 10, 11, 19, 23])
def test_rows_are_added_to_what_was_summed_before(clients: int) -> None:
    rows, addresses, weights = _rows(clients, 3 * SUMS + 5)
    before = np.random.default_rng(1).normal(size=3 * SUMS + 4)
    sums = before.copy()
    add_rows(addresses, weights, 1, sums)
    np.testing.assert_array_equal(sums, _sums(rows, weights, 1, before))


def test_nothing_is_read_or_written_where_nothing_is_wanted() -> None:
    _, addresses, weights = _rows(3, 4)
    weighted_sums(addresses, weights, 1.0, 0, np.zeros(0, np.float32))


def test_infinity_and_nan_stay_what_they_are() -> None:
    rows = [np.full(SUMS, value, np.float32) for value in (1.0, np.inf)] + [np.full(SUMS, -np.inf, np.float32)]
    out = np.zeros(SUMS, np.float32)
    addresses = np.array([row.ctypes.data for row in rows], np.int64)
    weighted_sums(addresses[:2], np.ones(2), 2.0, 0, out)
    assert np.isinf(out).all()
    weighted_sums(addresses, np.ones(3), 3.0, 0, out)
    assert np.isnan(out).all()

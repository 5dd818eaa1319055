"""Weighted sums, in float64 in the order of the rows, rounded step by step, divided once; and sums of powers."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch

from fedfuse.core.messages import ClientUpdate, Cohort
from fedfuse.core.model import Single
from fedfuse.core.posterior import Posterior
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench, ServerState
from fedfuse.methods import swa
from fedfuse.methods.swa import NonGaussianMean

pytest.importorskip("numba")

from fedfuse.kernels.sums import add_rows, power_sums, weighted_sums
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


@pytest.mark.parametrize("count", [1, 63, 64, 1000])
@pytest.mark.parametrize("begin", [0.0, 0.375])
def test_sums_of_powers_are_those_of_fractions(count: int, begin: float) -> None:
    numbers = torch.randn(count, generator=torch.Generator().manual_seed(count))
    off = [Fraction(x) - Fraction(begin) for x in numbers.tolist()]
    expected = [float(sum(x**p for x in off)) for p in (1, 2, 3, 4)]
    assert power_sums(numbers.numpy(), begin).tolist() == pytest.approx(expected, rel=1e-13, abs=1e-13)


def test_swa_is_the_same_by_compiled_code(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, draw = Spec("lenet"), torch.Generator().manual_seed(0)
    start = Single.of(spec.build(), spec)

    def update(k: int) -> ClientUpdate:
        moved = {n: t + 0.1 * torch.randn(t.shape, generator=draw).exp() for n, t in start.posterior.mean.items()}
        return ClientUpdate(f"c{k}", Posterior(moved), 1.0 + k, 1, spec)

    cohort, state = Cohort.of([update(k) for k in range(6)]), ServerState(0, start)
    by_torch = NonGaussianMean()(cohort, state, Bench())
    monkeypatch.setattr(swa, "_LONG", 1)
    compiled = NonGaussianMean()(cohort, state, Bench())
    for name, expected in by_torch.single.posterior.mean.items():
        assert torch.allclose(compiled.single.posterior.mean[name], expected, rtol=1e-6, atol=1e-8)
    for layer, scores in by_torch.facts["gaussianity"].items():
        assert compiled.facts["gaussianity"][layer] == pytest.approx(scores, rel=1e-4)

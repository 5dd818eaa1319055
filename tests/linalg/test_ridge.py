"""Ridge regression from sums, against dense algebra, scikit-learn and SciPy."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.linear_model import Ridge
from torch import Tensor

from fedfuse.errors import ConfigError
from fedfuse.linalg.ridge import RidgePath, Sums, gaussian_classes


def problem(rows: int = 60, features: int = 7, targets: int = 3, seed: int = 0) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    phi = torch.randn(rows, features, generator=draw, dtype=torch.float64)
    w = torch.randn(features, targets, generator=draw, dtype=torch.float64)
    return phi, phi @ w + torch.randn(rows, targets, generator=draw, dtype=torch.float64)


@pytest.mark.parametrize("penalty", [1e-3, 1.0, 50.0])
def test_weights_are_those_of_scikit_learn(penalty: float) -> None:
    phi, t = problem()
    theirs = Ridge(alpha=penalty, fit_intercept=False, solver="cholesky").fit(phi.numpy(), t.numpy()).coef_.T
    sums = Sums.of(phi, t)
    assert np.allclose(RidgePath.of(sums).weights(penalty).numpy(), theirs, rtol=1e-10, atol=1e-12)


def test_without_a_penalty_it_is_the_shortest_least_squares_solution() -> None:
    phi, t = problem(rows=5, features=9)
    assert torch.allclose(RidgePath.of(Sums.of(phi, t)).weights(0.0), torch.linalg.pinv(phi) @ t, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("penalty", [1e-3, 1.0, 50.0])
def test_residuals_and_freedom_are_those_of_the_rows(penalty: float) -> None:
    phi, t = problem()
    path = RidgePath.of(Sums.of(phi, t))
    hat = phi @ torch.linalg.solve(phi.mT @ phi + penalty * torch.eye(7, dtype=torch.float64), phi.mT)
    left = (t - hat @ t).square().sum(0)
    assert torch.allclose(path.residual(penalty), left, rtol=1e-10)
    assert path.freedom(penalty) == pytest.approx(float(hat.trace()), rel=1e-12)
    assert path.gcv(penalty) == pytest.approx(60 * float(left.sum()) / (60 - float(hat.trace())) ** 2, rel=1e-10)
    assert path.noise(penalty) == pytest.approx(float(left.mean()) / (60 - float(hat.trace())), rel=1e-10)


@pytest.mark.parametrize("penalty", [1e-2, 3.0])
def test_the_evidence_is_a_gaussian_density_of_the_targets(penalty: float) -> None:
    phi, t = problem(rows=12, features=4, targets=2)
    covariance = torch.eye(12, dtype=torch.float64) + phi @ phi.mT / penalty
    misfit = float((t * torch.linalg.solve(covariance, t)).sum())
    noise = misfit / t.numel()  # the best one
    dense = stats.multivariate_normal(cov=(covariance * noise).numpy())
    found = RidgePath.of(Sums.of(phi, t)).log_evidence(penalty)
    assert found == pytest.approx(sum(float(dense.logpdf(column)) for column in t.T.numpy()), rel=1e-9)


def test_cross_validation_and_evidence_find_a_good_penalty() -> None:
    """Many useless features: a chosen penalty must beat none and a huge one on fresh rows."""
    draw = torch.Generator().manual_seed(3)
    phi = torch.randn(2060, 40, generator=draw, dtype=torch.float64)
    t = phi[:, :2].sum(1, keepdim=True) + 3 * torch.randn(2060, 1, generator=draw, dtype=torch.float64)
    path = RidgePath.of(Sums.of(phi[:60], t[:60]))

    def error(penalty: float) -> float:
        return float((t[60:] - phi[60:] @ path.weights(penalty)).square().mean())

    for rule in ("gcv", "evidence"):
        chosen = error(path.choose(rule))  # type: ignore[arg-type]
        assert chosen < 0.8 * error(0.0)
        assert chosen < error(1e6)


def test_too_few_rows_choose_without_dividing_by_zero() -> None:
    phi, t = problem(rows=4, features=9)
    path = RidgePath.of(Sums.of(phi, t))
    assert all(math.isfinite(path.choose(rule)) for rule in ("gcv", "evidence"))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="cannot be chosen without rows"):
        RidgePath.of(Sums.of(phi[:0], t[:0])).choose("gcv")


@settings(max_examples=30, deadline=None)
@given(cuts=st.lists(st.integers(0, 60), max_size=5), seed=st.integers(0, 3), order=st.randoms())
def test_any_split_of_the_rows_gives_the_same_weights(cuts: list[int], seed: int, order: object) -> None:
    phi, t = problem(seed=seed)
    bounds = [0, *sorted(cuts), 60]
    parts = [Sums.of(phi[a:b], t[a:b]) for a, b in pairwise(bounds)]
    order.shuffle(parts)  # type: ignore[attr-defined]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    for rule in ("gcv", "evidence"):
        whole, split = RidgePath.of(Sums.of(phi, t)), RidgePath.of(total)
        a, b = (path.weights(path.choose(rule)) for path in (whole, split))  # type: ignore[arg-type]
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-9)


def test_what_was_added_can_be_taken_away() -> None:
    phi, t = problem()
    rest, part = Sums.of(phi[:40], t[:40]), Sums.of(phi[40:], t[40:])
    again = rest + part - part
    assert torch.allclose(RidgePath.of(again).weights(1.0), RidgePath.of(rest).weights(1.0), rtol=1e-10)
    assert again.count == 40


def labelled(counts: tuple[int, ...] = (30, 50, 20)) -> tuple[Tensor, Tensor, Tensor]:
    phi, _ = problem(rows=sum(counts))
    y = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    phi = phi + 0.7 * torch.nn.functional.one_hot(y, 7)
    return phi, y, torch.cat([phi, torch.ones(len(y), 1, dtype=torch.float64)], 1)


def test_gaussian_classes_are_linear_discriminant_analysis() -> None:
    phi, y, features = labelled()
    weights = gaussian_classes(Sums.of(features, torch.nn.functional.one_hot(y, 3)), 0.0)
    ours = (features @ weights).softmax(-1)
    # scikit-learn divides the scatter by n, as we do, in its "lsqr" solver
    theirs = LinearDiscriminantAnalysis(solver="lsqr").fit(phi.numpy(), y.numpy()).predict_proba(phi.numpy())
    assert np.allclose(ours.numpy(), theirs, atol=1e-8)


def test_a_class_nobody_has_is_unlikely_and_harmless() -> None:
    _, y, features = labelled()
    weights = gaussian_classes(Sums.of(features, torch.nn.functional.one_hot(y, 4)), 1e-3)
    probabilities = (features @ weights).softmax(-1)
    assert probabilities.isfinite().all()
    assert float(probabilities[:, 3].mean()) < 0.05

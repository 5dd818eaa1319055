"""Barycenters found by iteration: each minimizes its own divergence, and FedLPA is one of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import trapezoid
from scipy.optimize import minimize
from torch import Tensor

from fedfuse.errors import ConfigError, NotConverged
from fedfuse.linalg.kron import natural_mean
from fedfuse.methods.barycenters import AlphaDivergence, alpha_barycenter
from fedfuse.server.aggregate.charts import FKLB, RKLB, mean_in

MU, V, W = torch.tensor([0.0, 1.0, -0.7]), torch.tensor([1.0, 0.25, 2.0]), torch.tensor([0.5, 0.3, 0.2])
GRID = np.linspace(-40, 40, 40_001)


def one(alpha: float) -> tuple[float, float]:
    mean, variance = alpha_barycenter(MU[:, None], V[:, None], W, alpha)
    return mean.item(), variance.item()


# --- α-divergences


def log_density(m: float, v: float) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.asarray(-((GRID - m) ** 2) / (2 * v) - np.log(2 * np.pi * v) / 2)


def total(alpha: float, m: float, v: float) -> float:
    """Σ w_k D_α(p_k ‖ q) by the definition, integrated numerically."""
    q, each = log_density(m, v), zip(W.tolist(), MU.tolist(), V.tolist(), strict=True)
    overlaps = [(w, trapezoid(np.exp(alpha * log_density(a, b) + (1 - alpha) * q), GRID)) for w, a, b in each]
    return float(sum(w * (1 - overlap) for w, overlap in overlaps) / (alpha * (1 - alpha)))


@pytest.mark.parametrize("alpha", [0.05, 0.5, 0.9, 1.5])
def test_it_minimizes_the_divergence_as_it_is_defined(alpha: float) -> None:
    m, v = one(alpha)
    best = minimize(
        lambda q: total(alpha, q[0], np.exp(q[1])),
        (m, np.log(v)),
        method="Nelder-Mead",
        options={"xatol": 1e-6, "fatol": 1e-12},
    )
    assert (m, np.log(v)) == pytest.approx(tuple(best.x), abs=1e-4)
    here = total(alpha, m, v)
    assert all(total(alpha, m + dm, v * np.exp(dv)) > here for dm in (-0.02, 0.02) for dv in (-0.02, 0.0, 0.02))


def test_it_is_the_projection_of_the_unconstrained_barycenter() -> None:
    """Theorem 1 gives p* ∝ (Σ w p_k^α)^{1/α}; by eq. 7 its nearest Gaussian is the same."""
    alpha = 0.5
    parts = zip(W.tolist(), MU.tolist(), V.tolist(), strict=True)
    root = sum(w * np.exp(alpha * log_density(m, v)) for w, m, v in parts) ** (1 / alpha)
    star = root / trapezoid(root, GRID)
    best = minimize(
        lambda q: -trapezoid(star**alpha * np.exp((1 - alpha) * log_density(q[0], np.exp(q[1]))), GRID),
        (0.0, 0.0),
        method="Nelder-Mead",
        options={"xatol": 1e-6, "fatol": 1e-12},
    )
    m, v = one(alpha)
    assert (m, np.log(v)) == pytest.approx(tuple(best.x), abs=1e-4)


def test_its_ends_are_reverse_kl_and_kl_and_it_is_continuous_there() -> None:
    for alpha, chart in ((0.0, RKLB), (1.0, FKLB)):
        mean, variance = mean_in(chart, list(MU), list(V), W.tolist())
        expected = float(mean), float(variance)
        assert one(alpha) == pytest.approx(expected, rel=1e-6)
        assert one(alpha + 1e-5) == pytest.approx(expected, rel=1e-3)
        assert one(alpha - 1e-5) == pytest.approx(expected, rel=1e-3)


parts = st.lists(st.tuples(st.floats(-1, 1), st.floats(-4, 1), st.floats(0.1, 1)), min_size=1, max_size=5)


@given(parts, st.floats(-1.0, 2.0))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_the_slope_vanishes_where_it_stops(given_parts: list[tuple[float, float, float]], alpha: float) -> None:
    """The mixture of tilted densities p_k^α q^{1−α} has q's own moments: the condition of stationarity (Minka 2005)."""
    mu, log_v, w = (torch.tensor(column, dtype=torch.float64) for column in zip(*given_parts, strict=True))
    v, w = log_v.exp(), w / w.sum()
    m, s = (t[0] for t in alpha_barycenter(mu[:, None], v[:, None], w, alpha))
    wide = alpha * s + (1 - alpha) * v
    assert (wide > 0).all()
    share = torch.softmax(
        w.log()
        + (alpha * s.log() + (1 - alpha) * v.log() - wide.log()) / 2
        - alpha * (1 - alpha) * (mu - m) ** 2 / (2 * wide),
        0,
    )
    precision = alpha / v + (1 - alpha) / s
    tilted = (alpha * mu / v + (1 - alpha) * m / s) / precision
    mean = (share * tilted).sum()
    assert float(mean) == pytest.approx(float(m), abs=1e-6)
    assert float((share * (1 / precision + (tilted - mean) ** 2)).sum() / s) == pytest.approx(1, abs=1e-6)


def test_agreeing_posteriors_come_back_for_every_order() -> None:
    mu, v = (
        torch.randn(4, generator=torch.Generator().manual_seed(0)).double(),
        torch.tensor([0.1, 1, 2, 1e-8]).double(),
    )
    for alpha in (-2.0, 0.3, 1.7):
        mean, variance = alpha_barycenter(mu.expand(3, 4), v.expand(3, 4), W, alpha)
        torch.testing.assert_close((mean, variance), (mu, v), rtol=1e-8, atol=1e-12)


def test_what_cannot_be_found_is_said() -> None:
    with pytest.raises(NotConverged, match=r"α = 0\.5: after 1 iterations 1 of 1 elements"):
        alpha_barycenter(MU[:, None], V[:, None], W, 0.5, max_iters=1)
    with pytest.raises(ConfigError, match="alpha is nan"):
        AlphaDivergence(float("nan"))


def test_as_a_rule_it_takes_and_gives_log_variances() -> None:
    mean, variance = mean_in(AlphaDivergence(0.5), list(MU), list(V), W.tolist())
    assert (mean.shape, mean.item(), variance.item()) == ((), *(pytest.approx(x, rel=1e-6) for x in one(0.5)))
    long = mean_in(AlphaDivergence(0.5), [m.expand(3, 2000) for m in MU], [v.expand(3, 2000) for v in V], W.tolist())
    torch.testing.assert_close(long[0], mean.expand(3, 2000))
    assert not AlphaDivergence(0.5).shrinks


# --- full covariances


def test_fedlpa_is_the_reverse_kl_barycenter_under_kronecker_covariance() -> None:
    """Σ f B M A = Σ f B_k M_k A_k is eq. 8 of BA-BFL with Σ_k = (B_k ⊗ A_k)⁻¹ on the rows of M."""
    draw = torch.Generator().manual_seed(0)
    weights = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)

    def factor(d: int) -> Tensor:
        root = torch.randn(d, d, generator=draw, dtype=torch.float64)
        return root @ root.T + 0.2 * torch.eye(d)

    Ms = [torch.randn(3, 4, generator=draw, dtype=torch.float64) for _ in range(3)]
    As, Bs = [factor(4) for _ in range(3)], [factor(3) for _ in range(3)]
    precisions = weights[:, None, None] * torch.stack([torch.kron(B, A) for A, B in zip(As, Bs, strict=True)])
    pull = (precisions @ torch.stack(Ms).flatten(1)[..., None]).sum(0)
    mean = torch.linalg.solve(precisions.sum(0), pull)  # eq. 8, densely
    found = natural_mean(Ms, As, Bs, weights, solver="exact", tol=1e-12, what="a layer")
    torch.testing.assert_close(found.x, mean.view(3, 4), rtol=1e-8, atol=1e-10)

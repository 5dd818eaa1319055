import math

import pytest
import torch

from fedfuse.client.kfac import LayerBelief, best_damping
from fedfuse.linalg.kron import damp


def layer(out: int = 2, inn: int = 3, rows: int = 40, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    a = torch.randn(rows, inn, dtype=torch.float64, generator=draw)
    b = torch.randn(rows, out, dtype=torch.float64, generator=draw)
    move = torch.randn(out, inn, dtype=torch.float64, generator=draw) * 0.3
    return a.mT @ a / rows, b.mT @ b / rows, move


@pytest.mark.parametrize("split", ["one", "trace", "frobenius"])
@pytest.mark.parametrize("lam", [1e-4, 0.3, 20.0])
def test_the_sum_over_eigenvalues_equals_dense_gaussians(split: str, lam: float) -> None:
    """log N(D; 0, Λ⁻¹) − log N(0; 0, H⁻¹), with both precisions as one dense matrix."""
    A, B, move = layer()
    n = 50
    belief = LayerBelief.of(A, B, move)
    pi = belief.balances[("one", "trace", "frobenius").index(split)]
    damped_A, damped_B = damp(A, B, lam, split)
    H = n * torch.kron(damped_B, damped_A)
    prior = H - n * torch.kron(B, A)
    d = move.flatten()
    expected = 0.5 * (torch.logdet(prior) - torch.logdet(H) - d @ prior @ d)
    assert belief.log_evidence(n, lam, pi) == pytest.approx(float(expected), rel=1e-9)


def test_it_is_the_exact_evidence_of_a_linear_gaussian_model() -> None:
    """For y = X w + noise, Laplace is exact: integrate the weights out and compare two dampings."""
    draw = torch.Generator().manual_seed(1)
    n, d = 30, 3
    X = torch.randn(n, d, dtype=torch.float64, generator=draw)
    y = torch.randn(n, dtype=torch.float64, generator=draw)
    A, B = X.mT @ X / n, torch.ones(1, 1, dtype=torch.float64)

    def exact(lam: float) -> float:
        damped_A, damped_B = damp(A, B, lam)
        prior = n * (torch.kron(damped_B, damped_A) - A)
        covariance = torch.eye(n, dtype=torch.float64) + X @ torch.linalg.inv(prior) @ X.mT
        return float(-0.5 * (torch.logdet(covariance) + y @ torch.linalg.solve(covariance, y)))

    def laplace(lam: float) -> float:
        damped_A, damped_B = damp(A, B, lam)
        prior = n * (torch.kron(damped_B, damped_A) - A)
        w = torch.linalg.solve(X.mT @ X + prior, X.mT @ y)
        fit = float(-0.5 * (y - X @ w).square().sum())
        return fit + LayerBelief.of(A, B, w[None]).log_evidence(n, lam, 1.0)

    assert laplace(0.5) - laplace(0.01) == pytest.approx(exact(0.5) - exact(0.01), rel=1e-9)


def test_the_search_finds_the_best_of_a_fine_grid() -> None:
    beliefs = [LayerBelief.of(*layer(seed=s)) for s in range(3)]
    dampings, evidence = best_damping(beliefs, 50)
    assert dampings.dtype == evidence.dtype == torch.float64
    grid = [10 ** (e / 50) for e in range(-500, 100)]
    for split in range(3):
        scores = [sum(b.log_evidence(50, lam, b.balances[split]) for b in beliefs) for lam in grid]
        assert float(evidence[split]) >= max(scores) - 1e-2
        assert math.log10(float(dampings[split])) == pytest.approx(math.log10(grid[scores.index(max(scores))]), abs=0.1)


def test_layers_without_information_or_move_are_harmless() -> None:
    nothing = LayerBelief.of(torch.zeros(3, 3), torch.zeros(2, 2), torch.zeros(2, 3))
    assert nothing.balances == (1.0, 1.0, 1.0)
    assert nothing.log_evidence(10, 1e-3, 1.0) == pytest.approx(0.0, abs=1e-12)
    dampings, evidence = best_damping([nothing, LayerBelief.of(*layer())], 50)
    assert bool((dampings > 0).all())
    assert bool(evidence.isfinite().all())

"""Single precision with refinement leads to the same solution as double, or steps aside."""

from functools import partial

import pytest
import torch

from fedfuse.linalg import kron
from fedfuse.linalg.cg import SinglePrecision, conjugate_gradient, solve_refined
from fedfuse.linalg.kron import KronInverse, KronSum, natural_mean

CLIENTS, OUT, INN = 8, 20, 30


def spiked(size: int, rank: int, seed: int, rest: float = 0.1) -> torch.Tensor:
    """Matrices of a few high directions, many low ones and a number along the diagonal."""
    rng = torch.Generator().manual_seed(seed)
    X = torch.randn(CLIENTS, size, size, dtype=torch.float64, generator=rng)
    heights = torch.cat([torch.logspace(1, 0, rank), torch.logspace(-2, -5, size - rank)]).double()
    turn = torch.linalg.qr(X).Q
    return (turn * heights) @ turn.mT + rest * torch.eye(size)


def system(rank_in: int = 4, rank_out: int = 3) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    Ms = torch.randn(CLIENTS, OUT, INN, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    return Ms, spiked(INN, rank_in, 1), spiked(OUT, rank_out, 2)


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kron, "_MIN_PRODUCTS", 0)


def in_single(total: KronSum) -> SinglePrecision:
    found = total.in_single_precision()
    assert found is not None
    return found


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("ranks", [(4, 3), (28, 3), (4, 18)])
@pytest.mark.parametrize("tol", [1e-8, 1e-12])
@pytest.mark.parametrize("size", [1.0, 1e-20, 1e20])
def test_the_solution_is_that_of_the_dense_system(ranks: tuple[int, int], tol: float, size: float) -> None:
    Ms, As, Bs = system(*ranks)
    As, Bs = As * size, Bs * size
    apply, scale = KronSum.of(As, Bs, [1.0] * CLIENTS), KronInverse.of(As.mean(0), Bs.mean(0))
    found = solve_refined(apply, Ms[0], in_single(apply), precondition=scale, tol=tol, max_iters=1000, what="a layer")
    dense = torch.stack([torch.kron(B, A) for B, A in zip(Bs, As, strict=True)]).sum(0)
    exact = torch.linalg.solve(dense, Ms[0].flatten()).view(OUT, INN)
    assert found.residual <= tol
    assert float((found.x - exact).norm() / exact.norm()) < 30 * tol


@pytest.mark.usefixtures("always")
def test_the_residual_is_the_true_one() -> None:
    Ms, As, Bs = system()
    apply, scale = KronSum.of(As, Bs, [1.0] * CLIENTS), KronInverse.of(As.mean(0), Bs.mean(0))
    found = solve_refined(apply, Ms[0], in_single(apply), precondition=scale, tol=1e-8, max_iters=1000, what="a layer")
    true = float(scale(Ms[0] - apply(found.x)).norm() / scale(Ms[0]).norm())
    assert found.residual == pytest.approx(true, rel=1e-6)


@pytest.mark.usefixtures("always")
def test_it_takes_a_few_steps_where_plain_conjugate_gradients_take_many() -> None:
    Ms, As, Bs = system()
    apply, scale = KronSum.of(As, Bs, [1.0] * CLIENTS), KronInverse.of(As.mean(0), Bs.mean(0))
    options = {"precondition": scale, "tol": 1e-8, "max_iters": 1000, "what": "a layer"}
    found = solve_refined(apply, Ms[0], in_single(apply), **options)  # type: ignore[arg-type]
    assert found.iterations * 4 < conjugate_gradient(apply, Ms[0], **options).iterations  # type: ignore[arg-type]


@pytest.mark.parametrize("inverse", [torch.zeros_like, torch.neg, lambda r: torch.full_like(r, torch.nan)])
def test_a_preconditioner_of_no_use_costs_time_and_no_digit(inverse: kron.KronInverse) -> None:
    Ms, As, Bs = system()
    apply, scale = KronSum.of(As, Bs, [1.0] * CLIENTS), KronInverse.of(As.mean(0), Bs.mean(0))
    useless = SinglePrecision(KronSum(apply.left.float(), apply.right.float()), inverse, 1.0)
    found = solve_refined(apply, Ms[0], useless, precondition=scale, tol=1e-8, max_iters=1000, what="a layer")
    assert found.residual <= 1e-8


@pytest.mark.usefixtures("always")
def test_undamped_factors_are_solved_as_well() -> None:
    rng = torch.Generator().manual_seed(0)
    Ms, (X, Y) = system()[0], (torch.randn(CLIENTS, d, d + 3, dtype=torch.float64, generator=rng) for d in (INN, OUT))
    assert natural_mean(Ms, X @ X.mT, Y @ Y.mT, [1.0] * CLIENTS).residual <= 1e-8


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize(("out", "inn"), [(1, 30), (20, 1), (1, 1), (2, 3)])
def test_layers_of_one_unit_are_solved_as_well(out: int, inn: int) -> None:
    Ms, As, Bs = system()
    found = natural_mean(Ms[:, :out, :inn], As[:, :inn, :inn], Bs[:, :out, :out], [1.0] * CLIENTS)
    assert found.residual <= 1e-8


@pytest.mark.usefixtures("always")
def test_a_client_without_a_share_is_no_trouble() -> None:
    Ms, As, Bs = system()
    shares = [1.0] * (CLIENTS - 1) + [0.0]
    mean = partial(natural_mean, solver="exact", tol=1e-10)
    assert torch.allclose(mean(Ms, As, Bs, shares).x, mean(Ms[:-1], As[:-1], Bs[:-1], shares[:-1]).x, atol=1e-7)


def test_small_sums_and_diagonal_factors_are_left_to_double_precision() -> None:
    _, As, Bs = system()
    assert KronSum.of(As, Bs, [1.0] * CLIENTS).in_single_precision() is None
    diagonal = As.diagonal(dim1=-2, dim2=-1)
    assert KronSum.of(list(diagonal), list(Bs), [1.0] * CLIENTS).in_single_precision() is None

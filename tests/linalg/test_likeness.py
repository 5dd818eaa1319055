"""A cheap likeness of a sum of Kronecker products leads to the same solution, or steps aside."""

from functools import partial

import pytest
import torch

from fedfuse.linalg import likeness
from fedfuse.linalg.cg import conjugate_gradient
from fedfuse.linalg.kron import KronInverse, KronSum, natural_mean
from fedfuse.linalg.likeness import Likeness, solve_led

CLIENTS, OUT, INN = 8, 64, 128


def spiked(d: int, rank: int, seed: int, rest: float = 0.1) -> torch.Tensor:
    """Matrices of a few high directions, many low ones and a number along the diagonal."""
    rng = torch.Generator().manual_seed(seed)
    X = torch.randn(CLIENTS, d, d, dtype=torch.float64, generator=rng)
    heights = torch.cat([torch.logspace(1, 0, rank), torch.logspace(-2, -5, d - rank)]).double()
    turn = torch.linalg.qr(X).Q
    return (turn * heights) @ turn.mT + rest * torch.eye(d)


def system(rank_in: int, rank_out: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    Ms = torch.randn(CLIENTS, OUT, INN, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    return Ms, spiked(INN, rank_in, 1), spiked(OUT, rank_out, 2)


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(likeness, "_MIN_PRODUCTS", 0)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize(("ranks", "flipped"), [((6, 60), False), ((120, 3), True)])
@pytest.mark.parametrize("tol", [1e-8, 1e-12])
def test_the_solution_is_that_of_plain_conjugate_gradients(ranks: tuple[int, int], flipped: bool, tol: float) -> None:
    Ms, As, Bs = system(*ranks)
    led = Likeness.of(Bs, As, (As.mean(0), Bs.mean(0)))
    assert led is not None
    assert led.flipped is flipped
    apply, scale = KronSum.of(As, Bs, [1.0] * CLIENTS), KronInverse.of(As.mean(0), Bs.mean(0))
    options = {"precondition": scale, "tol": tol, "max_iters": 1000, "what": "a layer"}
    found, plain = solve_led(apply, Ms[0], led, **options), conjugate_gradient(apply, Ms[0], **options)  # type: ignore[arg-type]
    assert found.residual <= tol
    assert float((found.x - plain.x).norm() / plain.x.norm()) < 30 * tol


@pytest.mark.usefixtures("always")
def test_the_likeness_is_near_the_sum_and_thin() -> None:
    Ms, As, Bs = system(6, 60)
    led = Likeness.of(Bs, As, (As.mean(0), Bs.mean(0)))
    assert led is not None
    assert sum(led.widths) < CLIENTS * INN / 4
    exact = KronSum.of(As, Bs, [1.0] * CLIENTS)(Ms[0])
    near = led.turns[0].mT @ led.apply(led.turns[0] @ Ms[0].float() @ led.turns[1]) @ led.turns[1].mT
    assert float((near - exact).norm() / exact.norm()) < 0.05


@pytest.mark.usefixtures("always")
def test_without_a_cheap_likeness_there_is_none() -> None:
    rng = torch.Generator().manual_seed(0)
    X, Y = (torch.randn(CLIENTS, d, 2 * d, dtype=torch.float64, generator=rng) for d in (OUT, INN))
    lefts, rights = X @ X.mT / OUT, Y @ Y.mT / INN
    assert Likeness.of(lefts, rights, (rights.mean(0), lefts.mean(0))) is None


def test_a_small_sum_needs_no_likeness() -> None:
    Ms, As, Bs = system(6, 6)
    assert Likeness.of(Bs[:, :8, :8], As[:, :8, :8], (As[0, :8, :8], Bs[0, :8, :8])) is None
    assert natural_mean(Ms[:, :8, :8], As[:, :8, :8], Bs[:, :8, :8], [1.0] * CLIENTS).residual <= 1e-8


@pytest.mark.usefixtures("always")
def test_a_likeness_that_leads_nowhere_costs_time_and_no_digit() -> None:
    Ms, As, Bs = system(6, 60)
    other = Likeness.of(Bs.flip(1).roll(1, 0), As.flip(1, 2), (As.mean(0), Bs.mean(0)))
    assert other is not None
    apply, scale = KronSum.of(As, Bs, [1.0] * CLIENTS), KronInverse.of(As.mean(0), Bs.mean(0))
    found = solve_led(apply, Ms[0], other, precondition=scale, tol=1e-8, max_iters=1000, what="a layer")
    assert found.residual <= 1e-8


@pytest.mark.usefixtures("always")
def test_a_client_without_a_share_or_a_belief_is_no_trouble() -> None:
    Ms, As, Bs = system(6, 60)
    shares = [1.0] * (CLIENTS - 1) + [0.0]
    mean = partial(natural_mean, solver="exact", tol=1e-10)
    assert torch.allclose(mean(Ms, As, Bs, shares).x, mean(Ms[:-1], As[:-1], Bs[:-1], shares[:-1]).x, atol=1e-7)

"""Factors of a few directions, and of blocks along their diagonals: solved as the same factors written out."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedfuse.errors import NotConverged
from fedfuse.linalg.cg import Solution
from fedfuse.linalg.factor import BlockDiagonal, LowRank, block_sizes, dense
from fedfuse.linalg.kron import damp, natural_mean
from fedfuse.linalg.subspace import solve_blockwise


def spiked(d: int, r: int, rng: torch.Generator, rest: float) -> LowRank:
    basis = torch.linalg.qr(torch.randn(d, r, dtype=torch.float64, generator=rng)).Q
    eigenvalues = rest + torch.rand(r, dtype=torch.float64, generator=rng)
    return LowRank.leading(basis, eigenvalues, torch.tensor(rest, dtype=torch.float64))


def solved_densely(Ms: Tensor, As: list[LowRank], Bs: list[LowRank], f: list[float]) -> Tensor:
    precisions = [w * torch.kron(dense(B), dense(A)) for w, A, B in zip(f, As, Bs, strict=True)]
    pull = sum(P @ M.flatten() for P, M in zip(precisions, Ms, strict=True))
    return torch.linalg.solve(sum(precisions), pull).view_as(Ms[0])


@given(
    clients=st.integers(1, 3),
    out=st.integers(2, 9),
    inn=st.integers(2, 12),
    ranks=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    seed=st.integers(0, 999),
)
@settings(deadline=None, max_examples=60)
def test_the_four_parts_are_the_dense_solve(
    clients: int, out: int, inn: int, ranks: tuple[int, int], seed: int
) -> None:
    rng = torch.Generator().manual_seed(seed)
    Ms = torch.randn(clients, out, inn, dtype=torch.float64, generator=rng)
    As = [spiked(inn, min(ranks[0], inn), rng, 0.1 * (k + 1)) for k in range(clients)]
    Bs = [spiked(out, min(ranks[1], out), rng, 0.2 / (k + 1)) for k in range(clients)]
    f = [1.0 + k for k in range(clients)]
    found = natural_mean(Ms, As, Bs, f, tol=1e-12)
    assert torch.allclose(found.x, solved_densely(Ms, As, Bs, f), rtol=1e-8, atol=1e-9)


def test_one_side_may_be_of_low_rank_and_the_other_full_or_diagonal() -> None:
    rng = torch.Generator().manual_seed(0)
    Ms = torch.randn(2, 8, 9, dtype=torch.float64, generator=rng)
    low = [spiked(8, 2, rng, 0.3) for _ in range(2)]
    full = [spiked(9, 9, rng, 0.3).dense() for _ in range(2)]
    flat = [LowRank.diagonal(torch.rand(9, dtype=torch.float64, generator=rng)) for _ in range(2)]
    for other in (full, flat):
        found = natural_mean(Ms, other, low, [1, 2], tol=1e-12).x
        assert torch.allclose(found, solved_densely(Ms, other, low, [1, 2]), atol=1e-9)
        turned = natural_mean(Ms.mT, low, [dense(o) for o in other], [1, 2], tol=1e-12).x
        assert torch.allclose(turned, solved_densely(Ms.mT, low, other, [1, 2]), atol=1e-9)


def test_diagonal_factors_on_one_side_are_never_written_out() -> None:
    rng = torch.Generator().manual_seed(0)
    many = 40_000  # a matrix of so many rows would take 13 GB
    Ms = torch.randn(3, 2, many, dtype=torch.float64, generator=rng)
    diagonals = torch.rand(3, many, dtype=torch.float64, generator=rng) + 0.1
    Bs = [spiked(2, 2, rng, 0.1).dense() for _ in range(3)]
    found = natural_mean(Ms, [LowRank.diagonal(d) for d in diagonals], Bs, [1, 1, 1], tol=1e-11).x
    for column in (0, many - 1):
        system = sum(d[column] * B for d, B in zip(diagonals, Bs, strict=True))
        pull = sum(d[column] * B @ M[:, column] for d, B, M in zip(diagonals, Bs, Ms, strict=True))
        assert torch.allclose(found[:, column], torch.linalg.solve(system, pull), atol=1e-8)


def test_directions_nobody_informs_keep_the_plain_mean() -> None:
    rng = torch.Generator().manual_seed(0)
    Ms = torch.randn(2, 6, 7, dtype=torch.float64, generator=rng)
    basis = torch.eye(7, dtype=torch.float64)[:, :1]
    A = LowRank.leading(basis, torch.ones(1).double(), torch.tensor(0.0).double())
    B = LowRank.leading(torch.eye(6).double()[:, :1], torch.ones(1).double(), torch.tensor(0.0).double())
    found = natural_mean(Ms, [A, A], [B, B * 3.0], [1, 1]).x
    plain = Ms.mean(0)
    assert torch.allclose(found[0, 0], (Ms[0, 0, 0] + 3 * Ms[1, 0, 0]) / 4)
    assert torch.allclose(found[1:], plain[1:])
    assert torch.allclose(found[:, 1:], plain[:, 1:])


@pytest.mark.parametrize("solver", ["expectation", "gradient"])
def test_the_other_solvers_take_the_same_factors_written_out(solver: str) -> None:
    rng = torch.Generator().manual_seed(0)
    Ms = torch.randn(2, 6, 7, dtype=torch.float64, generator=rng)
    As, Bs = ([spiked(d, 2, rng, 0.3) for _ in range(2)] for d in (7, 6))
    written = [dense(A) for A in As], [dense(B) for B in Bs]
    found = natural_mean(Ms, As, Bs, [1, 2], solver=solver, max_iters=9).x
    assert torch.allclose(found, natural_mean(Ms, *written, [1, 2], solver=solver, max_iters=9).x)


@pytest.mark.parametrize("pi", ["one", "trace", "frobenius"])
def test_damping_a_factor_of_low_rank_is_damping_the_matrix(pi: str) -> None:
    rng = torch.Generator().manual_seed(0)
    A, B = spiked(7, 2, rng, 0.3), spiked(6, 3, rng, 0.01)
    for found, expected in zip(damp(A, B, 1e-2, pi), damp(dense(A), dense(B), 1e-2, pi), strict=True):
        assert torch.allclose(dense(found), expected)


def test_a_solver_out_of_breath_says_so() -> None:
    rng = torch.Generator().manual_seed(0)
    Ms = torch.randn(3, 30, 40, dtype=torch.float64, generator=rng)
    As, Bs = ([spiked(d, 3, rng, 1e-4) for _ in range(3)] for d in (40, 30))
    with pytest.raises(NotConverged, match="fc1"):
        natural_mean(Ms, As, Bs, [1, 1, 1], max_iters=1, what="fc1")


def moments(seed: int, size: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    rows = torch.randn(3 * size, size, generator=draw, dtype=torch.float64)
    return rows.mT @ rows / len(rows)


def solve(Ms: list[Tensor], As: list[Tensor], Bs: list[Tensor]) -> Solution:
    return natural_mean(Ms, As, Bs, [1, 2, 3], tol=1e-12)


@pytest.mark.parametrize(("wide", "tall"), [(3, 2), (7, 2), (3, 5), (7, 5)])
def test_blocks_are_solved_as_the_whole_would_be(wide: int, tall: int) -> None:
    draw = torch.Generator().manual_seed(0)
    Ms = [torch.randn(5, 7, generator=draw, dtype=torch.float64) for _ in range(3)]
    As = [BlockDiagonal.of(moments(k, 7), wide) for k in range(3)]
    Bs = [BlockDiagonal.of(moments(k + 9, 5), tall) for k in range(3)]
    damped = [damp(A, B, 0.1, "trace") for A, B in zip(As, Bs, strict=True)]
    whole = [damp(A.dense(), B.dense(), 0.1, "trace") for A, B in zip(As, Bs, strict=True)]
    found = solve_blockwise(Ms, [A for A, _ in damped], [B for _, B in damped], solve)
    expected = solve(Ms, [A for A, _ in whole], [B for _, B in whole])
    torch.testing.assert_close(found.x, expected.x, rtol=1e-9, atol=1e-9)


def test_a_matrix_of_blocks_answers_as_the_matrix_it_is() -> None:
    stack = torch.stack([moments(0, 7), moments(1, 7)])
    cut = BlockDiagonal.of(stack, 3)
    whole = cut.dense()
    assert cut.sizes == block_sizes(7, 3) == (3, 2, 2)
    assert len(cut) == 2
    assert len(cut[0]) == 7
    torch.testing.assert_close(cut.trace(), whole.diagonal(dim1=-2, dim2=-1).sum(-1))
    torch.testing.assert_close(cut[1].norm(), whole[1].norm())
    torch.testing.assert_close(cut.plus(2.0).dense(), whole + 2 * torch.eye(7, dtype=torch.float64))
    torch.testing.assert_close((cut * 3.0).dense(), 3 * whole)
    assert bool(cut.any())
    assert not bool((cut * 0.0).any())


def test_clients_with_other_blocks_are_written_out() -> None:
    Ms = [torch.full((2, 4), float(k), dtype=torch.float64) for k in range(3)]
    As = [BlockDiagonal.of(moments(k, 4), 2 + k) for k in range(3)]
    Bs = [torch.eye(2, dtype=torch.float64)] * 3
    found = solve_blockwise(Ms, As, Bs, solve)
    torch.testing.assert_close(found.x, solve(Ms, [A.dense() for A in As], Bs).x)

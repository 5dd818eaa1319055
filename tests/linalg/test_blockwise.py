"""Factors that are blocks along a diagonal: solved block by block, against the same factors written out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedfuse.linalg.cg import Solution
from fedfuse.linalg.factor import BlockDiagonal, block_sizes
from fedfuse.linalg.kron import damp, natural_mean
from fedfuse.linalg.subspace import solve_blockwise


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

"""Layers whose factors are blocks along a diagonal: as many small equations as there are pairs of blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from fedfuse.core.factor import BlockDiagonal, Factor, dense
from fedfuse.linalg.cg import Solution

Solve = Callable[[list[Tensor], list[Factor], list[Factor]], Solution]


def solve_blockwise(Ms: Sequence[Tensor], As: Sequence[Factor], Bs: Sequence[Factor], solve: Solve) -> Solution:
    """The layer M with Σ f_k B_k (M − M_k) A_k = 0, where A_k and B_k may be blocks along their diagonals.

    Block (i, j) of M meets block i of every B_k and block j of every A_k and nothing else, so each is solved by itself,
    exactly. Clients whose blocks differ are written out.

    Args:
        Ms: each client's layer, out × in.
        As: its input factor.
        Bs: its output factor.
        solve: finds a layer from whole factors.

    Returns:
        The matrix, with the iterations of all blocks and the largest residual.

    Example:
        >>> from fedfuse.linalg.kron import natural_mean
        >>> cut = BlockDiagonal.of(torch.eye(2), 1)
        >>> solve = lambda M, A, B: natural_mean(M, A, B, [1, 1])
        >>> solve_blockwise([torch.zeros(2, 2), torch.ones(2, 2)], [cut, cut * 3.0], [torch.eye(2)] * 2, solve).x
        tensor([[0.7500, 0.7500],
                [0.7500, 0.7500]], dtype=torch.float64)
    """
    inputs, outputs = list(blocks_of_all(As)), list(blocks_of_all(Bs))
    if len(inputs) == len(outputs) == 1:
        return solve(list(Ms), inputs[0][1], outputs[0][1])
    whole = torch.empty(Ms[0].shape, dtype=torch.float64, device=Ms[0].device)
    found = []
    for rows, B in outputs:
        for columns, A in inputs:
            found.append(solve([M[rows, columns] for M in Ms], A, B))
            whole[rows, columns] = found[-1].x
    return Solution(whole, sum(one.iterations for one in found), max(one.residual for one in found))


def blocks_of_all(factors: Sequence[Factor]) -> Iterator[tuple[slice, list[Factor]]]:
    """Where each block stands that all clients' factors have in common, and everybody's; whole factors are one."""
    cut = [factor for factor in factors if isinstance(factor, BlockDiagonal)]
    if not cut:
        yield slice(None), list(factors)
        return
    if len(cut) < len(factors) or len({factor.sizes for factor in cut}) > 1:
        yield slice(None), [dense(factor) for factor in factors]
        return
    for place, (begin, end) in enumerate(pairwise([0, *accumulate(cut[0].sizes)])):
        yield slice(begin, end), [factor.parts[place] for factor in cut]

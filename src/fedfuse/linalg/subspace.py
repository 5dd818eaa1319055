"""The mean of Gaussians whose factors are a few directions and a scalar: solved where those directions are.

Let every client's input factor be A_k = c_k I + V_k S_k V_kᵀ and Q an orthonormal basis of all the V_k together. Then
A_k Q = Q (Qᵀ A_k Q), and on whatever is orthogonal to Q it is c_k; the output factors B_k likewise, with e_k and a
basis P. So Σ f_k B_k M A_k = Σ f_k B_k M_k A_k falls into four parts that do not see each other:

    inside both         N = Pᵀ M Q       the same equation with Pᵀ B_k P and Qᵀ A_k Q, a few hundred rows at most
    inside P alone      Pᵀ M (I − Q Qᵀ)  Σ f_k c_k (Pᵀ B_k P) X = …, one small matrix from the left
    inside Q alone      (I − P Pᵀ) M Q   Σ f_k e_k X (Qᵀ A_k Q) = …, one from the right
    outside both        the rest         a mean with weights f_k c_k e_k

Nothing is approximated. With K clients of rank r it costs in·K·r instead of in² per row, and in² is never laid out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from fedfuse.linalg.cg import Solution
from fedfuse.linalg.factor import BlockDiagonal, Factor, LowRank, dense
from fedfuse.linalg.psd import inverse


class Client(NamedTuple):
    """One client's share, layer and factors."""

    share: float
    M: Tensor
    A: Factor
    B: Factor


Mode: TypeAlias = Callable[[Iterable[Client]], Solution]


def times(X: Tensor, A: Tensor) -> Tensor:
    """X A, for a matrix A or the vector of a diagonal one."""
    return X * A if A.ndim == 1 else X @ A


def reciprocal(diagonal: Tensor) -> Tensor:
    """One over each entry, and zero where there is nothing."""
    return torch.where(diagonal > 0, 1 / torch.where(diagonal > 0, diagonal, 1.0), 0.0)


def written(factor: Factor) -> Tensor:
    """A factor as a matrix, or as a vector if it is diagonal, in float64."""
    if isinstance(factor, LowRank) and factor.is_diagonal:
        return factor.rest.double()
    return dense(factor).double()


@dataclass(frozen=True, slots=True, eq=False)
class _Side:
    """One side's factors where their directions are, and elsewhere.

    Attributes:
        basis: Q, with orthonormal columns; None for the whole space.
        inside: Qᵀ F_k Q of every client; a vector where all are diagonal.
        outside: what F_k is on everything else; zero where there is nothing else.
    """

    basis: Tensor | None
    inside: list[Tensor]
    outside: list[float]

    @classmethod
    def of(cls, factors: Sequence[Factor]) -> _Side:
        spiked = [f.double() for f in factors if isinstance(f, LowRank) and _has_even_rest(f)]
        directions = torch.cat([f.vectors for f in spiked], 1) if len(spiked) == len(factors) else None
        if directions is None or directions.shape[1] >= len(directions):
            return cls(None, [written(f) for f in factors], [0.0] * len(factors))
        basis = torch.linalg.qr(directions).Q
        turned = [LowRank(basis.mT @ f.vectors, f.values, f.rest[: basis.shape[1]]).dense() for f in spiked]
        return cls(basis, turned, [float(f.rest[0]) for f in spiked])

    def columns(self, M: Tensor) -> Tensor:
        """M Q."""
        return M if self.basis is None else M @ self.basis

    def rows(self, M: Tensor) -> Tensor:
        """Qᵀ M."""
        return M if self.basis is None else self.basis.mT @ M

    def off_columns(self, M: Tensor) -> Tensor:
        """M (I − Q Qᵀ)."""
        return torch.zeros_like(M) if self.basis is None else M - (M @ self.basis) @ self.basis.mT

    def off_rows(self, M: Tensor) -> Tensor:
        """(I − Q Qᵀ) M."""
        return torch.zeros_like(M) if self.basis is None else M - self.basis @ (self.basis.mT @ M)

    def spread_columns(self, N: Tensor) -> Tensor:
        """N Qᵀ."""
        return N if self.basis is None else N @ self.basis.mT

    def spread_rows(self, N: Tensor) -> Tensor:
        """Q N."""
        return N if self.basis is None else self.basis @ N


def _has_even_rest(factor: LowRank) -> bool:
    """Whether one number stands all along the diagonal, and something above it."""
    return not factor.is_diagonal and bool((factor.rest == factor.rest[0]).all())


def subspace_mean(clients: Sequence[Client], mode: Mode) -> Solution:
    """The mode of the product of Gaussians N(M_k, (A_k ⊗ B_k)⁻¹)^f_k, part by part; iterations are the inner part's.

    Args:
        clients: shares, layers and factors, of one form on either side.
        mode: solves the part inside both subspaces, from full matrices.
    """
    right, left = _Side.of([c.A for c in clients]), _Side.of([c.B for c in clients])
    inside = [left.rows(right.columns(c.M.double())) for c in clients]
    found = mode(
        [Client(c.share, N, A, B) for c, N, A, B in zip(clients, inside, right.inside, left.inside, strict=True)]
    )
    M = left.spread_rows(right.spread_columns(found.x))
    if right.basis is not None:
        M = M + left.spread_rows(_below_left(clients, left, right))
    if left.basis is not None:
        M = M + right.spread_columns(_beside_right(clients, left, right))
        M = M + _outside_both(clients, left, right) if right.basis is not None else M
    return Solution(M, found.iterations, found.residual)


def _below_left(clients: Sequence[Client], left: _Side, right: _Side) -> Tensor:
    """Pᵀ M (I − Q Qᵀ): the plain mean, and the step from it that Σ f_k c_k Pᵀ B_k P asks for."""
    plain = pull = total = torch.zeros((), dtype=torch.float64)
    for c, B, outside in zip(clients, left.inside, right.outside, strict=True):
        rows = left.rows(c.M.double())
        plain = plain + c.share * rows
        pull = pull + c.share * outside * (B @ rows)
        total = total + c.share * outside * B
    return right.off_columns(plain + inverse(total) @ (pull - total @ plain))


def _beside_right(clients: Sequence[Client], left: _Side, right: _Side) -> Tensor:
    """(I − P Pᵀ) M Q, by the same step from the other side."""
    plain = pull = total = torch.zeros((), dtype=torch.float64)
    for c, A, outside in zip(clients, right.inside, left.outside, strict=True):
        columns = right.columns(c.M.double())
        plain = plain + c.share * columns
        pull = pull + c.share * outside * times(columns, A)
        total = total + c.share * outside * A
    back = inverse(total) if total.ndim == 2 else reciprocal(total)
    return left.off_rows(plain + times(pull - times(plain, total), back))


def _outside_both(clients: Sequence[Client], left: _Side, right: _Side) -> Tensor:
    """Where every factor is a scalar: the mean weighted by f_k c_k e_k, or the plain one if those are zero."""
    weights = [c.share * a * b for c, a, b in zip(clients, right.outside, left.outside, strict=True)]
    total = sum(weights)
    shares = [w / total for w in weights] if total > 0 else [c.share for c in clients]
    mean = torch.zeros_like(clients[0].M, dtype=torch.float64)
    for c, share in zip(clients, shares, strict=True):
        mean.add_(c.M, alpha=share)
    return left.off_rows(right.off_columns(mean))


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
    """Where each block stands that all clients' factors share, and every client's; whole factors are one."""
    cut = [factor for factor in factors if isinstance(factor, BlockDiagonal)]
    if not cut:
        yield slice(None), list(factors)
        return
    if len(cut) < len(factors) or len({factor.sizes for factor in cut}) > 1:
        yield slice(None), [dense(factor) for factor in factors]
        return
    for place, (begin, end) in enumerate(pairwise([0, *accumulate(cut[0].sizes)])):
        yield slice(begin, end), [factor.parts[place] for factor in cut]

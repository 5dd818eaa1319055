"""The inverse of a sum of Kronecker products whose factors are a number along the diagonal and few high directions.

With c_k and e_k the numbers along the diagonals of A_k and B_k,

    Σ B_k ⊗ A_k  =  Σ (e_k I ⊗ A_k + c_k B_k ⊗ I − c_k e_k I)  +  Σ (B_k − e_k I) ⊗ (A_k − c_k I)

The first sum is diagonal where Σ e_k A_k and Σ c_k B_k are. The second is large only where a high direction of B_k
meets a high one of the same A_k: the highest of these pairs are kept, and Woodbury's identity inverts both together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from fedfuse.linalg.psd import add_diagonal, inverse

_DIRECTIONS = 12  # of each factor that are looked at first
_HIGH = 10.0  # the lowest of them, in units of the rest, from which twice as many are looked at
_SPARE = 8  # more than that are swept, so that the last ones are found too
_SWEEPS = 4  # each multiplies a direction by its height above the others
_LOW = 0.05  # the height of a pair, in units of what the first sum is there, from which it is kept
_FLAT = 1e-6  # of D's largest entry, down to which its smallest can be divided by in single precision
_MOST = 512  # pairs that are kept, or, where that is more,
_SHARE = 0.5  # of as many whose products among themselves cost as much as one sum


@dataclass(frozen=True, slots=True, eq=False)
class SpikedInverse:
    """Z ↦ (D + V C Vᵀ)⁻¹ Z, where D is diagonal behind two orthogonal turns and V's columns are pairs r ⊗ l.

    Attributes:
        turns: the orthogonal matrices that lead where D is diagonal, from the left and from the right.
        scale: D⁻¹, as a matrix.
        rows: all directions r, turned, side by side.
        columns: all directions l, turned, side by side.
        pairs: which of all rows × columns, laid flat, are kept.
        core: (C⁻¹ + Vᵀ D⁻¹ V)⁻¹, as C^½ (I + C^½ Vᵀ D⁻¹ V C^½)⁻¹ C^½.
    """

    turns: tuple[Tensor, Tensor]
    scale: Tensor
    rows: Tensor
    columns: Tensor
    pairs: Tensor
    core: Tensor

    @classmethod
    def of(cls, lefts: Tensor, rights: Tensor) -> SpikedInverse | None:
        """The inverse of M ↦ Σ lefts[k] M rights[k], nearly, or None where nothing stands along the diagonals.

        Args:
            lefts: B_k, (clients × out × out), positive semi-definite.
            rights: A_k, (clients × in × in), positive semi-definite.
        """
        left, right = _Spikes.of(lefts), _Spikes.of(rights)
        mu, U = torch.linalg.eigh(_weighted_sum(right.rests, lefts))
        lam, V = torch.linalg.eigh(_weighted_sum(left.rests, rights))
        even = mu[:, None] + lam - (left.rests * right.rests).sum()
        # numbers along diagonals are means: where a factor falls below its own, the sum must not turn negative
        even = torch.maximum(even, torch.maximum(mu[:, None], lam) / 2)
        if not float(even.min()) > _FLAT * float(even.max()):
            return None
        return cls._with_pairs(even, (U.mT, V), left.turn_by(U.mT), right.turn_by(V.mT))

    @classmethod
    def _with_pairs(cls, even: Tensor, turns: tuple[Tensor, Tensor], left: _Spikes, right: _Spikes) -> SpikedInverse:
        """The inverse of D and the highest pairs of directions of the same client."""
        heights = left.heights[:, :, None] * right.heights[:, None, :]
        under = (left.vectors.square().mT @ even) @ right.vectors.square()  # what D is along each pair
        clients, inner, last = heights.shape
        most = max(_MOST, int(_SHARE * math.sqrt(clients * len(even) * sum(even.shape))))
        kept = _highest((heights / under).flatten(), most)
        row_ids, row = (kept // last).unique(return_inverse=True)
        column_ids, column = (kept // (inner * last) * last + kept % last).unique(return_inverse=True)
        rows, columns = left.side_by_side()[:, row_ids], right.side_by_side()[:, column_ids]
        scale, roots = 1 / even, heights.flatten()[kept].sqrt()
        core = _pair_products(scale, rows, columns, row, column).mul_(roots).mul_(roots[:, None])
        if len(kept):
            core = inverse(add_diagonal(core.double(), 1.0)).to(core).mul_(roots).mul_(roots[:, None])
        return cls(turns, scale, rows, columns, row * columns.shape[1] + column, core)

    def __call__(self, Z: Tensor) -> Tensor:
        """The solution for one right-hand side."""
        turned = self.turns[0] @ Z @ self.turns[1]
        seen = ((self.rows.mT @ (turned * self.scale)) @ self.columns).flatten()[self.pairs]
        back = turned.new_zeros(self.rows.shape[1] * self.columns.shape[1])
        back[self.pairs] = self.core @ seen
        images = self.rows @ back.view(self.rows.shape[1], self.columns.shape[1])
        found = torch.addmm(turned, images, self.columns.mT, alpha=-1).mul_(self.scale)
        return self.turns[0].mT @ found @ self.turns[1].mT


class _Spikes(NamedTuple):
    """Symmetric matrices as rests[k] I + Σ_i heights[k, i] v_i v_iᵀ, nearly.

    Attributes:
        rests: one number per matrix.
        heights: (matrices × directions).
        vectors: (matrices × size × directions).
    """

    rests: Tensor
    heights: Tensor
    vectors: Tensor

    @classmethod
    def of(cls, stack: Tensor) -> _Spikes:
        """As many leading directions as stand high above the rest, by orthogonal iteration."""
        size, count = stack.shape[-1], _DIRECTIONS
        found = cls._leading(stack, min(count, size // 2))
        while count < size // 4 and bool((found.heights[:, 0] > _HIGH * found.rests).any()):
            count *= 2
            found = cls._leading(stack, min(count, size // 2))
        return found

    @classmethod
    def _leading(cls, stack: Tensor, count: int) -> _Spikes:
        """So many leading directions, and the mean of all other eigenvalues."""
        size = stack.shape[-1]
        draw = torch.Generator().manual_seed(size)
        basis = torch.randn(size, min(size, count + _SPARE), generator=draw).to(stack).expand(len(stack), -1, -1)
        for _ in range(_SWEEPS):
            basis = torch.linalg.qr(stack @ basis).Q
        values, turn = torch.linalg.eigh(basis.mT @ (stack @ basis))
        others = values.shape[1] - count
        values = values[:, others:]
        traces = stack.diagonal(dim1=-2, dim2=-1).sum(-1)
        rests = ((traces - values.sum(-1)) / (size - count)).clamp(min=0)
        return cls(rests, (values - rests[:, None]).clamp(min=0), (basis @ turn)[:, :, others:])

    def turn_by(self, turn: Tensor) -> _Spikes:
        """The same behind an orthogonal matrix."""
        return self._replace(vectors=turn @ self.vectors)

    def side_by_side(self) -> Tensor:
        """All directions of all matrices, (size × all)."""
        return self.vectors.movedim(0, 1).flatten(1)


def _weighted_sum(weights: Tensor, stack: Tensor) -> Tensor:
    return (weights[:, None, None] * stack).sum(0)


def _highest(shares: Tensor, most: int) -> Tensor:
    """Where the largest of some numbers are that are worth keeping, ascending."""
    order = shares.argsort(descending=True, stable=True)[:most]
    return order[shares[order] > _LOW].sort().values


def _pair_products(scale: Tensor, rows: Tensor, columns: Tensor, row: Tensor, column: Tensor) -> Tensor:
    """Vᵀ D⁻¹ V for the pairs rows[row[n]] ⊗ columns[column[n]], ascending by row: Σ_ab r_a r'_a D⁻¹_ab l_b l'_b."""
    across = columns.mT[column]
    gram = across.new_zeros(len(row), len(row))
    ends = row.bincount().cumsum(0).tolist()
    for r, (begin, end) in enumerate(pairwise([0, *ends])):  # the products with later rows: the matrix is symmetric
        along = (rows[:, r:] * rows[:, r, None]).mT @ scale
        gram[begin:end, begin:] = across[begin:end] @ (along[row[begin:] - r] * across[begin:]).mT
    return gram.triu() + gram.triu(1).mT

"""Symmetric matrices that need not be written out: a diagonal, and a few directions that stand above it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class LowRank:
    """The matrix diag(rest) + V diag(values) Vᵀ, or a stack of them; it answers to a square tensor's own names.

    The r leading eigenpairs (λ_i, v_i) of a matrix and a scalar c for the rest are V = [v_1 … v_r], values = λ − c and
    c all along the diagonal. A diagonal matrix has no directions.

    Attributes:
        vectors: V, (… × d × r).
        values: by how much each direction stands above the diagonal, (… × r).
        rest: the diagonal, (… × d).

    Example:
        >>> LowRank(torch.tensor([[1.0], [0.0]]), torch.tensor([3.0]), torch.ones(2)).dense()
        tensor([[4., 0.],
                [0., 1.]])
    """

    vectors: Tensor
    values: Tensor
    rest: Tensor

    @classmethod
    def diagonal(cls, entries: Tensor) -> LowRank:
        """The diagonal matrix with these entries.

        Example:
            >>> LowRank.diagonal(torch.tensor([1.0, 2.0])).trace()
            tensor(3.)
        """
        return cls(entries.new_zeros(*entries.shape, 0), entries.new_zeros(*entries.shape[:-1], 0), entries)

    @classmethod
    def leading(cls, vectors: Tensor, eigenvalues: Tensor, rest: Tensor) -> LowRank:
        """The matrix with these eigenpairs, and the eigenvalue `rest` for everything else."""
        diagonal = rest[..., None].expand(*rest.shape, vectors.shape[-2])
        return cls(vectors, eigenvalues - rest[..., None], diagonal)

    @property
    def ndim(self) -> int:
        """2, or 3 for a stack."""
        return self.vectors.ndim

    @property
    def is_diagonal(self) -> bool:
        """Whether there is nothing but the diagonal."""
        return self.vectors.shape[-1] == 0

    def __len__(self) -> int:
        return len(self.vectors)

    def __getitem__(self, index: int | Tensor) -> LowRank:
        """One matrix of a stack, or some of them."""
        return LowRank(self.vectors[index], self.values[index], self.rest[index])

    def double(self) -> LowRank:
        """The same in float64."""
        return LowRank(self.vectors.double(), self.values.double(), self.rest.double())

    def any(self) -> Tensor:
        """Whether the matrix is not zero."""
        return self.values.any() | self.rest.any()

    def trace(self) -> Tensor:
        """The sum of the diagonal."""
        return self.rest.sum(-1) + (self.vectors.square().sum(-2) * self.values).sum(-1)

    def norm(self) -> Tensor:
        """The Frobenius norm."""
        overlaps = self.vectors.mT @ self.vectors
        crossed = (self.vectors.square() * self.rest[..., None]).sum(-2) * self.values
        spikes = self.values @ overlaps.square() @ self.values
        return (self.rest.square().sum() + 2 * crossed.sum() + spikes).clamp(min=0).sqrt()

    def __mul__(self, scale: float) -> LowRank:
        return LowRank(self.vectors, self.values * scale, self.rest * scale)

    def plus(self, shift: float) -> LowRank:
        """The matrix with `shift` added along its diagonal."""
        return LowRank(self.vectors, self.values, self.rest + shift)

    def reorder(self, index: Tensor) -> LowRank:
        """The matrix with its rows and columns in another order, some perhaps left out; one index for each of a stack.

        Example:
            >>> LowRank.diagonal(torch.tensor([1.0, 2.0, 3.0])).reorder(torch.tensor([2, 0])).rest
            tensor([3., 1.])
        """
        wide = index[..., None].expand(*index.shape, self.vectors.shape[-1])
        return LowRank(self.vectors.gather(-2, wide), self.values, self.rest.gather(-1, index))

    def dense(self) -> Tensor:
        """The matrix written out."""
        return (self.vectors * self.values[..., None, :]) @ self.vectors.mT + torch.diag_embed(self.rest)


Factor: TypeAlias = Tensor | LowRank


def dense(factor: Factor) -> Tensor:
    """A factor as a plain matrix, or a stack of them."""
    return factor.dense() if isinstance(factor, LowRank) else factor


def as_stack(factor: Factor) -> Factor:
    """A factor as a stack of one; a stack as it is."""
    if factor.ndim > 2:
        return factor
    return factor[None]  # type: ignore[index]

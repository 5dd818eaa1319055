"""Symmetric matrices that need not be written out: a diagonal, and a few directions that stand above it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
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


@dataclass(frozen=True, slots=True, eq=False)
class BlockDiagonal:
    """A matrix of square blocks along its diagonal and zeros elsewhere, or a stack of them.

    Attributes:
        parts: the blocks from the top left on, (… × d_i × d_i).

    Example:
        >>> cut = BlockDiagonal.of(torch.ones(3, 3), width=2)
        >>> cut.sizes, cut.dense().tolist()
        ((2, 1), [[1.0, 1.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    """

    parts: tuple[Tensor, ...]

    @classmethod
    def of(cls, matrix: Tensor, width: int) -> BlockDiagonal:
        """What blocks of at most so many rows hold of a matrix."""
        return cls.of_sizes(matrix, block_sizes(matrix.shape[-1], width))

    @classmethod
    def of_sizes(cls, matrix: Tensor, sizes: Sequence[int]) -> BlockDiagonal:
        """What blocks of these sizes hold of a matrix."""
        ends = list(accumulate(sizes))
        return cls(tuple(matrix[..., a:b, a:b] for a, b in pairwise([0, *ends])))

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many rows every block has."""
        return tuple(part.shape[-1] for part in self.parts)

    @property
    def ndim(self) -> int:
        """2, or 3 for a stack."""
        return self.parts[0].ndim

    def __len__(self) -> int:
        return len(self.parts[0]) if self.ndim > 2 else sum(self.sizes)

    def __getitem__(self, index: int | Tensor) -> BlockDiagonal:
        """One matrix of a stack, or some of them."""
        return BlockDiagonal(tuple(part[index] for part in self.parts))

    def double(self) -> BlockDiagonal:
        """The same in float64."""
        return BlockDiagonal(tuple(part.double() for part in self.parts))

    def any(self) -> Tensor:
        """Whether the matrix is not zero."""
        return torch.stack([part.any() for part in self.parts]).any()

    def trace(self) -> Tensor:
        """The sum of the diagonal."""
        return torch.stack([part.diagonal(dim1=-2, dim2=-1).sum(-1) for part in self.parts]).sum(0)

    def norm(self) -> Tensor:
        """The Frobenius norm."""
        return torch.stack([torch.linalg.vector_norm(part) for part in self.parts]).square().sum().sqrt()

    def __mul__(self, scale: float) -> BlockDiagonal:
        return BlockDiagonal(tuple(part * scale for part in self.parts))

    def plus(self, shift: float) -> BlockDiagonal:
        """The matrix with `shift` added along its diagonal."""
        ones = (torch.eye(size, dtype=p.dtype, device=p.device) for size, p in zip(self.sizes, self.parts, strict=True))
        return BlockDiagonal(tuple(part + shift * one for part, one in zip(self.parts, ones, strict=True)))

    def dense(self) -> Tensor:
        """The matrix written out."""
        size, at = sum(self.sizes), 0
        whole = self.parts[0].new_zeros(*self.parts[0].shape[:-2], size, size)
        for part in self.parts:
            whole[..., at : at + part.shape[-1], at : at + part.shape[-1]] = part
            at += part.shape[-1]
        return whole


def block_sizes(size: int, width: int) -> tuple[int, ...]:
    """The sizes of as few diagonal blocks as have at most so many rows, as even as can be.

    Example:
        >>> block_sizes(10, 4), block_sizes(4, 4)
        ((4, 3, 3), (4,))
    """
    count = -(-size // width)
    return tuple(size // count + (k < size % count) for k in range(count))


Factor: TypeAlias = Tensor | LowRank | BlockDiagonal


def dense(factor: Factor) -> Tensor:
    """A factor as a plain matrix, or a stack of them."""
    return factor if isinstance(factor, Tensor) else factor.dense()


def as_stack(factor: Factor) -> Factor:
    """A factor as a stack of one; a stack as it is."""
    if factor.ndim > 2:
        return factor
    return factor[None]  # type: ignore[index]

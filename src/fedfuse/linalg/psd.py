"""Symmetric positive semi-definite matrices: how they travel, whether they are one, and their solves."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from fedfuse.errors import ConfigError, NotConverged

_DENSE = 400  # up to so many rows all eigenvalues cost no more than a few
_SWEEPS = 12
_REMEMBERED = 512  # rows up to which the places of a packed matrix are kept: 2 MiB each
# Beyond this ratio of extreme Cholesky pivots an inverse is rounding noise; then eigenvalues decide.
_WORST_PIVOT_RATIO = 1e-6


def symmetrize(A: Tensor) -> Tensor:
    """The symmetric part (A + Aᵀ) / 2 of a matrix, or of each matrix of a stack.

    Example:
        >>> symmetrize(torch.tensor([[1.0, 4.0], [0.0, 1.0]]))
        tensor([[1., 2.],
                [2., 1.]])
    """
    return (A + A.mT) / 2


def add_diagonal(A: Tensor, shift: float) -> Tensor:
    """A + shift·I, leaving A as it was.

    Example:
        >>> add_diagonal(torch.zeros(2, 2), 3.0)
        tensor([[3., 0.],
                [0., 3.]])
    """
    moved = A.clone()
    moved.diagonal(dim1=-2, dim2=-1).add_(shift)
    return moved


def packed_size(d: int) -> int:
    """How many numbers a symmetric d × d matrix holds: d (d + 1) / 2.

    Example:
        >>> sum(packed_size(d) for d in (76, 151, 401, 121, 85, 6, 16, 120, 84, 10))
        117081
    """
    return d * (d + 1) // 2


def pack(A: Tensor) -> Tensor:
    """The upper triangle of a symmetric matrix, row by row, as a vector; stacks are packed one by one.

    Example:
        >>> pack(torch.tensor([[1.0, 2.0], [2.0, 3.0]]))
        tensor([1., 2., 3.])
    """
    if A.ndim < 2 or A.shape[-1] != A.shape[-2]:
        raise ConfigError(f"pack: got a tensor of shape {tuple(A.shape)}, expected square matrices")
    row, col = _triangle(A.shape[-1], A.device)
    return A[..., row, col]


def _triangle(d: int, device: torch.device) -> Tensor:
    """Where the entries of an upper triangle are; up to a size, for every reply asks for them, they are kept."""
    find = _upper if d <= _REMEMBERED else _upper.__wrapped__
    return find(d).to(device)


@lru_cache(maxsize=32)
def _upper(d: int) -> Tensor:
    return torch.triu_indices(d, d)


def unpack(v: Tensor, d: int) -> Tensor:
    """The symmetric d × d matrix whose upper triangle, row by row, is `v`; the inverse of `pack`.

    Example:
        >>> unpack(torch.tensor([1.0, 2.0, 3.0]), 2)
        tensor([[1., 2.],
                [2., 3.]])
    """
    if v.ndim < 1 or v.shape[-1] != packed_size(d):
        raise ConfigError(
            f"unpack: got shape {tuple(v.shape)}, expected {packed_size(d)} numbers for a symmetric {d} × {d} matrix"
        )
    place = _places(d) if d <= _REMEMBERED else _places.__wrapped__(d)
    return v.index_select(-1, place.to(v.device)).view(*v.shape[:-1], d, d)


@lru_cache(maxsize=32)
def _places(d: int) -> Tensor:
    """Where each entry of a symmetric d × d matrix stands in its packed triangle, row by row."""
    row, col = _upper.__wrapped__(d)
    place = torch.empty(d, d, dtype=torch.long)
    place[row, col] = place[col, row] = torch.arange(packed_size(d))
    return place.flatten()


def is_psd(A: Tensor, tol: float = 1e-6) -> bool:
    """Whether a matrix is square, finite, symmetric and positive semi-definite, each within `tol`.

    Both |A − Aᵀ| and −λ_min(A) may reach tol·‖A‖_F. A Cholesky factorisation of A + tol·‖A‖_F·I answers
    for nearly all matrices; eigenvalues are computed only where it fails.

    Example:
        >>> is_psd(torch.eye(3)), is_psd(-torch.eye(3)), is_psd(torch.full((2, 2), torch.nan))
        (True, False, False)
    """
    if A.ndim != 2 or A.shape[0] != A.shape[1] or not bool(torch.isfinite(A).all()):
        return False
    A = A.double()
    peak = A.abs().max() if A.numel() else A.new_zeros(())
    if peak == 0:
        return True
    A = A / peak  # so that no square below can overflow
    slack = tol * float(A.norm())
    if float((A - A.mT).abs().max()) > slack:
        return False
    A = symmetrize(A)
    if _cholesky_holds(add_diagonal(A, slack)):
        return True
    return float(torch.linalg.eigvalsh(A)[0]) >= -slack


def inverse(A: Tensor) -> Tensor:
    """The inverse of a positive definite matrix, or the pseudo-inverse where it is singular to rounding.

    By Cholesky, about ten times cheaper than eigenvalues, which are computed only for singular matrices.

    Example:
        >>> inverse(torch.diag(torch.tensor([4.0, 0.0])))
        tensor([[0.2500, 0.0000],
                [0.0000, 0.0000]])
    """
    factor, info = torch.linalg.cholesky_ex(symmetrize(A))
    pivots = factor.diagonal()
    if int(info) == 0 and float(pivots.min()) > _WORST_PIVOT_RATIO * float(pivots.max()):
        return torch.cholesky_inverse(factor)
    vectors, values = _range(A)
    return (vectors / values) @ vectors.mT


def leading_eigenpairs(A: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The leading eigenvectors of a positive semi-definite matrix, and their eigenvalues with one number for the rest.

    The last number is the mean of all other eigenvalues, so that the trace is kept, and no leading one is below it.
    Large matrices are swept by orthogonal iteration (Halko, Martinsson and Tropp 2011, section 4.5) from directions
    that are always the same; eigenvectors of nearly equal eigenvalues may mix, and what is left out is in the rest.

    Args:
        A: symmetric, (d × d).
        rank: how many eigenvectors, at most d.

    Returns:
        (d × rank) and (rank + 1), float64, the largest first.

    Example:
        >>> leading_eigenpairs(torch.diag(torch.tensor([1.0, 5.0, 3.0])), 1)[1]
        tensor([5., 2.], dtype=torch.float64)
    """
    A = symmetrize(A.double())
    size = len(A)
    if size <= _DENSE:
        values, vectors = torch.linalg.eigh(A)
    else:
        start = torch.randn(size, 2 * rank + 8, dtype=A.dtype, generator=torch.Generator().manual_seed(size))
        basis = start.to(A.device)
        for _ in range(_SWEEPS):
            basis = torch.linalg.qr(A @ basis).Q
        values, turn = torch.linalg.eigh(basis.mT @ A @ basis)
        vectors = basis @ turn
    values, vectors = values.flip(0)[:rank].clamp(min=0), vectors.flip(1)[:, :rank]
    rest = ((A.trace() - values.sum()) / max(1, size - rank)).clamp(min=0)
    return vectors, torch.cat([values.clamp(min=float(rest)), rest[None]])


def cholesky(A: Tensor, *, what: str = "a matrix") -> Tensor:
    """The lower Cholesky factor of a matrix that is positive definite but for rounding.

    Tries A, then A + j·mean(diag A)·I for j = 1e-14, 1e-13, …, 1e-6.

    Raises:
        NotConverged: if A is not positive semi-definite beyond rounding.

    Example:
        >>> cholesky(torch.tensor([[4.0, 2.0], [2.0, 5.0]]))
        tensor([[2., 0.],
                [1., 2.]])
    """
    A = symmetrize(A)
    scale = float(A.diagonal().mean())
    factor: Tensor
    for jitter in (0.0, *(10.0**e for e in range(-14, -5))):
        factor, info = torch.linalg.cholesky_ex(add_diagonal(A, jitter * scale))
        if int(info) == 0:
            return factor
    raise NotConverged(
        f"{what}: pivot {int(info)} of its Cholesky factorisation is not positive even with a jitter of 1e-6, "
        "expected a positive semi-definite matrix; damp it, or look for a wrong sign"
    )


def solve(A: Tensor, b: Tensor, *, what: str = "a matrix") -> Tensor:
    """Solve A x = b for a positive definite A by a Cholesky factorisation with jitter; b is a vector or matrix.

    Example:
        >>> solve(torch.tensor([[4.0, 2.0], [2.0, 5.0]]), torch.tensor([6.0, 7.0]))
        tensor([1., 1.])
    """
    columns = b if b.ndim > 1 else b[:, None]
    return torch.cholesky_solve(columns, cholesky(A, what=what)).reshape(b.shape)


def _cholesky_holds(A: Tensor) -> bool:
    return int(torch.linalg.cholesky_ex(A).info) == 0


def _range(A: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvectors and eigenvalues of A that stand above rounding."""
    values, vectors = torch.linalg.eigh(symmetrize(A))
    floor = len(A) * torch.finfo(A.dtype).eps * float(values.abs().max())
    kept = values > floor
    return vectors[:, kept], values[kept]

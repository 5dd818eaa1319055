"""The natural mean on the way: from a given start, and stopped before it is reached."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fedfuse.core.factor import Factor, dense
from fedfuse.linalg.cg import Solution, conjugate_gradient
from fedfuse.linalg.kron import KronSum
from fedfuse.linalg.subspace import times, written

_TOL = 1e-10  # by then there is nothing left to stop early


def early_mean(
    Ms: Sequence[Tensor],
    As: Sequence[Factor],
    Bs: Sequence[Factor],
    shares: Tensor,
    *,
    start: Tensor,
    iterations: int,
    what: str,
) -> Solution:
    """So many iterations of plain conjugate gradients for Σ f_k B_k (M − M_k) A_k = 0, from a start (MaTS).

    Example:
        >>> I = torch.eye(2)
        >>> early_mean([I, 4 * I], [I, I], [I, 2 * I], torch.tensor([0.5, 0.5]), start=I, iterations=1, what="w").x
        tensor([[3., 0.],
                [0., 3.]], dtype=torch.float64)
    """
    operator, Z = _system(Ms, As, Bs, shares)
    return conjugate_gradient(operator, Z, x0=start, tol=_TOL, max_iters=iterations, strict=False, what=what)


def descend(
    Ms: Sequence[Tensor],
    As: Sequence[Factor],
    Bs: Sequence[Factor],
    shares: Tensor,
    *,
    start: Tensor,
    rate: float,
    every: int,
) -> Iterator[Tensor]:
    """Adam's steps down Σ f_k tr((M − M_k)ᵀ B_k (M − M_k) A_k) from a start (FedFisher): M every so many steps.

    Example:
        >>> I = torch.eye(1)
        >>> steps = descend([I, 3 * I], [I, I], [I, I], torch.tensor([0.5, 0.5]), start=I, rate=0.1, every=500)
        >>> round(float(next(steps)), 3)
        2.0
    """
    operator, Z = _system(Ms, As, Bs, shares)
    M = start.double().clone()
    optimizer = torch.optim.Adam([M], lr=rate)
    while True:
        for _ in range(every):
            M.grad = operator(M) - Z
            optimizer.step()
        yield M.clone()


def _system(Ms: Sequence[Tensor], As: Sequence[Factor], Bs: Sequence[Factor], shares: Tensor) -> tuple[KronSum, Tensor]:
    """The operator M ↦ Σ f_k B_k M A_k, and Σ f_k B_k M_k A_k."""
    inputs, outputs = [written(A) for A in As], [dense(B).double() for B in Bs]
    Z = torch.zeros_like(Ms[0], dtype=torch.float64)
    for f, M, A, B in zip(shares.tolist(), Ms, inputs, outputs, strict=True):
        Z.add_(times(B @ M.double(), A), alpha=f)
    return KronSum.of(inputs, outputs, shares), Z

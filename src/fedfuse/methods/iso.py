"""Marczak et al., No Task Left Behind: Isotropic Model Merging with Common and Task-Specific Subspaces, ICML 2025.

Iso-C: the sum of the clients' moves from their common start, with its spectrum made flat, matrix by matrix,

    δ = K Σ_k f_k (w_k − w₀) = U Σ Vᵀ,      w = w₀ + λ σ̄ U Vᵀ,      σ̄ the mean of Σ
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedfuse.core.messages import Cohort
from fedfuse.core.params import Params
from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import method
from fedfuse.core.seams import ServerPart
from fedfuse.core.state import Bench, ServerState
from fedfuse.server.aggregate.moves import BASE_LAWS, blocks_of, fuse_weights, move_along, move_block, sources_of


@dataclass(frozen=True, slots=True)
class IsotropicSum(ServerPart):
    """w = w₀ + λ σ̄ U Vᵀ, where U Σ Vᵀ = K Σ_k f_k δ_k and σ̄ is the mean of Σ.

    Weights of more than two dimensions are laid out as matrices, outputs × everything else; biases and norms take the
    mean move. Directions in which no client moved (singular values that are nothing but rounding) stay out.

    Attributes:
        scale: λ.
    """

    scale: float = 1.0
    needs: ClassVar[frozenset[str]] = frozenset({"start"})
    tensorwise: ClassVar[bool] = True
    laws: ClassVar[frozenset[str]] = BASE_LAWS

    def __call__(self, cohort: Cohort, state: ServerState, bench: Bench) -> ServerState:  # noqa: ARG002
        """Flatten the spectrum of every matrix."""
        start, sources, shares = state.single.posterior.mean, sources_of(cohort), cohort.weights

        def rule(name: str) -> Tensor:
            like = start[name]
            if like.ndim < 2:
                return move_along(sources, start, self.scale * shares, name)
            flat = flatten_spectrum(_summed_move(sources, start, shares, name).view(len(like), -1))
            moved = flat.mul_(self.scale).add_(like.reshape(flat.shape)).to(like.dtype)
            return moved.contiguous().view(like.shape)  # a wide matrix was flattened on its side

        return state.fused(fuse_weights(cohort, rule), spec=cohort.updates[0].spec)


def _summed_move(sources: list[Params], start: Params, shares: Tensor, name: str) -> Tensor:
    """K Σ_k f_k δ_k of one tensor laid flat, in float64; nothing else of its size is held."""
    total = torch.empty(start[name].numel(), dtype=torch.float64)
    for begin, end in blocks_of(sources[0], name):
        total[begin:end] = len(shares) * shares @ move_block(sources, start, name, begin, end)
    return total


def flatten_spectrum(matrix: Tensor) -> Tensor:
    """The matrix with each of its singular values replaced by their mean: σ̄ A (AᵀA)^(−1/2), by the smaller side.

    Squares lose digits, (σ_1/σ_n)² of them: where the spectrum spans more than four decades, or directions are missing,
    the singular values of R in A = QR are taken instead.

    Example:
        >>> flatten_spectrum(torch.diag(torch.tensor([3.0, 1.0], dtype=torch.float64)))
        tensor([[2., 0.],
                [0., 2.]], dtype=torch.float64)
    """
    if matrix.shape[0] < matrix.shape[1]:
        return flatten_spectrum(matrix.mT).mT
    squares, vectors = torch.linalg.eigh(matrix.mT @ matrix)
    values = squares.clamp(min=0).sqrt()
    # below 1e-4 of the largest the square is 1e-8 of the largest square, and half of its sixteen digits are rounding;
    # NaN fails the comparison too
    if not bool(values[0] > 1e-4 * values[-1]):
        return _flatten_by_factors(matrix)
    flat: Tensor = matrix @ ((vectors * (values.mean() / values)) @ vectors.mT)
    return flat


def _flatten_by_factors(matrix: Tensor) -> Tensor:
    """The same for any tall matrix, without directions in which nothing moved."""
    basis, small = torch.linalg.qr(matrix)
    left, values, right = torch.linalg.svd(small)
    moved = values > torch.finfo(matrix.dtype).eps * max(matrix.shape) * values.amax()
    if not bool(moved.any()):
        return torch.zeros_like(matrix)
    flat: Tensor = basis @ (values[moved].mean() * left[:, moved] @ right[moved])
    return flat


@method("iso", paper="arXiv:2502.04959", family="base")
def iso(scale: float = 1.0) -> Recipe:
    """Add the clients' moves and let every direction of their sum count alike: singular values become their mean.

    Args:
        scale: λ, what the flattened move is multiplied by; best chosen on held-out rows.
    """
    return Recipe(aggregate=IsotropicSum(scale))

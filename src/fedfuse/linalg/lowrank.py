"""Products of thin matrices, B A, handled by their factors: what they are together is never written out."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fedfuse.linalg.psd import symmetrize


class ThinProduct(NamedTuple):
    """A matrix X = B A, outputs × inputs, that stands for another one.

    Attributes:
        left: B.
        right: A.
        error: how far X is from the other, as a share of its norm.
        norm: of the other; the norm is the one in which X is the nearest.
    """

    left: Tensor
    right: Tensor
    error: float = 0.0
    norm: float = 0.0


def truncate(left: Tensor, right: Tensor, rank: int) -> ThinProduct:
    """The matrix of at most this rank that is nearest to B A in the Frobenius norm, in balanced factors.

    With B = Q_B R_B and Aᵀ = Q_A R_A it is the truncated SVD of the small R_B R_Aᵀ.

    Args:
        left: B, outputs × R.
        right: A, R × inputs.
        rank: of the result, at most.

    Example:
        >>> whole = torch.diag(torch.tensor([3.0, 4.0], dtype=torch.float64))
        >>> found = truncate(whole, torch.eye(2, dtype=torch.float64), 1)
        >>> (found.left @ found.right).round(decimals=6), found.error, found.norm
        (tensor([[0., 0.],
                [0., 4.]], dtype=torch.float64), 0.6, 5.0)
    """
    q_left, r_left = torch.linalg.qr(left)
    q_right, r_right = torch.linalg.qr(right.mT)
    u, values, v = torch.linalg.svd(r_left @ r_right.mT, full_matrices=False)
    total, lost = values.square().sum(), values[rank:].square().sum()
    root_values = values[:rank].sqrt()
    inputs = root_values[:, None] * (v[:rank] @ q_right.mT)
    error = float((lost / total).sqrt()) if total > 0 else 0.0
    return ThinProduct(q_left @ u[:, :rank] * root_values, inputs, error, float(total.sqrt()))


def truncate_for_inputs(left: Tensor, right: Tensor, seen: Tensor, rank: int) -> ThinProduct:
    """The matrix X of at most this rank whose answers to inputs are nearest to those of B A: argmin ‖(B A − X) C^½‖_F.

    It is the truncated SVD of B A C^½ times C^−½, which is U Uᵀ B A with its leading left singular vectors U. These are
    eigenvectors of B (A C Aᵀ) Bᵀ, so neither a root of C nor a matrix of outputs × inputs is needed, and what X does to
    inputs that C has never seen is still what B A does, as far as its outputs lie in U.

    Args:
        left: B, outputs × R.
        right: A, R × inputs.
        seen: A C Aᵀ, R × R, for second moments C of the inputs.
        rank: of the result, at most.

    Example:
        >>> whole = torch.diag(torch.tensor([3.0, 4.0], dtype=torch.float64))
        >>> seen = torch.diag(torch.tensor([4.0, 1.0], dtype=torch.float64))  # the first input is twice as large
        >>> found = truncate_for_inputs(whole, torch.eye(2, dtype=torch.float64), seen, 1)
        >>> (found.left @ found.right).round(decimals=6), round(found.error, 4)
        (tensor([[3., 0.],
                [0., 0.]], dtype=torch.float64), 0.5547)
    """
    q, r = torch.linalg.qr(left)
    values, vectors = torch.linalg.eigh(symmetrize(r @ seen @ r.mT))
    squares, order = values.clamp(min=0).flip(0), vectors.flip(1)[:, :rank]
    total, lost = squares.sum(), squares[rank:].sum()
    outputs, inputs = q @ order, order.mT @ r @ right
    size = torch.linalg.vector_norm(inputs, dim=1).sqrt()
    even = torch.where(size > 0, size, 1.0)
    error = float((lost / total).sqrt()) if total > 0 else 0.0
    return ThinProduct(outputs * even, inputs / even[:, None], error, float(total.sqrt()))


def norm_of(left: Tensor, right: Tensor) -> float:
    """‖B A‖_F, from the factors' inner products.

    Example:
        >>> norm_of(torch.ones(2, 1), torch.ones(1, 8))
        4.0
    """
    square = ((left.mT @ left) * (right @ right.mT)).sum()
    return float(square.clamp(min=0).sqrt())

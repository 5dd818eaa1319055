"""Products of thin matrices, B A, handled by their factors: what they are together is never written out."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class ThinProduct(NamedTuple):
    """A matrix X = B A, outputs × inputs, and how far it is from what it stands for, as a share of that one's norm."""

    left: Tensor
    right: Tensor
    error: float = 0.0


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
        >>> (found.left @ found.right).round(decimals=6), found.error
        (tensor([[0., 0.],
                [0., 4.]], dtype=torch.float64), 0.6)
    """
    q_left, r_left = torch.linalg.qr(left)
    q_right, r_right = torch.linalg.qr(right.mT)
    u, values, v = torch.linalg.svd(r_left @ r_right.mT, full_matrices=False)
    total, lost = values.square().sum(), values[rank:].square().sum()
    root_values = values[:rank].sqrt()
    inputs = root_values[:, None] * (v[:rank] @ q_right.mT)
    error = float((lost / total).sqrt()) if total > 0 else 0.0
    return ThinProduct(q_left @ u[:, :rank] * root_values, inputs, error)


def norm_of(left: Tensor, right: Tensor) -> float:
    """‖B A‖_F, from the factors' inner products.

    Example:
        >>> norm_of(torch.ones(2, 1), torch.ones(1, 8))
        4.0
    """
    square = ((left.mT @ left) * (right @ right.mT)).sum()
    return float(square.clamp(min=0).sqrt())

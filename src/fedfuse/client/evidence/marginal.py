"""How much damping a client's own rows ask for: Laplace's marginal likelihood of Kronecker-factored beliefs.

Let M be a layer that n rows moved from where it began by D, and A ⊗ B its Fisher information per row. Damping
replaces the posterior precision n A ⊗ B by

    H = n (A + π√λ I) ⊗ (B + √λ/π I).

Read backwards, that is the posterior of a Gaussian prior around the start whose precision is the difference,

    Λ = H − n A ⊗ B = n (λ I + √λ (A/π ⊗ I + π I ⊗ B)),

and Laplace's approximation of the marginal likelihood under that prior is

    log p(rows | λ, π) ≈ log p(rows | M) − ½ ⟨D, Λ D⟩ + ½ log |Λ| − ½ log |H|,

where the first term does not depend on λ and π. All matrices share the eigenvectors of A ⊗ B, so with eigenvalues
α_i and β_j and with D turned into that basis it is a sum over entries, cheap enough to search:

    ½ Σ_ij [ log Λ_ij − log H_ij − Λ_ij D_ij² ],   Λ_ij = n (λ + √λ (α_i/π + π β_j)),   H_ij = Λ_ij + n α_i β_j.

A strong prior (large λ) pays for every step the client took; a weak one pays for every direction its rows did not
inform. Layers are independent, so their terms add up, and one λ serves them all. For an isotropic prior of precision
δ the same reasoning gives Λ_ij = δ and λ = δ/n; it ignores what the factored form adds and asks for ten to a hundred
times more damping.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from fedfuse.linalg.damping import Split, balance

_DECADES = range(-10, 3)  # λ from 1e-10 to 1e2


@dataclass(frozen=True, slots=True, eq=False)
class LayerBelief:
    """A layer's Fisher factors and move, in the eigenvectors of the factors.

    Attributes:
        inputs: α, the eigenvalues of A.
        outputs: β, the eigenvalues of B.
        squared: D_ij², (out × in).
        balances: π of every split.
    """

    inputs: Tensor
    outputs: Tensor
    squared: Tensor
    balances: tuple[float, ...]

    @classmethod
    def of(cls, A: Tensor, B: Tensor, move: Tensor) -> LayerBelief:
        """The belief of a layer with factors A (in × in) and B (out × out) that moved by `move` (out × in)."""
        if not (bool(A.any()) and bool(B.any())):  # as `damp` has it: what informs about nothing leaves the damping
            A, B = torch.zeros_like(A), torch.zeros_like(B)
        alpha, left = torch.linalg.eigh(A.double())
        beta, right = torch.linalg.eigh(B.double())
        turned = right.mT @ move.double() @ left
        balances = tuple(balance(A, B, split) for split in get_args(Split))
        return cls(alpha.clamp(min=0), beta.clamp(min=0), turned.square(), balances)

    def log_evidence(self, rows: int, damping: float, pi: float) -> float:
        """The part of log p(rows | λ, π) that depends on λ and π.

        Example:
            >>> one = LayerBelief.of(torch.eye(1), torch.eye(1), torch.zeros(1, 1))
            >>> round(one.log_evidence(rows=5, damping=1.0, pi=1.0), 4) == round(0.5 * math.log(3 / 4), 4)
            True
        """
        root = math.sqrt(damping)
        prior = damping + root * (self.inputs / pi + pi * self.outputs[:, None])
        posterior = (self.inputs + pi * root).log() + (self.outputs + root / pi).log()[:, None]
        return 0.5 * float((prior.log() - posterior - rows * prior * self.squared).sum())


def best_damping(beliefs: Sequence[LayerBelief], rows: int) -> tuple[Tensor, Tensor]:
    """For every split ("one", "trace", "frobenius") the λ of largest evidence, and that evidence, both float64.

    Example:
        >>> moved = LayerBelief.of(torch.eye(2), torch.eye(2), torch.full((2, 2), 3.0))
        >>> still = LayerBelief.of(torch.eye(2), torch.eye(2), torch.full((2, 2), 0.1))
        >>> bool(best_damping([still], 10)[0][0] > best_damping([moved], 10)[0][0])
        True
    """
    found = [_search(beliefs, rows, split) for split in range(len(get_args(Split)))]
    return torch.tensor([lam for lam, _ in found]).double(), torch.tensor([value for _, value in found]).double()


def _search(beliefs: Sequence[LayerBelief], rows: int, split: int) -> tuple[float, float]:
    """The best decade, then the best place around it."""

    def loss(exponent: float) -> float:
        return -sum(b.log_evidence(rows, 10.0**exponent, b.balances[split]) for b in beliefs)

    decade = min(_DECADES, key=loss)
    from scipy.optimize import minimize_scalar  # late: it is long to load, and few ask for it

    fine = minimize_scalar(loss, bounds=(decade - 1, decade + 1), method="bounded", options={"xatol": 0.01})
    return 10.0 ** float(fine.x), -float(fine.fun)

"""Conjugate gradients for a sum of Kronecker products, each step led by a likeness that costs a tenth of the sum.

Damped factors are a number along the diagonal and few directions that stand far above it. With A_k ≈ c_k I + L_k L_kᵀ,

    Σ f_k B_k M A_k  ≈  (Σ f_k c_k B_k) M + Σ (f_k B_k (M L_k)) L_kᵀ

needs products with thin matrices alone, and single precision does, for the likeness only says where to go: a flexible
conjugate gradient (Notay 2000) in float64 asks the sum itself how far, and what is left. The same with the sides
exchanged, whichever is nearer at the same price.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedfuse.errors import NotConverged
from fedfuse.linalg.cg import Operator, Solution, conjugate_gradient, descend, dot, norm

_MIN_PRODUCTS = 1e7  # multiplications of the sum below which a likeness costs more than it saves
_PRICE = 0.15  # of the sum's multiplications, that a likeness may take
_FAR = 1.0  # what is left out, in units of what is kept along the diagonal, from which it leads nowhere
_GAIN = 3e-3  # by which the likeness is solved before the sum is asked


@dataclass(frozen=True, slots=True, eq=False)
class Likeness:
    """M ↦ Σ B_k M A_k nearly, in single precision and where the preconditioner P = B ⊗ A is diagonal.

    Attributes:
        base: Σ c_k B_k.
        dense: every B_k.
        thin: all L_k side by side.
        widths: how many columns each has.
        turns: the orthogonal matrices that lead there, from the left and from the right.
        scale: the diagonal of P⁻¹.
        flipped: whether the thin factors are the left ones: then everything is done to Mᵀ.
    """

    base: Tensor
    dense: list[Tensor]
    thin: Tensor
    widths: list[int]
    turns: tuple[Tensor, Tensor]
    scale: Tensor
    flipped: bool

    @classmethod
    def of(cls, lefts: Tensor, rights: Tensor, even: tuple[Tensor, Tensor]) -> Likeness | None:
        """The likeness of Σ lefts[k] M rights[k], or None where there is no cheap one that is near.

        Args:
            lefts: (clients × out × out), symmetric.
            rights: (clients × in × in), symmetric.
            even: the preconditioner's A and B.
        """
        clients, out, inn = len(lefts), lefts.shape[-1], rights.shape[-1]
        if clients * out * inn * (out + inn) < _MIN_PRODUCTS:
            return None
        lefts, rights = lefts.float(), rights.float()
        sides = [_Thin.of(lefts, inn)]
        if sides[0].missing > _FAR / 100:
            sides.append(_Thin.of(rights, out))
        best = min(sides, key=lambda side: side.missing)
        if not best.missing < _FAR:
            return None
        flipped = best is sides[0]
        (a, turn_A), (b, turn_B) = (torch.linalg.eigh(side.float()) for side in even)
        turns = (turn_A.mT, turn_B) if flipped else (turn_B.mT, turn_A)
        scale = _reciprocal(a)[:, None] * _reciprocal(b) if flipped else _reciprocal(b)[:, None] * _reciprocal(a)
        dense = list(turns[0] @ (rights if flipped else lefts) @ turns[0].mT)
        thin = [turns[1].mT @ L for L in best.factors]
        base = torch.stack([c * B for c, B in zip(best.rests, dense, strict=True)]).sum(0)
        return cls(base, dense, torch.cat(thin, 1), [L.shape[1] for L in thin], turns, scale, flipped)

    def apply(self, M: Tensor) -> Tensor:
        """The nearly same as the sum."""
        parts = (M @ self.thin).split(self.widths, 1)
        images = torch.cat([B @ part for B, part in zip(self.dense, parts, strict=True)], 1)
        return torch.addmm(self.base @ M, images, self.thin.mT)

    def solve(self, Z: Tensor, gain: float, budget: int) -> tuple[Tensor, int]:
        """A matrix whose image is near Z, and how many iterations were taken."""
        Z = Z.mT if self.flipped else Z
        turned = self.turns[0] @ (Z / Z.abs().max()).float() @ self.turns[1]
        x, target = torch.zeros_like(turned), gain * norm(turned * self.scale)
        taken = descend(self.apply, lambda r: r * self.scale, x, turned, target, budget, "a likeness of the sum")
        found = (self.turns[0].mT @ x @ self.turns[1].mT).double() * Z.abs().max()
        return (found.mT if self.flipped else found), taken


@dataclass(frozen=True, slots=True, eq=False)
class _Thin:
    """Symmetric matrices as c_k I + L_k L_kᵀ, nearly.

    Attributes:
        factors: the L_k.
        rests: the c_k.
        missing: the largest eigenvalue that is left out, in units of its matrix's smallest.
    """

    factors: list[Tensor]
    rests: list[float]
    missing: float

    @classmethod
    def of(cls, stack: Tensor, other: int) -> _Thin:
        """As many directions as the price allows, those first that stand highest above the rest of their matrix."""
        clients, size = stack.shape[:2]
        whole = 2 * clients * size * other * (size + other)
        room = int((_PRICE * whole - 2 * other * other * size) / (4 * other * size + 2 * other * other))
        values, vectors = torch.linalg.eigh(stack)
        least = values[:, :1].clamp(min=1e-7 * float(values.abs().max()))
        heights = (values - least) / least
        missing = float(heights.flatten().sort(descending=True).values[min(max(room, 0), heights.numel() - 1)])
        factors, rests = [], []
        for v, V, above in zip(values, vectors, heights > missing, strict=True):
            rest = float(v[~above].max() + v[~above].min()) / 2 if not bool(above.all()) else 0.0
            factors.append(V[:, above] * (v[above] - rest).clamp(min=0).sqrt())
            rests.append(rest)
        return cls(factors, rests, missing)


def solve_led(
    apply: Operator, b: Tensor, likeness: Likeness, *, precondition: Operator, tol: float, max_iters: int, what: str
) -> Solution:
    """Solve A x = b as `conjugate_gradient` does and to the same tolerance, led by a likeness of A.

    Where the likeness leads nowhere, plain conjugate gradients go on from what was found. Iterations are those of the
    likeness.

    Args:
        apply: x ↦ A x, in float64.
        b: the right-hand side.
        likeness: of A.
        precondition: P⁻¹, by which residuals are measured.
        tol: relative residual to reach.
        max_iters: iterations before giving up.
        what: the caller's name for the system, for errors.
    """
    x, gap, size, done = torch.zeros_like(b), b, norm(precondition(b)), 0
    residual, direction, before = 1.0, b, (b, 1.0)
    try:
        while residual > tol and done < max_iters:
            step, taken = likeness.solve(gap, max(_GAIN, tol / residual / 2), max_iters - done)
            energy, done = dot(step, gap), done + taken
            first = direction is b
            direction = step if first else step + direction * (dot(step, gap - before[0]) / before[1])
            image = apply(direction)
            length = dot(direction, gap) / dot(direction, image)
            x, before, gap = x + length * direction, (gap, energy), gap - length * image
            last, residual = residual, norm(precondition(gap)) / size
            if not residual < last / 2:
                break
    except NotConverged:
        pass
    rest = conjugate_gradient(
        apply, b, precondition=precondition, x0=x, tol=tol, max_iters=max(1, max_iters - done), what=what
    )
    return Solution(rest.x, done + rest.iterations, rest.residual)


def _reciprocal(values: Tensor) -> Tensor:
    """One over eigenvalues that stand above rounding, and zero for others."""
    known = values > len(values) * torch.finfo(values.dtype).eps * values.abs().max()
    return torch.where(known, 1 / torch.where(known, values, 1.0), 0.0)

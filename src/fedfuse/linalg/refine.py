"""Linear systems solved in single precision and refined in double, until the residual of the system itself is small.

    x ← x + s,   s ≈ A⁻¹ (b − A x)

The residual is computed in float64 from x. The step s comes from conjugate gradients in float32, whose products cost
half as much.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedfuse.errors import NotConverged
from fedfuse.linalg.cg import Operator, Solution, conjugate_gradient, descend, norm

_GAIN = 3e-4  # by which a residual falls between two looks at it in double precision
_PATIENCE = 50  # steps in single precision for that; more say that the preconditioner is of no use


@dataclass(frozen=True, slots=True, eq=False)
class SinglePrecision:
    """An operator A in single precision.

    Attributes:
        apply: x ↦ A x / unit.
        precondition: nearly its inverse.
        unit: the size of A.
    """

    apply: Operator
    precondition: Operator
    unit: float

    def solve(self, b: Tensor, gain: float, budget: int) -> tuple[Tensor, int]:
        """An x for which A x is near b, and how many iterations were taken."""
        peak = float(b.abs().max())
        target = (b / peak).float()
        x = torch.zeros_like(target)
        smallest = gain * norm(self.precondition(target))
        taken = descend(self.apply, self.precondition, x, target, smallest, budget, "a system in single precision")
        return x.double() * (peak / self.unit), taken


def solve_refined(
    apply: Operator,
    b: Tensor,
    single: SinglePrecision,
    *,
    precondition: Operator,
    tol: float,
    max_iters: int,
    what: str,
) -> Solution:
    """Solve A x = b as `conjugate_gradient` does and to the same tolerance, mostly in single precision.

    Where a step does not halve the residual, plain conjugate gradients go on from what was found. Iterations are those
    in single precision.

    Args:
        apply: x ↦ A x, in float64.
        b: the right-hand side.
        single: A in single precision.
        precondition: P⁻¹, by which residuals are measured.
        tol: relative residual to reach.
        max_iters: iterations before giving up.
        what: the caller's name for the system, for errors.
    """
    x, gap, size, residual, done = torch.zeros_like(b), b, norm(precondition(b)), 1.0, 0
    try:
        while residual > tol and done < max_iters:
            step, taken = single.solve(gap, max(_GAIN, tol / residual / 2), min(_PATIENCE, max_iters - done))
            done += taken
            nearer = x + step
            left = b - apply(nearer)
            now = norm(precondition(left)) / size
            if not now < residual / 2:
                break
            x, gap, residual = nearer, left, now
    except NotConverged:
        pass
    if residual <= tol:
        return Solution(x, done, residual)
    rest = conjugate_gradient(
        apply, b, precondition=precondition, x0=x, tol=tol, max_iters=max(1, max_iters - done), what=what
    )
    return Solution(rest.x, done + rest.iterations, rest.residual)

"""Conjugate gradients for symmetric positive definite operators, and solves in single precision refined in double."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedfuse.errors import NotConverged

Operator = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Solution:
    """What an iterative solver found.

    Attributes:
        x: the solution, float64, in the shape of the right-hand side.
        iterations: how many times the operator was stepped along a direction.
        residual: ‖P⁻¹(b − A x)‖ / ‖P⁻¹ b‖, computed from `x` itself and not from a recurrence.
    """

    x: Tensor
    iterations: int
    residual: float


def conjugate_gradient(
    apply: Operator,
    b: Tensor,
    *,
    precondition: Operator | None = None,
    x0: Tensor | None = None,
    tol: float = 1e-8,
    max_iters: int = 1000,
    strict: bool = True,
    what: str = "a linear system",
) -> Solution:
    """Solve A x = b for a symmetric positive definite A that is known only by its products.

    Preconditioned conjugate gradients (Hestenes and Stiefel 1952) in float64, until
    ‖P⁻¹(b − A x)‖ ≤ tol·‖P⁻¹ b‖. A preconditioner near A makes that the relative error of x; the plain residual
    would not see directions in which A is small. The recurrence drifts from the true residual, so the true one is
    computed when the recurrence believes it is done, and the search restarts from there if it was wrong. Where
    rounding allows no better in the small directions, the answer stands if ‖b − A x‖ ≤ tol·‖b‖.

    Args:
        apply: x ↦ A x; takes and returns float64 tensors of the shape of `b`.
        b: the right-hand side, of any shape: a matrix is an unknown like any other.
        precondition: r ↦ P⁻¹ r, symmetric positive definite; none if absent.
        x0: where to start; zero if absent.
        tol: relative residual to reach.
        max_iters: products with A along search directions before giving up.
        strict: whether a tolerance out of reach is an error; else what was found stands.
        what: the caller's name for the system, for the error.

    Returns:
        The solution with its iterations and its true relative residual.

    Raises:
        NotConverged: if the tolerance is out of reach, or the operator is not positive definite.

    Example:
        >>> A = torch.tensor([[4.0, 1.0], [1.0, 3.0]], dtype=torch.float64)
        >>> conjugate_gradient(lambda x: A @ x, A @ torch.ones(2, dtype=torch.float64)).x
        tensor([1., 1.], dtype=torch.float64)
    """
    b = b.double()
    if norm(b) == 0:
        return Solution(torch.zeros_like(b), 0, 0.0)
    x, gap = (torch.zeros_like(b), b) if x0 is None else (x0.to(b).clone(), b - apply(x0.to(b)))
    scale = precondition or torch.clone
    size = norm(scale(b))
    residual, done = norm(scale(gap)) / size, 0
    while not residual <= tol:
        if not math.isfinite(residual):
            raise NotConverged(f"{what}: the system or its start holds numbers that are not finite")
        done += descend(apply, scale, x, gap, tol * size, max_iters - done, what)
        gap = b - apply(x)
        before, residual = residual, norm(scale(gap)) / size
        if residual > tol and (done >= max_iters or residual > before / 2):
            if not strict or norm(gap) <= tol * norm(b):
                break
            raise _not_converged(what, residual, tol, done, done >= max_iters)
    return Solution(x, done, residual)


def _not_converged(what: str, residual: float, tol: float, done: int, spent: bool) -> NotConverged:
    advice = "allow more iterations" if spent else "rounding allows no better: raise the tolerance"
    return NotConverged(
        f"{what}: conjugate gradients stopped at a relative residual of {residual:.1e} after {done} "
        f"iterations, expected {tol:.1e}; {advice}, or damp the system"
    )


def descend(
    apply: Operator, precondition: Operator, x: Tensor, start: Tensor, target: float, budget: int, what: str
) -> int:
    """Move `x` in place by conjugate gradients, from where the residual is `start`, in any precision.

    Args:
        apply: x ↦ A x.
        precondition: r ↦ P⁻¹ r.
        x: where to start; moved.
        start: b − A x.
        target: the norm of P⁻¹(b − A x) at which to stop, as the recurrence has it.
        budget: the most steps.
        what: the caller's name for the system, for errors.

    Returns:
        How many steps were taken.

    Raises:
        NotConverged: if an operator is not positive definite.
    """
    residual, direction = start.clone(), torch.zeros_like(start)
    energy = 1.0
    for step in range(budget):
        steepest = precondition(residual)
        if norm(steepest) <= target:
            return step
        before, energy = energy, _positive(dot(residual, steepest), what, "the preconditioner")
        direction.mul_(energy / before).add_(steepest)
        image = apply(direction)
        length = energy / _positive(dot(direction, image), what, "the operator")
        x.add_(direction, alpha=length)
        residual.sub_(image, alpha=length)
    return budget


def _positive(curvature: float, what: str, culprit: str) -> float:
    if curvature > 0 and math.isfinite(curvature):
        return curvature
    raise NotConverged(
        f"{what}: {culprit} has curvature {curvature:.1e} along a search direction, expected a positive "
        "number; it is not positive definite: damp it, or look for a wrong sign"
    )


def dot(a: Tensor, b: Tensor) -> float:
    """The inner product of two tensors of one shape."""
    return float(torch.dot(a.reshape(-1), b.reshape(-1)))


def norm(a: Tensor) -> float:
    """The Euclidean norm of a tensor."""
    return math.sqrt(dot(a, a))


# By how much a residual falls between two looks at it in double precision: √ε of float32. Below that, the residual of
# the recurrence goes on falling and the true one stays where it is.
_GAIN = 3e-4
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
            # no further than the tolerance asks for, with a factor of 2 to spare
            step, taken = single.solve(gap, max(_GAIN, tol / residual / 2), min(_PATIENCE, max_iters - done))
            done += taken
            nearer = x + step
            left = b - apply(nearer)
            now = norm(precondition(left)) / size
            if not now < residual / 2:  # so written, it also ends for a step that is not a number
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

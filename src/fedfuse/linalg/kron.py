"""Sums of Kronecker products, and the mean of Gaussians whose precisions they are.

A client's belief about a layer M (out × in) is Gaussian with mean M_k and precision A_k ⊗ B_k, with A_k
(in × in) and B_k (out × out). The product of these beliefs, each raised to the power f_k, has its mode where

    Σ f_k B_k M A_k = Σ f_k B_k M_k A_k                                  (arXiv:2310.00339, eqs. 11–14)

The operator on the left is symmetric positive definite, so conjugate gradients solve it as it stands.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from fedfuse.errors import ConfigError, NotConverged
from fedfuse.linalg.cg import Solution, conjugate_gradient
from fedfuse.linalg.psd import add_diagonal, inverse

Solver = Literal["exact", "expectation", "gradient"]
Split = Literal["one", "trace", "frobenius"]
Weights = Tensor | Sequence[float]

# Factors larger than this together stay in their own precision and are widened a few clients at a time.
_WIDE_BYTES = 512 * 2**20
_CHUNK_BYTES = 128 * 2**20
_RELEASED_STEPS = 10_000


@dataclass(frozen=True, slots=True, eq=False)
class KronSum:
    """The operator M ↦ Σ_k f_k B_k M A_k, on float64 matrices M (out × in), for symmetric A_k.

    All clients are laid side by side, so that one application is two matrix products and no sum:
    row i of `left` holds row i of every f_k B_k, row i of `right` row i of every A_k.

    Attributes:
        left: f_k B_k as (out, clients, out), float64.
        right: A_k as (in, clients, in), float64, or the factors' own precision where that would be too large.
    """

    left: Tensor
    right: Tensor

    @classmethod
    def empty(cls, clients: int, like_A: Tensor, like_B: Tensor) -> KronSum:
        """Room for so many clients, to be filled by `put`."""
        wide = clients * like_A.numel() * 8 <= _WIDE_BYTES
        left = like_B.new_empty(len(like_B), clients, len(like_B), dtype=torch.float64)
        right = like_A.new_empty(len(like_A), clients, len(like_A), dtype=torch.float64 if wide else like_A.dtype)
        return cls(left, right)

    @classmethod
    def of(cls, As: Iterable[Tensor], Bs: Iterable[Tensor], weights: Weights) -> KronSum:
        """The operator of these factors; the weights are taken as they are.

        Example:
            >>> double = KronSum.of([torch.eye(3)], [2 * torch.eye(2)], [1.0])
            >>> double(torch.ones(2, 3, dtype=torch.float64)).unique()
            tensor([2.], dtype=torch.float64)
        """
        factors = list(zip(As, Bs, weights, strict=True))
        if not factors:
            raise ConfigError("a sum of Kronecker products: got no factors, expected at least one client's")
        total = cls.empty(len(factors), *factors[0][:2])
        for k, (A, B, weight) in enumerate(factors):
            total.set_client(k, A, B, float(weight))
        return total

    def set_client(self, client: int, A: Tensor, B: Tensor, weight: float) -> None:
        """Write one client's factors at its index."""
        self.left[:, client] = B.double() * weight
        self.right[:, client] = A

    def __call__(self, M: Tensor) -> Tensor:
        """Σ_k f_k B_k M A_k; memory beside the factors is bounded whatever the number of clients."""
        out, inn = M.shape
        total = torch.zeros_like(M)
        for part in self._parts():
            left = self.left[:, part].reshape(-1, out)
            right = self.right[:, part].reshape(inn, -1).to(M.dtype)
            # The factors are symmetric: the transposed product reads both operands along their rows.
            total.addmm_((left @ M).view(out, -1), right.mT)
        return total

    def _parts(self) -> Iterator[slice]:
        out, clients, inn = len(self.left), self.left.shape[1], len(self.right)
        widened = 0 if self.right.dtype == torch.float64 else inn * inn
        step = max(1, _CHUNK_BYTES // (8 * (out * inn + widened)))
        return (slice(first, min(first + step, clients)) for first in range(0, clients, step))


@dataclass(frozen=True, slots=True, eq=False)
class KronInverse:
    """The operator Z ↦ B⁻¹ Z A⁻¹, the inverse of A ⊗ B, factored once and applied often.

    Singular factors give the pseudo-inverse.

    Attributes:
        left: B⁻¹.
        right: A⁻¹.
    """

    left: Tensor
    right: Tensor

    @classmethod
    def of(cls, A: Tensor, B: Tensor) -> KronInverse:
        """The inverse of A ⊗ B for symmetric positive semi-definite A and B."""
        return cls(inverse(B.double()), inverse(A.double()))

    def __call__(self, Z: Tensor) -> Tensor:
        """B⁻¹ Z A⁻¹."""
        return self.left @ Z @ self.right


def kron_solve(A: Tensor, B: Tensor, Z: Tensor) -> Tensor:
    """Solve B M A = Z for M, that is (A ⊗ B) vec M = vec Z, in float64.

    Example:
        >>> kron_solve(2 * torch.eye(3), 4 * torch.eye(2), torch.ones(2, 3)).unique()
        tensor([0.1250], dtype=torch.float64)
    """
    return KronInverse.of(A, B)(Z.double())


def natural_mean(
    Ms: Iterable[Tensor],
    As: Iterable[Tensor],
    Bs: Iterable[Tensor],
    weights: Weights,
    *,
    solver: Solver = "exact",
    tol: float = 1e-8,
    max_iters: int | None = None,
    what: str = "the natural mean of a layer",
) -> Solution:
    """The mode M of the product of Gaussians N(M_k, (A_k ⊗ B_k)⁻¹)^f_k, with f = weights / Σ weights.

    It solves Σ f_k B_k M A_k = Z, with Z = Σ f_k B_k M_k A_k, in float64. Three ways:

    - `exact`: conjugate gradients, preconditioned by the expectation approximation of evenly scaled pairs,
      to the tolerance.
      They start at the plain mean: from the approximation they take as many iterations, and clients that
      agree would not come back unchanged.
    - `expectation`: M = (Σ f_k B_k)⁻¹ Z (Σ f_k A_k)⁻¹, which takes the mean of products for the product
      of means; exact where all A_k or all B_k agree.
    - `gradient`: from the expectation, `max_iters` (10,000) steps of length one down the mean squared
      difference of the two sides. This is what was released with the paper, here in float64; it has no
      stopping rule, so its residual is reported and not judged.

    Directions that no factor informs keep the plain mean Σ f_k M_k.

    Args:
        Ms: each client's layer [W | b], (out × in); a stack or any iterable, read once.
        As: each client's symmetric input factor, damped, (in × in).
        Bs: each client's symmetric output factor, damped, (out × out).
        weights: each client's share; any positive scale.
        solver: which way.
        tol: relative residual ‖Z − Σ f_k B_k M A_k‖ / ‖Z‖ the exact way must reach.
        max_iters: the exact way's limit (1,000), or the gradient's number of steps.
        what: the caller's name for the layer, for errors.

    Returns:
        The matrix, float64, with iterations and true relative residual.

    Example:
        >>> I = torch.eye(2)
        >>> natural_mean([1 * I, 4 * I], [I, I], [I, 2 * I], weights=[1, 1]).x
        tensor([[3., 0.],
                [0., 3.]], dtype=torch.float64)
    """
    if solver not in get_args(Solver):
        raise ConfigError(f"{what}: solver is {solver!r}, expected one of {', '.join(get_args(Solver))}")
    system = _gather(Ms, As, Bs, _shares(weights, what), what)
    if solver == "exact":
        return system.exact(tol, 1000 if max_iters is None else max_iters)
    if solver == "gradient":
        return system.gradient(_RELEASED_STEPS if max_iters is None else max_iters)
    return system.solution(system.expectation(), 0)


def natural_mean_diag(means: Iterable[Tensor], precisions: Iterable[Tensor], weights: Weights) -> tuple[Tensor, Tensor]:
    """Mean and precision of the product of Gaussians N(m_k, 1/p_k)^f_k, elementwise, in float64.

    p = Σ f_k p_k and m = Σ f_k p_k m_k / p, with f = weights / Σ weights; where every precision is zero,
    the plain mean. One client is held at a time.

    Example:
        >>> mean, precision = natural_mean_diag(torch.tensor([[0.0], [2.0]]), torch.tensor([[1.0], [4.0]]), [1, 1])
        >>> mean.item(), precision.item()
        (1.6, 2.5)
    """
    what = "the natural mean"
    plain = pull = total = torch.zeros((), dtype=torch.float64)
    for f, m, p in _in_step(what, _shares(weights, what), means, precisions):
        if m.shape != p.shape:
            raise ConfigError(
                f"{what}: got a mean {tuple(m.shape)} with precisions {tuple(p.shape)}, expected one shape"
            )
        m, p = m.double(), p.double() * f
        plain, pull, total = plain + m * f, pull + m * p, total + p
    return torch.where(total > 0, pull / torch.where(total > 0, total, 1.0), plain), total


def damp(A: Tensor, B: Tensor, lam: float, pi: Split = "one") -> tuple[Tensor, Tensor]:
    """Damp both factors of a Kronecker product: A + π √λ I and B + √λ / π I.

    π balances the two sides (Martens and Grosse 2015, section 6.3): `one` is 1; `trace` is
    √((tr A / dim A) / (tr B / dim B)); `frobenius` is √((‖A‖_F / √dim A) / (‖B‖_F / √dim B)).
    Where a balanced factor vanishes, A ⊗ B informs about nothing and only the damping remains: both sides become
    √λ I, which is the limit of an ever smaller factor.

    Example:
        >>> A, B = damp(torch.eye(2), 4 * torch.eye(2), lam=1.0, pi="trace")
        >>> A[0, 0].item(), B[0, 0].item()
        (1.5, 6.0)
    """
    if not (math.isfinite(lam) and lam >= 0):
        raise ConfigError(f"damping: lambda is {lam}, expected a finite number of at least 0")
    root, ratio = math.sqrt(lam), balance(A, B, pi)
    if pi != "one" and not (bool(A.any()) and bool(B.any())):
        A, B = torch.zeros_like(A), torch.zeros_like(B)
    return add_diagonal(A, ratio * root), add_diagonal(B, root / ratio)


def balance(A: Tensor, B: Tensor, pi: Split) -> float:
    """π of `damp`: how much larger a share of the damping falls to A than to B; 1 where a factor is zero.

    Example:
        >>> balance(4 * torch.eye(2), torch.eye(3), "trace")
        2.0
    """
    if pi == "one":
        return 1.0
    if pi == "trace":
        ratio = float(A.trace()) / len(A), float(B.trace()) / len(B)
    elif pi == "frobenius":
        ratio = float(A.norm()) / math.sqrt(len(A)), float(B.norm()) / math.sqrt(len(B))
    else:
        raise ConfigError(f"damping: pi is {pi!r}, expected one of {', '.join(get_args(Split))}")
    return math.sqrt(ratio[0] / ratio[1]) if min(ratio) > 0 else 1.0


@dataclass(frozen=True, slots=True, eq=False)
class _System:
    """One layer's equation Σ f_k B_k M A_k = Z, and what is needed to solve it."""

    operator: KronSum
    Z: Tensor
    plain: Tensor  # Σ f_k M_k
    A: Tensor  # Σ f_k A_k
    B: Tensor  # Σ f_k B_k
    even: tuple[Tensor, Tensor]  # the same of pairs scaled to equal traces, which changes no A_k ⊗ B_k
    what: str

    @classmethod
    def empty(cls, clients: int, M: Tensor, A: Tensor, B: Tensor, what: str) -> _System:
        """The sums before any client, in the shapes of the first."""
        fits = M.ndim == 2 and A.shape == (M.shape[1],) * 2 and B.shape == (M.shape[0],) * 2
        if not fits:
            raise ConfigError(
                f"{what}: got M {tuple(M.shape)}, A {tuple(A.shape)}, B {tuple(B.shape)}, "
                "expected out × in, in × in and out × out"
            )
        Z, plain, sum_A, sum_B, *even = (torch.zeros_like(t, dtype=torch.float64) for t in (M, M, A, B, A, B))
        return cls(KronSum.empty(clients, A, B), Z, plain, sum_A, sum_B, (even[0], even[1]), what)

    def add(self, client: int, M: Tensor, A: Tensor, B: Tensor, f: float) -> None:
        """Add one client with share f to both sides."""
        if (M.shape, A.shape, B.shape) != (self.Z.shape, self.A.shape, self.B.shape):
            raise ConfigError(
                f"{self.what}: client {client} has M {tuple(M.shape)}, A {tuple(A.shape)}, B {tuple(B.shape)}, "
                f"expected the first client's {tuple(self.Z.shape)}, {tuple(self.A.shape)}, {tuple(self.B.shape)}"
            )
        self.operator.set_client(client, A, B, f)
        M, A, B = M.double(), A.double(), B.double()
        self.Z.add_(B @ M @ A, alpha=f)
        for total, term in ((self.plain, M), (self.A, A), (self.B, B)):
            total.add_(term, alpha=f)
        ratio = balance(A, B, "trace")
        self.even[0].add_(A, alpha=f / ratio)
        self.even[1].add_(B, alpha=f * ratio)

    def solution(self, M: Tensor, iterations: int) -> Solution:
        """A matrix with its true relative residual."""
        size = float(self.Z.norm())
        gap = float((self.Z - self.operator(M)).norm())
        return Solution(M, iterations, gap / size if size > 0 else gap)

    def expectation(self) -> Tensor:
        """(Σ f B)⁻¹ Z (Σ f A)⁻¹, written as a step from the plain mean so that null directions keep it."""
        return self.plain + kron_solve(self.A, self.B, self.Z - self.B @ self.plain @ self.A)

    def exact(self, tol: float, max_iters: int) -> Solution:
        """Conjugate gradients for the step away from the plain mean; clients that agree need none."""
        step_to = self.Z - self.operator(self.plain)
        size, gap = float(self.Z.norm()), float(step_to.norm())
        if gap <= tol * size:
            return self.solution(self.plain, 0)
        reference = size or gap
        found = conjugate_gradient(
            self.operator,
            step_to,
            precondition=KronInverse.of(*self.even),
            tol=tol * reference / gap,
            max_iters=max_iters,
            what=self.what,
        )
        return Solution(self.plain + found.x, found.iterations, found.residual * gap / reference)

    def gradient(self, steps: int) -> Solution:
        """M ← M − ∇ mean((Σ f B M A − Z)²), so many times."""
        M = self.expectation()
        for _ in range(steps):
            M = M.sub(self.operator(self.operator(M) - self.Z), alpha=2 / M.numel())
        if not bool(torch.isfinite(M).all()):
            raise NotConverged(
                f"{self.what}: gradient descent diverged, expected factors whose products stay below "
                f"{math.sqrt(M.numel()):.0f}; use the exact solver"
            )
        return self.solution(M, steps)


def _gather(
    Ms: Iterable[Tensor], As: Iterable[Tensor], Bs: Iterable[Tensor], weights: list[float], what: str
) -> _System:
    """Read every client once, in order: lay out its factors and add it to the sums."""
    clients = _in_step(what, weights, Ms, As, Bs)
    first = next(clients)
    _, M, A, B = first
    system = _System.empty(len(weights), M, A, B, what)
    for k, (f, M, A, B) in enumerate(chain([first], clients)):
        system.add(k, M, A, B, f)
    return system


def _in_step(what: str, weights: list[float], *columns: Iterable[Tensor]) -> Iterator[tuple[Any, ...]]:
    """One client after another: its share and its tensors."""
    try:
        yield from zip(weights, *columns, strict=True)
    except ValueError as error:
        raise ConfigError(f"{what}: got {len(weights)} weights, expected as many of every tensor") from error


def _shares(weights: Weights, what: str) -> list[float]:
    """Weights divided by their sum, or a refusal."""
    values = [float(w) for w in weights]
    total = math.fsum(values)
    if not (values and all(w >= 0 for w in values) and 0 < total < math.inf):
        raise ConfigError(f"{what}: weights are {values}, expected finite numbers of at least 0, not all 0")
    return [w / total for w in values]

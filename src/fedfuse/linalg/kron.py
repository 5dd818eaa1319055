"""Sums of Kronecker products, and the mean of Gaussians whose precisions they are.

A client's belief about a layer M (out × in) is Gaussian with mean M_k and precision A_k ⊗ B_k, with A_k
(in × in) and B_k (out × out). The product of these beliefs, each raised to the power f_k, has its mode where

    Σ f_k B_k M A_k = Σ f_k B_k M_k A_k                                  (arXiv:2310.00339, eqs. 11–14)

The operator on the left is symmetric positive definite, so conjugate gradients solve it as it stands. A factor is a
matrix, or a diagonal with a few directions above it (`LowRank`): then most of the work is done in closed form, by
`subspace`.

Read `natural_mean` first; `_System` holds one layer's equation, `KronSum` and `KronInverse` are its operator and its
preconditioner, and `SpikedInverse` a nearer one for large layers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import torch
from torch import Tensor

from fedfuse.errors import ConfigError, NotConverged
from fedfuse.linalg.cg import SinglePrecision, Solution, conjugate_gradient, solve_refined
from fedfuse.linalg.factor import Factor, LowRank
from fedfuse.linalg.psd import add_diagonal, inverse
from fedfuse.linalg.subspace import Client, Mode, reciprocal, subspace_mean, times, written

Split: TypeAlias = Literal["one", "trace", "frobenius"]
Solver = Literal["exact", "expectation", "gradient"]
Weights = Tensor | Sequence[float]
_CHUNK_BYTES = 128 * 2**20
_RELEASED_STEPS = 10_000
_MIN_PRODUCTS = 1e7  # multiplications of a sum below which plain conjugate gradients are there first


def damp(A: Factor, B: Factor, lam: float, pi: Split = "one") -> tuple[Factor, Factor]:
    """Damp both factors of a Kronecker product: A + π √λ I and B + √λ / π I.

    π balances the two sides (Martens and Grosse 2015, section 6.3): `one` is 1; `trace` is
    √((tr A / dim A) / (tr B / dim B)); `frobenius` is √((‖A‖_F / √dim A) / (‖B‖_F / √dim B)).
    Where a balanced factor vanishes, A ⊗ B informs about nothing and only the damping remains: both sides become
    √λ I, which is the limit of an ever smaller factor.

    Example:
        >>> import torch
        >>> A, B = damp(torch.eye(2), 4 * torch.eye(2), lam=1.0, pi="trace")
        >>> A[0, 0].item(), B[0, 0].item()
        (1.5, 6.0)
    """
    if not (math.isfinite(lam) and lam >= 0):
        raise ConfigError(f"damping: lambda is {lam}, expected a finite number of at least 0")
    root, ratio = math.sqrt(lam), balance(A, B, pi)
    if pi != "one" and not (bool(A.any()) and bool(B.any())):
        A, B = A * 0.0, B * 0.0
    shifts = (A, ratio * root), (B, root / ratio)
    damped = [add_diagonal(F, shift) if isinstance(F, Tensor) else F.plus(shift) for F, shift in shifts]
    return damped[0], damped[1]


def balance(A: Factor, B: Factor, pi: Split) -> float:
    """π of `damp`: how much larger a share of the damping falls to A than to B; 1 where a factor is zero.

    Example:
        >>> import torch
        >>> balance(4 * torch.eye(2), torch.eye(3), "trace")
        2.0
    """
    if pi == "one":
        return 1.0
    if pi == "trace":
        ratio = mean_eigenvalue(A), mean_eigenvalue(B)
    elif pi == "frobenius":
        ratio = float(A.norm()) / math.sqrt(len(A)), float(B.norm()) / math.sqrt(len(B))
    else:
        raise ConfigError(f"damping: pi is {pi!r}, expected one of {', '.join(get_args(Split))}")
    return math.sqrt(ratio[0] / ratio[1]) if min(ratio) > 0 else 1.0


def mean_eigenvalue(factor: Factor) -> float:
    """The mean eigenvalue of a symmetric matrix: its trace over its size.

    Example:
        >>> import torch
        >>> mean_eigenvalue(torch.diag(torch.tensor([1.0, 3.0])))
        2.0
    """
    return float(factor.trace()) / len(factor)


def natural_mean(
    Ms: Iterable[Tensor],
    As: Iterable[Factor],
    Bs: Iterable[Factor],
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
      to the tolerance. They start at the plain mean: from the approximation they take as many iterations, and
      clients that agree would not come back unchanged. Large layers take their steps in single precision, behind a
      nearer preconditioner (see `solve_refined` and `SpikedInverse`), which changes neither tolerance nor residual.
      Factors of low rank are solved in the subspace that their directions span, which loses nothing (see `subspace`).
    - `expectation`: M = (Σ f_k B_k)⁻¹ Z (Σ f_k A_k)⁻¹, which takes the mean of products for the product
      of means; exact where all A_k or all B_k agree.
    - `gradient`: from the expectation, `max_iters` (10,000) steps of length one down the mean squared
      difference of the two sides. This is what was released with the paper, here in float64; it has no
      stopping rule, so its residual is reported and not judged.

    Directions that no factor informs keep the plain mean Σ f_k M_k.

    Args:
        Ms: each client's layer [W | b], (out × in); a stack or any iterable, read once.
        As: each client's symmetric input factor, damped, (in × in); diagonal and low-rank ones all in one form.
        Bs: each client's symmetric output factor, damped, (out × out).
        weights: each client's share; any positive scale.
        solver: which way.
        tol: the residual ‖P⁻¹(Z − Σ f_k B_k M A_k)‖ / ‖P⁻¹ Z‖ to reach. The preconditioner P⁻¹ brings all directions
            to one scale: a client of tiny factors would not show otherwise, though some may be known to it alone.
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
    shares = _shares(weights, what)
    gather = partial(_gather, count=len(shares), what=what)
    clients = _in_step(what, shares, Ms, As, Bs)
    if solver == "exact":
        limit = 1000 if max_iters is None else max_iters
        return _exact_in_subspace(clients, lambda some: gather(some).exact(tol, limit))
    system = gather(clients)
    if solver == "gradient":
        return system.gradient(_RELEASED_STEPS if max_iters is None else max_iters)
    return system.solution(system.expectation(), 0)


def _exact_in_subspace(clients: Iterable[Any], mode: Mode) -> Solution:
    """The exact way for any factors: those of low rank are looked at together first, all others one by one."""
    ahead = iter(clients)
    first = Client(*next(ahead))
    every = chain([first], ahead)
    if any(isinstance(f, LowRank) and not f.is_diagonal for f in (first.A, first.B)):
        return subspace_mean([Client(*c) for c in every], mode)
    return mode(every)


def _gather(clients: Iterable[tuple[float, Tensor, Factor, Factor]], count: int, what: str) -> _System:
    """Read every client once, in order: lay out its factors and add it to the sums."""
    known = ((f, M, written(A), written(B)) for f, M, A, B in clients)
    first = next(known)
    system = _System.empty(count, *first[1:], what)
    for k, (f, M, A, B) in enumerate(chain([first], known)):
        system.add(k, M, A, B, f)
    return system


def _in_step(what: str, weights: list[float], *columns: Iterable[Factor]) -> Iterator[tuple[Any, ...]]:
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


@dataclass(frozen=True, slots=True, eq=False)
class _System:
    """One layer's equation Σ f_k B_k M A_k = Z, and what is needed to solve it."""

    operator: KronSum
    Z: Tensor
    plain: Tensor  # Σ f_k M_k
    A: Tensor  # Σ f_k A_k
    B: Tensor  # Σ f_k B_k
    even: tuple[Tensor, Tensor]  # the same of pairs (A_k, B_k) scaled to equal traces
    what: str

    @classmethod
    def empty(cls, clients: int, M: Tensor, A: Tensor, B: Tensor, what: str) -> _System:
        """The sums before any client, in the shapes of the first."""
        fits = M.ndim == 2 and A.shape == (M.shape[1],) * A.ndim and B.shape == (M.shape[0],) * 2
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
        self.Z.add_(times(B @ M, A), alpha=f)
        for total, term in ((self.plain, M), (self.A, A), (self.B, B)):
            total.add_(term, alpha=f)
        # The preconditioner (Σ f B_k) ⊗ (Σ f A_k) changes with (A_k, B_k) → (c A_k, B_k / c), A_k ⊗ B_k does not. Equal
        # traces keep one client from filling one side and another the other: with c from 10⁻³ to 10³ over ten clients
        # the solver took the 189 iterations of c = 1; with factors as they came it did not converge in 1,000.
        ratio = balance(A if A.ndim == 2 else LowRank.diagonal(A), B, "trace")
        self.even[0].add_(A, alpha=f / ratio)
        self.even[1].add_(B, alpha=f * ratio)

    def solution(self, M: Tensor, iterations: int) -> Solution:
        """A matrix with its true relative residual."""
        scale = KronInverse.of(*self.even)
        size = float(scale(self.Z).norm())
        gap = float(scale(self.Z - self.operator(M)).norm())
        return Solution(M, iterations, gap / size if size > 0 else gap)

    def expectation(self) -> Tensor:
        """(Σ f B)⁻¹ Z (Σ f A)⁻¹, written as a step from the plain mean so that null directions keep it."""
        return self.plain + kron_solve(self.A, self.B, self.Z - times(self.B @ self.plain, self.A))

    def exact(self, tol: float, max_iters: int) -> Solution:
        """Conjugate gradients for the step away from the plain mean; clients that agree need none."""
        # The unknown is the step from the plain mean, so that clients that agree come back bit for bit. The tolerance
        # is promised relative to ‖P⁻¹ Z‖ and the solver judges by its own right-hand side: hence reference / gap below.
        step_to = self.Z - self.operator(self.plain)
        scale = KronInverse.of(*self.even)
        size, gap = float(scale(self.Z).norm()), float(scale(step_to).norm())
        if gap <= tol * size:
            return Solution(self.plain, 0, gap / size if size > 0 else gap)
        reference = size or gap
        single = self.operator.in_single_precision()
        solve = conjugate_gradient if single is None else partial(solve_refined, single=single)
        found = solve(
            self.operator,
            step_to,
            precondition=scale,
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


@dataclass(frozen=True, slots=True, eq=False)
class KronSum:
    """The operator M ↦ Σ_k f_k B_k M A_k, on float64 matrices M (out × in), for symmetric A_k.

    All clients are laid side by side, so that one application is two matrix products and no sum: row i of `left` holds
    row i of every f_k B_k, row i of `right` row i of every A_k. Where all A_k are diagonal, `right` holds no more than
    their diagonals.

    Attributes:
        left: f_k B_k as (out, clients, out), float64.
        right: A_k as (in, clients, in), float64, or their diagonals as (clients, in).
    """

    left: Tensor
    right: Tensor

    @classmethod
    def empty(cls, clients: int, like_A: Tensor, like_B: Tensor) -> KronSum:
        """Room for so many clients, to be filled by `set_client`; a diagonal A is a vector."""
        left = like_B.new_empty(len(like_B), clients, len(like_B), dtype=torch.float64)
        shape = (clients, len(like_A)) if like_A.ndim == 1 else (len(like_A), clients, len(like_A))
        return cls(left, like_A.new_empty(shape, dtype=torch.float64))

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
        if A.ndim == 1:
            self.right[client] = A
        else:
            self.right[:, client] = A

    def __call__(self, M: Tensor) -> Tensor:
        """Σ_k f_k B_k M A_k; memory besides the factors is bounded whatever the number of clients."""
        out, inn = M.shape
        total = torch.zeros_like(M)
        for part in self._parts(out, inn):
            # B_k M of every client of this part at once, as (out, clients, in): one product instead of one per client
            images = (self.left[:, part].reshape(-1, out) @ M).view(out, -1, inn)
            if self.right.ndim == 2:
                total.add_((images * self.right[part]).sum(1))
            else:
                # [B_1 M | B_2 M | …] [A_1 | A_2 | …]ᵀ is the sum over clients. The factors are symmetric: the
                # transposed product reads both operands along their rows, which is the order they lie in.
                total.addmm_(images.view(out, -1), self.right[:, part].reshape(inn, -1).mT)
        return total

    def in_single_precision(self) -> SinglePrecision | None:
        """The same in float32 with a preconditioner, or None where finding one costs more than it saves."""
        out, clients, _ = self.left.shape
        inn = len(self.right)
        if self.right.ndim == 2 or clients * out * inn * (out + inn) < _MIN_PRODUCTS:
            return None
        sizes = [float(torch.linalg.vector_norm(side, math.inf)) for side in (self.left, self.right)]
        if not all(0 < size < math.inf for size in sizes):
            return None
        # float32 ends at 10^±38, and products of three tensors must stay inside: both sides are brought to a largest
        # entry of 1 before they are cast, and `unit` undoes the two scales.
        left, right = ((side / size).float() for side, size in zip((self.left, self.right), sizes, strict=True))
        near = SpikedInverse.of(left.transpose(0, 1), right.transpose(0, 1))
        return None if near is None else SinglePrecision(KronSum(left, right), near, sizes[0] * sizes[1])

    def _parts(self, out: int, inn: int) -> Iterator[slice]:
        """As many clients at a time as keep the images B_k M within bounds."""
        clients = self.left.shape[1]
        step = max(1, _CHUNK_BYTES // (8 * out * inn))
        return (slice(first, min(first + step, clients)) for first in range(0, clients, step))


@dataclass(frozen=True, slots=True, eq=False)
class KronInverse:
    """The operator Z ↦ B⁻¹ Z A⁻¹, the inverse of A ⊗ B, factored once and applied often.

    Singular factors give the pseudo-inverse.

    Attributes:
        left: B⁻¹.
        right: A⁻¹, or its diagonal.
    """

    left: Tensor
    right: Tensor

    @classmethod
    def of(cls, A: Tensor, B: Tensor) -> KronInverse:
        """The inverse of A ⊗ B for symmetric positive semi-definite A and B; a diagonal A is a vector."""
        return cls(inverse(B.double()), inverse(A.double()) if A.ndim == 2 else reciprocal(A.double()))

    def __call__(self, Z: Tensor) -> Tensor:
        """B⁻¹ Z A⁻¹."""
        return times(self.left @ Z, self.right)


def kron_solve(A: Tensor, B: Tensor, Z: Tensor) -> Tensor:
    """Solve B M A = Z for M, that is (A ⊗ B) vec M = vec Z, in float64.

    Example:
        >>> kron_solve(2 * torch.eye(3), 4 * torch.eye(2), torch.ones(2, 3)).unique()
        tensor([0.1250], dtype=torch.float64)
    """
    return KronInverse.of(A, B)(Z.double())


_DIRECTIONS = 12  # of each factor that are looked at first
_HIGH = 10.0  # the lowest of them, in units of the rest, from which twice as many are looked at
_SPARE = 8  # more than that are swept, so that the last ones are found too
_SWEEPS = 4  # each multiplies a direction by its height above the others
_LOW = 0.05  # the height of a pair, in units of what the first sum is there, from which it is kept
_FLAT = 1e-6  # of D's largest entry, down to which its smallest can be divided by in single precision
_MOST = 512  # pairs that are kept, or, where that is more,
_SHARE = 0.5  # of as many whose products among themselves cost as much as one sum


@dataclass(frozen=True, slots=True, eq=False)
class SpikedInverse:
    """Z ↦ (D + V C Vᵀ)⁻¹ Z, where D is diagonal behind two orthogonal turns and V's columns are pairs r ⊗ l.

    Attributes:
        turns: the orthogonal matrices that lead where D is diagonal, from the left and from the right.
        scale: D⁻¹, as a matrix.
        rows: all directions r, turned, side by side.
        columns: all directions l, turned, side by side.
        pairs: which of all rows × columns, laid flat, are kept.
        core: (C⁻¹ + Vᵀ D⁻¹ V)⁻¹, as C^½ (I + C^½ Vᵀ D⁻¹ V C^½)⁻¹ C^½.
    """

    turns: tuple[Tensor, Tensor]
    scale: Tensor
    rows: Tensor
    columns: Tensor
    pairs: Tensor
    core: Tensor

    @classmethod
    def of(cls, lefts: Tensor, rights: Tensor) -> SpikedInverse | None:
        """The inverse of M ↦ Σ lefts[k] M rights[k], nearly, or None where nothing stands along the diagonals.

        Args:
            lefts: B_k, (clients × out × out), positive semi-definite.
            rights: A_k, (clients × in × in), positive semi-definite.
        """
        left, right = _Spikes.of(lefts), _Spikes.of(rights)
        mu, U = torch.linalg.eigh(_weighted_sum(right.rests, lefts))
        lam, V = torch.linalg.eigh(_weighted_sum(left.rests, rights))
        even = mu[:, None] + lam - (left.rests * right.rests).sum()
        # With B_k = e_k I + L_k and A_k = c_k I + R_k the sum of all B_k ⊗ A_k is
        #     (Σ c_k B_k) ⊗ I + I ⊗ (Σ e_k A_k) − Σ c_k e_k I + Σ L_k ⊗ R_k,
        # whose first three terms are D, behind U and V. As c_k and e_k are means, a factor has lower eigenvalues
        # as well and D may come out at 0 or less, though the sum is positive definite. Half the larger of the two
        # numbers is a positive floor; where it is too high the preconditioner is coarser, not the solution.
        even = torch.maximum(even, torch.maximum(mu[:, None], lam) / 2)
        if not float(even.min()) > _FLAT * float(even.max()):
            return None
        return cls._with_pairs(even, (U.mT, V), left.turn_by(U.mT), right.turn_by(V.mT))

    @classmethod
    def _with_pairs(cls, even: Tensor, turns: tuple[Tensor, Tensor], left: _Spikes, right: _Spikes) -> SpikedInverse:
        """The inverse of D and the highest pairs of directions of the same client."""
        heights = left.heights[:, :, None] * right.heights[:, None, :]
        under = (left.vectors.square().mT @ even) @ right.vectors.square()  # what D is along each pair
        clients, inner, last = heights.shape
        # products among `most` pairs take most²·in multiplications, one product with the sum clients·out·in·(out + in)
        most = max(_MOST, int(_SHARE * math.sqrt(clients * len(even) * sum(even.shape))))
        kept = _highest((heights / under).flatten(), most)
        row_ids, row = (kept // last).unique(return_inverse=True)
        column_ids, column = (kept // (inner * last) * last + kept % last).unique(return_inverse=True)
        rows, columns = left.side_by_side()[:, row_ids], right.side_by_side()[:, column_ids]
        scale, roots = 1 / even, heights.flatten()[kept].sqrt()
        core = _pair_products(scale, rows, columns, row, column).mul_(roots).mul_(roots[:, None])
        if len(kept):
            # (C⁻¹ + VᵀD⁻¹V)⁻¹ by way of a matrix whose eigenvalues are at least 1, however low a pair is. The largest
            # are about heights over D; from 10⁷ on float32 would lose that 1.
            core = inverse(add_diagonal(core.double(), 1.0)).to(core).mul_(roots).mul_(roots[:, None])
        return cls(turns, scale, rows, columns, row * columns.shape[1] + column, core)

    def __call__(self, Z: Tensor) -> Tensor:
        """The solution for one right-hand side."""
        turned = self.turns[0] @ Z @ self.turns[1]
        seen = ((self.rows.mT @ (turned * self.scale)) @ self.columns).flatten()[self.pairs]
        back = turned.new_zeros(self.rows.shape[1] * self.columns.shape[1])
        back[self.pairs] = self.core @ seen
        images = self.rows @ back.view(self.rows.shape[1], self.columns.shape[1])
        found = torch.addmm(turned, images, self.columns.mT, alpha=-1).mul_(self.scale)
        return self.turns[0].mT @ found @ self.turns[1].mT


class _Spikes(NamedTuple):
    """Symmetric matrices as rests[k] I + Σ_i heights[k, i] v_i v_iᵀ, nearly.

    Attributes:
        rests: one number per matrix.
        heights: (matrices × directions).
        vectors: (matrices × size × directions).
    """

    rests: Tensor
    heights: Tensor
    vectors: Tensor

    @classmethod
    def of(cls, stack: Tensor) -> _Spikes:
        """As many leading directions as stand high above the rest, by orthogonal iteration."""
        size, count = stack.shape[-1], _DIRECTIONS
        found = cls._leading(stack, min(count, size // 2))
        while count < size // 4 and bool((found.heights[:, 0] > _HIGH * found.rests).any()):
            count *= 2
            found = cls._leading(stack, min(count, size // 2))
        return found

    @classmethod
    def _leading(cls, stack: Tensor, count: int) -> _Spikes:
        """So many leading directions, and the mean of all other eigenvalues."""
        size = stack.shape[-1]
        # seeded by the size alone: the preconditioner moves the last bits of what is found, which no run may depend on
        draw = torch.Generator().manual_seed(size)
        basis = torch.randn(size, min(size, count + _SPARE), generator=draw).to(stack).expand(len(stack), -1, -1)
        for _ in range(_SWEEPS):
            basis = torch.linalg.qr(stack @ basis).Q
        values, turn = torch.linalg.eigh(basis.mT @ (stack @ basis))
        others = values.shape[1] - count
        values = values[:, others:]
        traces = stack.diagonal(dim1=-2, dim2=-1).sum(-1)
        rests = ((traces - values.sum(-1)) / (size - count)).clamp(min=0)
        return cls(rests, (values - rests[:, None]).clamp(min=0), (basis @ turn)[:, :, others:])

    def turn_by(self, turn: Tensor) -> _Spikes:
        """The same behind an orthogonal matrix."""
        return self._replace(vectors=turn @ self.vectors)

    def side_by_side(self) -> Tensor:
        """All directions of all matrices, (size × all)."""
        return self.vectors.movedim(0, 1).flatten(1)


def _weighted_sum(weights: Tensor, stack: Tensor) -> Tensor:
    return (weights[:, None, None] * stack).sum(0)


def _highest(shares: Tensor, most: int) -> Tensor:
    """Where the largest of some numbers are that are worth keeping, ascending."""
    order = shares.argsort(descending=True, stable=True)[:most]
    return order[shares[order] > _LOW].sort().values


def _pair_products(scale: Tensor, rows: Tensor, columns: Tensor, row: Tensor, column: Tensor) -> Tensor:
    """Vᵀ D⁻¹ V for the pairs rows[row[n]] ⊗ columns[column[n]], ascending by row: Σ_ab r_a r'_a D⁻¹_ab l_b l'_b."""
    across = columns.mT[column]
    gram = across.new_zeros(len(row), len(row))
    ends = row.bincount().cumsum(0).tolist()
    for r, (begin, end) in enumerate(pairwise([0, *ends])):  # the products with later rows: the matrix is symmetric
        along = (rows[:, r:] * rows[:, r, None]).mT @ scale
        gram[begin:end, begin:] = across[begin:end] @ (along[row[begin:] - r] * across[begin:]).mT
    return gram.triu() + gram.triu(1).mT

"""Ridge regression from sums: the penalty, the solution and its posterior, and no row is needed.

With features φ (rows of Φ) and targets t, everything here is a function of

    G = Σ φ φᵀ,   H = Σ φ tᵀ,   S = Σ t²  (per target),   n.

Sums of parts add to the sums of the whole, so the answer does not depend on how the rows were split.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from fedfuse.errors import ConfigError
from fedfuse.linalg.factor import Factor
from fedfuse.linalg.psd import add_diagonal, inverse, solve, symmetrize
from fedfuse.linalg.subspace import reciprocal, times, written

Rule: TypeAlias = Literal["gcv", "evidence"]

_ROWS = 16  # of an embedding that are fused together
# A fixed grid, in units of the mean eigenvalue. A search that narrows down would follow the rounding of a flat minimum,
# and the choice must not depend on how rows were split. Below the least one so would the solution itself.
_GRID: tuple[float, ...] = tuple(10.0 ** (exponent / 10) for exponent in range(-60, 21))


@dataclass(frozen=True, slots=True, eq=False)
class Sums:
    """The sufficient statistics of a linear model; they add up over rows, and can be taken away again.

    Attributes:
        gram: G, features × features.
        cross: H, features × targets.
        squares: S, one number per target.
        count: n.

    Example:
        >>> one = Sums.of(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0]]))
        >>> (one + one - one).cross.tolist(), (one + one).count
        ([[3.0], [6.0]], 2.0)
    """

    gram: Tensor
    cross: Tensor
    squares: Tensor
    count: float

    @classmethod
    def of(cls, features: Tensor, targets: Tensor) -> Sums:
        """The sums of some rows, in float64."""
        phi, t = features.double(), targets.double()
        return cls(phi.mT @ phi, phi.mT @ t, t.square().sum(0), float(len(phi)))

    def __add__(self, other: Sums) -> Sums:
        return Sums(
            self.gram + other.gram,
            self.cross + other.cross,
            self.squares + other.squares,
            self.count + other.count,
        )

    def __sub__(self, other: Sums) -> Sums:
        return Sums(
            self.gram - other.gram,
            self.cross - other.cross,
            self.squares - other.squares,
            self.count - other.count,
        )

    @property
    def scale(self) -> float:
        """The mean eigenvalue of G, the unit in which penalties are said; 1 where there is nothing at all."""
        return float(self.gram.diagonal().mean()) or 1.0

    def without_last_feature(self) -> Sums:
        """The sums of the same rows without their last feature."""
        return Sums(self.gram[:-1, :-1], self.cross[:-1], self.squares, self.count)


@dataclass(frozen=True, slots=True, eq=False)
class RidgePath:
    """All ridge regressions on the same sums, from one eigendecomposition G = U diag(γ) Uᵀ.

    For a penalty λ the weights are W = (G + λI)⁻¹ H; each further λ costs as many operations as there are features.

    Example:
        >>> sums = Sums.of(torch.eye(2), torch.tensor([[2.0], [4.0]]))
        >>> RidgePath.of(sums).weights(1.0).flatten().tolist()
        [1.0, 2.0]
    """

    sums: Sums
    values: Tensor
    vectors: Tensor
    rotated: Tensor  # Uᵀ H

    @classmethod
    def of(cls, sums: Sums) -> RidgePath:
        """Decompose; eigenvalues below zero, which only rounding can bring, count as zero."""
        values, vectors = torch.linalg.eigh(symmetrize(sums.gram))
        floor = len(values) * torch.finfo(values.dtype).eps * float(values.abs().max()) if len(values) else 0.0
        values = torch.where(values > floor, values, 0.0)
        return cls(sums, values, vectors, vectors.mT @ sums.cross)

    def weights(self, penalty: float) -> Tensor:
        """W = (G + λI)⁻¹ H, features × targets; without a penalty the shortest of the least-squares solutions."""
        return self.vectors @ (self._shrunk(penalty)[:, None] * self.rotated)

    def _shrunk(self, penalty: float) -> Tensor:
        """1 / (γ + λ), and 0 where there is neither."""
        total = self.values + penalty
        return torch.where(total > 0, 1 / total.clamp(min=torch.finfo(total.dtype).tiny), 0.0)

    def residual(self, penalty: float) -> Tensor:
        """Per target the sum of squared residuals, S − 2⟨W, H⟩ + ⟨W, G W⟩.

        Written as what no weights explain plus what the penalty leaves, so that only the first is a difference.
        """
        energy = self.rotated.square() * self._shrunk(0.0)[:, None]
        left = (penalty * self._shrunk(penalty))[:, None]
        return (self.sums.squares - energy.sum(0)).clamp(min=0) + (energy * left.square()).sum(0)

    def freedom(self, penalty: float) -> float:
        """Effective degrees of freedom, tr((G + λI)⁻¹ G)."""
        return float((self.values * self._shrunk(penalty)).sum())

    def noise(self, penalty: float) -> float:
        """The variance of a residual, RSS / (n − df), averaged over targets."""
        left = self.sums.count - self.freedom(penalty)
        if left <= 0:
            return 0.0
        return float(self.residual(penalty).mean()) / left

    def gcv(self, penalty: float) -> float:
        """Generalized cross-validation, n · RSS / (n − df)²: leave-one-out error without leaving anyone out."""
        left = self.sums.count - self.freedom(penalty)
        return self.sums.count * float(self.residual(penalty).sum()) / left**2 if left > 0 else math.inf

    def log_evidence(self, penalty: float) -> float:
        """The log marginal likelihood of Bayesian linear regression at its best noise, for a penalty above 0.

        With prior precision α and noise variance 1/β, λ = α/β. Per target log N(t; 0, (I + ΦΦᵀ/λ)/β); β is profiled
        out: nm/β = Σ targets (RSS + λ‖W‖²).
        """
        shrunk = self._shrunk(penalty)[:, None]
        misfit = float((self.sums.squares - (self.rotated.square() * shrunk).sum(0)).sum())  # RSS + λ‖W‖²
        size = self.sums.count * self.sums.cross.shape[1]
        if misfit <= 0 or not size:
            return math.inf
        stiffness = float(torch.log1p(self.values / penalty).sum()) * self.sums.cross.shape[1]
        return -0.5 * (stiffness + size * (1 + math.log(2 * math.pi * misfit / size)))

    def choose(self, rule: Rule) -> float:
        """The penalty that generalized cross-validation or the marginal likelihood prefers, of a fixed grid.

        Raises:
            ConfigError: if there are no rows to choose by.
        """
        if self.sums.count < 1:
            raise ConfigError("a penalty cannot be chosen without rows; give a number instead")
        grid = [self.sums.scale * share for share in _GRID]
        return min(grid, key=self.gcv) if rule == "gcv" else max(grid, key=self.log_evidence)


def regression_mean(
    layers: Iterable[Tensor],
    moments: Iterable[Tensor],
    shares: Iterable[float],
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """The layer whose answers are nearest to every client's on its own inputs: argmin Σ f_k ‖(M − M_k) X_k‖².

    With A_k = X_k X_kᵀ it is the regression M = (Σ f_k M_k A_k)(Σ f_k A_k)⁻¹ of all layers' answers on all inputs.
    Inputs that no client has seen keep the plain mean Σ f_k M_k.

    Args:
        layers: each client's M_k, (out × in).
        moments: each client's symmetric A_k, (in × in), or the vector of a diagonal one.
        shares: each client's f_k; they sum to 1.
        dtype: what the matrix is rounded to, once.

    Returns:
        The matrix.

    Example:
        >>> M = [torch.tensor([[0.0, 0.0]]), torch.tensor([[4.0, 4.0]])]
        >>> seen = [torch.diag(torch.tensor([1.0, 0.0])), torch.eye(2)]
        >>> regression_mean(M, seen, [0.5, 0.5]).round(decimals=9).tolist()
        [[2.0, 4.0]]
    """
    layers, shares, moments = list(layers), list(shares), iter(moments)
    first = next(moments)
    if first.ndim == 1:  # an embedding's, of which nothing else than its rows is large
        return _mean_by_sizes(layers, [first, *moments], shares, dtype)
    rest = chain([first], moments)
    del first  # or it would be held while the others are read
    width = layers[0].shape[-1]
    plain, pull = (torch.zeros(layers[0].shape, dtype=torch.float64) for _ in range(2))
    total = torch.zeros(width, width, dtype=torch.float64)
    for f, M in zip(shares, layers, strict=True):
        A, M = next(rest).double(), M.double()
        plain += f * M
        pull += f * times(M, A)
        total += f * A
        del A  # before the next is made
    gap = pull.sub_(times(plain, total))
    return plain.add_(solve_moments(total, gap)).to(dtype)


def _mean_by_sizes(
    layers: Sequence[Tensor], sizes: Sequence[Tensor], shares: Sequence[float], dtype: torch.dtype
) -> Tensor:
    """The same for diagonal moments, a few rows of M at a time: only the layers and the result are held whole."""
    total = torch.stack([f * A.double() for f, A in zip(shares, sizes, strict=True)]).sum(0)
    out = torch.empty_like(layers[0], dtype=dtype)  # laid as they are: an embedding's rows are columns here
    for begin in range(0, len(out), _ROWS):
        rows = slice(begin, begin + _ROWS)
        weighed = [f * M[rows].double() for f, M in zip(shares, layers, strict=True)]
        plain = torch.stack(weighed).sum(0)
        pull = torch.stack([M * A.double() for M, A in zip(weighed, sizes, strict=True)]).sum(0)
        out[rows] = plain + solve_moments(total, pull - plain * total)
    return out


def solve_moments(moments: Tensor, gap: Tensor) -> Tensor:
    """The step M with M A = gap, for second moments A or the vector of diagonal ones; 0 for inputs never seen.

    Features are brought to one scale before the solve, so that only what is alike matters and not how large it is.

    Example:
        >>> A, gap = torch.diag(torch.tensor([1e-12, 1e6, 0.0])), torch.tensor([[1e-12, 2e6, 0.0]])
        >>> solve_moments(A, gap).round(decimals=9).tolist()
        [[1.0, 2.0, 0.0]]
    """
    A, gap = moments.double(), gap.double()
    if A.ndim == 1:
        return gap * reciprocal(A)
    scale = reciprocal(A.diagonal().clamp(min=0).sqrt())
    even = (A * scale).mul_(scale[:, None])
    even.diagonal().copy_(torch.ones_like(scale))
    return (gap * scale) @ inverse(even) * scale


def shrink_moments(factor: Factor, alpha: float) -> Tensor:
    """α A + (1 − α) diag(A), float64; a diagonal one stays a vector.

    Example:
        >>> shrink_moments(torch.tensor([[2.0, 1.0], [1.0, 2.0]]), 0.5).tolist()
        [[2.0, 0.5], [0.5, 2.0]]
    """
    A = written(factor)
    if A.ndim == 1:
        return A
    shrunk = A * alpha
    shrunk.diagonal().copy_(A.diagonal())
    return shrunk


def gaussian_classes(sums: Sums, penalty: float) -> Tensor:
    """The weights of linear discriminant analysis: log p(c | φ) up to what all classes share, features × classes.

    The last feature must be the constant 1 and targets one-hot, so that H's last row holds class counts n_c and the
    other rows n_c μ_c. With the scatter within classes C = Σ φφᵀ − Σ_c n_c μ_c μ_cᵀ and Σ = (C + λI)/n,

        w_c = Σ⁻¹ μ_c,   b_c = −½ μ_cᵀ Σ⁻¹ μ_c + log n_c/n.

    A class without rows is taken to look like all rows, as if half a row of it had been seen.

    Example:
        >>> features = torch.tensor([[-1.0, 1.0], [-3.0, 1.0], [1.0, 1.0], [3.0, 1.0]])
        >>> gaussian_classes(Sums.of(features, torch.tensor([[1.0, 0], [1, 0], [0, 1], [0, 1]])), 0.0)[0].tolist()
        [-2.0, 2.0]
    """
    counts, totals = sums.cross[-1], sums.cross[:-1]
    overall = sums.gram[:-1, -1:] / max(sums.count, 1.0)
    means = torch.where(counts > 0, totals / counts.clamp(min=1.0), overall)
    within = sums.gram[:-1, :-1] - (means * counts) @ means.mT
    covariance = add_diagonal(symmetrize(within), penalty) / max(sums.count, 1.0)
    weights = solve(covariance, means, what="the scatter within classes")
    prior = (counts.clamp(min=0.5) / max(sums.count, 1.0)).log()
    return torch.cat([weights, (prior - (means * weights).sum(0) / 2)[None]])

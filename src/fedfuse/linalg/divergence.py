"""How far a tensor is from Gaussian, and how far two distributions are apart.

A score that has no meaning (fewer than four numbers, all of them equal, or some not finite) is NaN; what
turns scores into weights then falls back to uniform ones, and notes it.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, TypeAlias, TypeVar, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedfuse.errors import ConfigError

Array = NDArray[np.float64]
V = TypeVar("V", float, Array)
Density = Literal["histogram", "samples", "grid"]
Reference = Literal["standard", "fitted"]
PowerSums: TypeAlias = Callable[[Tensor, float], Sequence[float]]

# Numbers worked on at once: enough to make calls cheap, few enough that they and their squares stay in cache.
_BLOCK = 2**18
_MOST_BINS = 10_000
_NARROW = 1e-4
_LEAST_ELEMENTS = 4  # the fourth k-statistic divides by n − 3
_NOTHING = (math.nan,) * 4


@dataclass(frozen=True, slots=True, eq=False)
class KStatistics:
    """Unbiased estimates of the first four cumulants, one number per row; NaN where there is no meaning.

    Attributes:
        k1: mean.
        k2: variance.
        k3: third cumulant, zero for a symmetric distribution.
        k4: fourth cumulant, zero for a Gaussian.
    """

    k1: Tensor
    k2: Tensor
    k3: Tensor
    k4: Tensor


def k_statistics(x: Tensor, *, per_row: bool = False, sums: PowerSums | None = None) -> KStatistics:
    """The first four k-statistics of a tensor's entries, or of each slice along its first axis.

    With central moments m_r over n entries (SWA, eqs. 3–4; Fisher 1930):

        k2 = n m2 / (n−1),  k3 = n² m3 / ((n−1)(n−2)),
        k4 = n² ((n+1) m4 − 3 (n−1) m2²) / ((n−1)(n−2)(n−3))

    In float64, block by block and in one pass; a tensor whose mean is large relative to its deviation takes a second
    one about its mean, so that neither size nor offset costs precision. `sums` replaces `power_sums`.

    Example:
        >>> k = k_statistics(torch.tensor([1.0, 2.0, 3.0, 10.0]))
        >>> [round(float(v), 6) for v in (k.k1, k.k2, k.k3, k.k4)]
        [4.0, 16.666667, 120.0, 896.666667]
    """
    if not per_row:
        return KStatistics(*torch.tensor(_vector_k(x.detach().reshape(-1), sums), dtype=torch.float64))
    return KStatistics(*_row_k(x.detach().flatten(1), sums))


def non_gaussianity(
    x: Tensor, *, standardized: bool = False, per_row: bool = False, sums: PowerSums | None = None
) -> Tensor:
    """|k3·k4| of a tensor's entries (SWA's score), or of each slice along its first axis.

    The raw product grows with the seventh power of the entries' scale; `standardized` divides by k2^3.5,
    which leaves |skewness · excess kurtosis| and no scale. NaN means no score.

    Example:
        >>> x = torch.tensor([1.0, 2.0, 3.0, 10.0])
        >>> ratio = non_gaussianity(2 * x) / non_gaussianity(x)
        >>> round(float(ratio)), bool(non_gaussianity(torch.ones(9)).isnan())
        (128, True)
    """
    if per_row and len(x) != 1:
        _, k2, k3, k4 = _row_k(x.detach().flatten(1), sums)
    else:  # in plain floats: most layers are so small that tensors of one number would take longer than the sums
        _, k2, k3, k4 = _vector_k(x.detach().reshape(-1), sums)
    score = abs((k3 / k2**1.5) * (k4 / k2**2) if standardized else k3 * k4)
    if isinstance(score, Tensor):
        return score
    return torch.tensor([score] if per_row else score, dtype=torch.float64)


def _vector_k(vector: Tensor, sums_of: PowerSums | None) -> tuple[float, float, float, float]:
    """The four k-statistics of one vector."""
    n = float(vector.numel())  # a float: n³ of a large layer exceeds 64-bit integers
    if n < _LEAST_ELEMENTS:
        return _NOTHING
    sum_up = sums_of or power_sums
    sums, begin = sum_up(vector, 0.0), 0.0
    if 2 * sums[0] * sums[0] > n * sums[1]:  # the mean exceeds the deviation: sums about zero would cost digits
        begin = sums[0] / n
        sums = sum_up(vector, begin)
    r1, r2, r3, r4 = (s / n for s in sums)
    square = r1 * r1
    m2, m3 = r2 - square, r3 - 3 * r1 * r2 + 2 * square * r1
    m4 = r4 - 4 * r1 * r3 + 6 * square * r2 - 3 * square * square
    found = _k_from_moments(n, begin + r1, m2, m3, m4)
    return found if math.isfinite(found[3]) and m2 > _rounding(found[0]) else _NOTHING


def power_sums(vector: Tensor, begin: float) -> Sequence[float]:
    """Sums of the 1st to 4th powers of a vector's entries about a point, in float64."""
    room = _work_buffers(_BLOCK, threading.get_ident())
    sums = [0.0] * 4
    for block in vector.split(_BLOCK):
        off, square = room[0, : block.numel()], room[1, : block.numel()]
        off.copy_(block)
        if begin:
            off.sub_(begin)
        torch.square(off, out=square)
        found = off.sum(), square.sum(), torch.dot(square, off), torch.dot(square, square)
        sums = [s + f.item() for s, f in zip(sums, found, strict=True)]
    return sums


@lru_cache(maxsize=2)
def _work_buffers(size: int, thread: int) -> Tensor:  # noqa: ARG001 - each thread has its own
    """Working memory for a block and its squares, kept: to ask for it each time would cost as much as a small layer."""
    return torch.empty(2, size, dtype=torch.float64)


def _row_k(rows: Tensor, sums_of: PowerSums | None) -> Tensor:
    """The four k-statistics of each row, (4 × rows)."""
    if len(rows) == 1:
        return torch.tensor(_vector_k(rows[0], sums_of), dtype=torch.float64)[:, None]
    if rows.shape[1] < _LEAST_ELEMENTS:
        return torch.full((4, len(rows)), math.nan, dtype=torch.float64)
    with np.errstate(all="ignore"):
        mean, m2, m3, m4 = _row_moments(rows)
        found = np.stack(_k_from_moments(float(rows.shape[1]), mean, m2, m3, m4))
        meaning = np.isfinite(found[3]) & (m2 > _rounding(mean))
    return torch.from_numpy(np.where(meaning, found, np.nan))


def _row_moments(rows: Tensor) -> tuple[Array, Array, Array, Array]:
    """Mean and central moments 2 to 4 of each row: per stripe about its own mean, then moved to the row's."""
    stripes = rows.split(_BLOCK, dim=1)
    means, s2, s3, s4 = np.stack([_row_sums(stripe) for stripe in stripes], 1)
    counts = np.array([[float(stripe.shape[1])] for stripe in stripes])
    n = counts.sum()
    mean = (counts * means).sum(0) / n
    off = means - mean
    m2 = (s2 + counts * off**2).sum(0) / n
    m3 = (s3 + 3 * off * s2 + counts * off**3).sum(0) / n
    m4 = (s4 + 4 * off * s3 + 6 * off**2 * s2 + counts * off**4).sum(0) / n
    return mean, m2, m3, m4


def _row_sums(rows: Tensor) -> Array:
    """Mean, and sums of the 2nd to 4th powers about it, of each row, a few rows at a time: (4 × rows)."""
    sums = []
    for block in rows.split(max(1, _BLOCK // rows.shape[1])):
        off = block.to(torch.float64, copy=True)
        mean = off.mean(1)
        square = off.sub_(mean[:, None]).square()
        second = square.sum(1)
        sums.append(torch.stack([mean, second, off.mul_(square).sum(1), square.mul_(square).sum(1)]))
    return np.asarray(torch.cat(sums, 1).cpu())


def _k_from_moments(n: float, mean: V, m2: V, m3: V, m4: V) -> tuple[V, V, V, V]:
    """k-statistics from central moments; see `k_statistics`."""
    k2 = n * m2 / (n - 1)
    k3 = n * n * m3 / ((n - 1) * (n - 2))
    k4 = n * n * ((n + 1) * m4 - 3 * (n - 1) * m2 * m2) / ((n - 1) * (n - 2) * (n - 3))
    return mean, k2, k3, k4


def _rounding(mean: V) -> V:
    """The variance that equal numbers of this mean may show by rounding alone."""
    step = 8 * np.finfo(np.float64).eps * mean
    return step * step


def renyi_to_gaussian(
    x: Tensor,
    order: float = 1.0,
    *,
    density: Density = "histogram",
    reference: Reference = "standard",
    bins: int | None = None,
    generator: torch.Generator | None = None,
) -> float:
    """Rényi divergence of the distribution of a tensor's entries from a Gaussian; NaN means no score.

    The three densities differ in what they call the distribution of the entries:

    - `histogram`: the share of entries in each of a number of equal bins (Scott's rule unless given),
      against the Gaussian's mass in the same bins. It converges to the divergence of the densities, fast
      for orders near one; order 0 sees only which bins are occupied, and orders well above one lean on
      the sparse bins of the tails.
    - `samples`: SWA's text. Entry i has probability softmax(x)_i, against softmax of as many normal draws.
    - `grid`: SWA's released code. softmax(x)_i against the normal density, not normalized, at the i-th of
      as many equally spaced points of [−1, 1]; at order 1 both are normalized after adding 1e-10; the
      absolute value of the result.

    Args:
        x: the entries.
        order: 0, 1 (Kullback–Leibler), or any positive number.
        density: one of the three.
        reference: `standard` is N(0, 1); `fitted` has the entries' own mean and variance.
        bins: number of bins of the histogram.
        generator: draws the normal samples.

    Example:
        >>> x = torch.randn(100_000, generator=torch.Generator().manual_seed(0)) / 20
        >>> f"{renyi_to_gaussian(x):.2f} = {(1 / 400 - 1 - math.log(1 / 400)) / 2:.2f}"
        '2.50 = 2.50'
    """
    order = _order(order)
    if density not in get_args(Density) or reference not in get_args(Reference):
        raise ConfigError(
            f"Rényi divergence: density is {density!r} and reference {reference!r}, expected one of "
            f"{', '.join(get_args(Density))} and one of {', '.join(get_args(Reference))}"
        )
    k = k_statistics(x)
    if bool(k.k2.isnan()):
        return math.nan
    entries, std = x.detach().flatten(), float(k.k2.sqrt())
    if reference == "fitted":  # the divergence does not change when both sides are standardized
        entries, std = (entries.double() - k.k1) / std, 1.0
    if density == "histogram":
        return _renyi(*_bin_log_masses(entries, std, bins), order)
    log_p = torch.log_softmax(entries.double(), 0)
    if density == "grid":
        return _renyi_on_grid(log_p, order)
    return _renyi(log_p, torch.log_softmax(_normal_draws(len(log_p), generator, log_p.device), 0), order)


def _bin_log_masses(x: Tensor, std: float, bins: int | None) -> tuple[Tensor, Tensor]:
    """Log shares of x and log masses of N(0, 1) in the equal bins between x's extremes that x occupies."""
    low, high = (float(end) for end in torch.aminmax(x))
    if bins is None:  # Scott 1979: 3.49 σ n^(−1/3) wide
        bins = math.ceil(min((high - low) / (3.49 * std * x.numel() ** (-1 / 3)), _MOST_BINS))
    if bins < 1:
        raise ConfigError(f"Rényi divergence: bins is {bins}, expected at least 1")
    counts = torch.zeros(bins, dtype=torch.float64, device=x.device)
    for block in x.split(max(1, _BLOCK // 4)):
        place = block.to(torch.float64, copy=True).sub_(low).mul_(bins / (high - low))
        counts += torch.bincount(place.long().clamp_(max=bins - 1), minlength=bins)
    edges = torch.linspace(low, high, bins + 1, dtype=torch.float64, device=x.device)
    seen = counts > 0
    return (counts[seen] / x.numel()).log(), _log_normal_mass(edges[:-1], edges[1:])[seen]


def _log_normal_mass(left: Tensor, right: Tensor) -> Tensor:
    """log(Φ(right) − Φ(left)), precise far out (bins right of zero are mirrored) and in narrow bins."""
    width, middle = right - left, (left + right) / 2
    mirrored = left > 0
    near, far = torch.where(mirrored, -left, right), torch.where(mirrored, -right, left)
    log_near, log_far = torch.special.log_ndtr(near), torch.special.log_ndtr(far)
    by_difference = log_near + torch.log1p(-torch.exp(log_far - log_near))
    by_density = width.log() - middle.square() / 2 - math.log(2 * math.pi) / 2
    narrow = width * middle.abs().clamp(min=1) < _NARROW  # there the two tails cancel to rounding
    return torch.where(narrow, by_density, by_difference)


def _normal_draws(n: int, generator: torch.Generator | None, device: torch.device) -> Tensor:
    if generator is None:
        raise ConfigError("Rényi divergence: density 'samples' draws at random, expected a generator")
    return torch.randn(n, dtype=torch.float64, generator=generator, device=generator.device).to(device)


def _renyi_on_grid(log_p: Tensor, order: float) -> float:
    """SWA's released score; see `renyi_to_gaussian`."""
    points = torch.linspace(-1, 1, len(log_p), dtype=torch.float64, device=log_p.device)
    log_q = -points.square() / 2 - math.log(2 * math.pi) / 2
    if order == 1:
        return renyi(log_p.exp() + 1e-10, log_q.exp() + 1e-10, 1)
    if order == 0:
        return abs(float(torch.logsumexp(log_q[log_p > -math.inf], 0)))
    return abs(float(torch.logsumexp(order * log_p + (1 - order) * log_q, 0)) / (order - 1))


def renyi(p: Tensor, q: Tensor, order: float = 1.0) -> float:
    """Rényi divergence D_a(p‖q) = log Σ p^a q^(1−a) / (a−1) of two discrete distributions.

    D_0 = −log Σ_{p>0} q and D_1 = Σ p log(p/q). Both arguments are divided by their sums.

    Example:
        >>> p, q = torch.tensor([0.5, 0.5]), torch.tensor([0.25, 0.75])
        >>> round(renyi(p, q, order=2), 6) == round(math.log(4 / 3), 6)
        True
    """
    p, q = _distribution(p, "p"), _distribution(q, "q")
    if p.shape != q.shape:
        raise ConfigError(f"Rényi divergence: got {len(p)} and {len(q)} outcomes, expected as many")
    return _renyi(p.log(), q.log(), _order(order))


def _renyi(log_p: Tensor, log_q: Tensor, order: float) -> float:
    """Rényi divergence from log probabilities; outcomes with p = 0 count for nothing."""
    log_p, log_q = log_p[log_p > -math.inf], log_q[log_p > -math.inf]
    if order == 0:
        found = -torch.logsumexp(log_q, 0)
    elif order == 1:
        found = (log_p.exp() * (log_p - log_q)).sum()
    else:
        found = torch.logsumexp(order * log_p + (1 - order) * log_q, 0) / (order - 1)
    return max(0.0, float(found))  # rounding can bring equal distributions just below zero


def _order(order: float) -> float:
    if not (math.isfinite(order) and order >= 0):
        raise ConfigError(f"Rényi divergence: order is {order}, expected a finite number of at least 0")
    return float(order)


def jensen_shannon(p_counts: Tensor | Sequence[float], q_counts: Tensor | Sequence[float], base: float = 2) -> float:
    """Jensen–Shannon divergence of two histograms: (KL(p‖m) + KL(q‖m)) / 2 with m = (p+q)/2.

    In [0, 1] for base 2; an empty bin adds nothing (0 log 0 = 0).

    Example:
        >>> round(jensen_shannon([1, 0], [0, 1]), 12), jensen_shannon([3, 1], [6, 2])
        (1.0, 0.0)
    """
    p, q = _distribution(torch.as_tensor(p_counts), "p"), _distribution(torch.as_tensor(q_counts), "q")
    if p.shape != q.shape or not (base > 1):
        raise ConfigError(
            f"Jensen–Shannon: got {len(p)} and {len(q)} bins and base {base}, expected as many bins and a base above 1"
        )
    m = (p + q) / 2
    nats = (torch.special.xlogy(p, p / m).nansum() + torch.special.xlogy(q, q / m).nansum()) / 2
    return max(0.0, float(nats)) / math.log(base)


def _distribution(counts: Tensor, name: str) -> Tensor:
    """Counts divided by their sum, or a refusal."""
    counts = counts.double().flatten()
    total = float(counts.sum())
    if not (bool((counts >= 0).all()) and 0 < total < math.inf):
        raise ConfigError(f"divergence: {name} sums to {total}, expected finite counts of at least 0, not all 0")
    return counts / total

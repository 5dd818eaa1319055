"""Differential privacy of Gaussian noise: how much is enough, and what several releases cost together.

A release with sensitivity Δ and noise of standard deviation σ has the signal μ = Δ/σ. It is (ε, δ)-private where

    Φ(μ/2 − ε/μ) − e^ε Φ(−μ/2 − ε/μ) ≤ δ                        (Balle and Wang, ICML 2018)

and several releases with signals μ_i are together one with μ = √Σ μ_i², exactly (Dong, Roth and Su 2022).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol, runtime_checkable

from fedfuse.errors import ConfigError

_HALVINGS = 200
_ORDERS = range(2, 257)


@dataclass(frozen=True, slots=True)
class Release:
    """Something that left a client with Gaussian noise; without noise its signal is infinite.

    Attributes:
        signal: μ = Δ/σ.
        delta: the δ at which its ε is told.

    Example:
        >>> round(Release(1 / gaussian_sigma(1.0, 1e-5), 1e-5).epsilon, 6)
        1.0
    """

    signal: float
    delta: float

    @property
    def epsilon(self) -> float:
        """Its ε, infinite without noise."""
        return gaussian_epsilon(self.signal, self.delta) if math.isfinite(self.signal) else math.inf

    def after(self, others: Iterable[Release]) -> Release:
        """What it is together with all that left before, at its own δ."""
        return Release(compose_signals([self.signal, *(other.signal for other in others)]), self.delta)

    def to_json(self) -> dict[str, Any]:
        """What a header tells of it."""
        return {"of": "a row", "epsilon": self.epsilon, "delta": self.delta, "signal": self.signal}

    @classmethod
    def from_json(cls, told: object) -> Release:
        """What a header or a ledger tells; nothing told is a release without noise.

        Raises:
            ConfigError: if that is no release.
        """
        if told is None:
            return cls(math.inf, 1e-5)
        entry: Mapping[str, Any] = told if isinstance(told, dict) else {}
        signal, delta = entry.get("signal"), entry.get("delta", 1e-5)
        numbers = all(isinstance(n, int | float) and not isinstance(n, bool) for n in (signal, delta))
        if not numbers or not (signal > 0 and 0 < delta < 1):  # type: ignore[operator]
            raise ConfigError(f"privacy: {str(told)[:80]} is no release, expected a signal > 0 and 0 < delta < 1")
        return cls(float(signal), float(delta))  # type: ignore[arg-type]


@lru_cache(maxsize=256)
def released_epsilon(square: float, delta: float) -> float:
    """ε of releases whose signals' squares add up to a number; remembered, for many clients have the same.

    Example:
        >>> released_epsilon(4.0, 1e-5) == Release(2.0, 1e-5).epsilon
        True
    """
    return Release(math.sqrt(square), delta).epsilon


@runtime_checkable
class NoisedEvidence(Protocol):
    """Evidence that leaves a client with Gaussian noise."""

    @property
    def release(self) -> Release:
        """What one exchange of it is."""


def release_of(evidence: Iterable[object], trains: bool) -> Release | None:
    """What one exchange tells of any one row, None where something of it leaves without noise."""
    kinds = list(evidence)
    found = [kind.release for kind in kinds if isinstance(kind, NoisedEvidence)]
    return found[0].after(found[1:]) if found and len(found) == len(kinds) and not trains else None


def gaussian_delta(epsilon: float, signal: float) -> float:
    """The least δ with which Gaussian noise of a signal μ = Δ/σ is (ε, δ)-private.

    Example:
        >>> round(gaussian_delta(1.0, 1.0), 4)
        0.1269
    """
    if signal <= 0:
        return 0.0
    first = _normal(signal / 2 - epsilon / signal)
    # e^ε Φ(−x) of a large ε is a product of what overflows and what vanishes: taken as one exponential
    return max(0.0, first - math.exp(epsilon + _log_normal(-signal / 2 - epsilon / signal)))


def gaussian_sigma(epsilon: float, delta: float, sensitivity: float = 1.0) -> float:
    """The least σ whose noise makes a release of this sensitivity (ε, δ)-private: the analytic Gaussian mechanism.

    Raises:
        ConfigError: unless ε > 0 and 0 < δ < 1.

    Example:
        >>> round(gaussian_sigma(1.0, 1e-5), 3)
        3.731
    """
    _check(epsilon, delta)
    signal = _largest(lambda mu: gaussian_delta(epsilon, mu) <= delta, 1e-9, 1e9)
    return sensitivity / signal


def gaussian_epsilon(signal: float, delta: float) -> float:
    """The least ε of Gaussian noise with a signal μ at this δ.

    Example:
        >>> round(gaussian_epsilon(1 / gaussian_sigma(1.0, 1e-5), 1e-5), 6)
        1.0
    """
    _check(1.0, delta)
    if gaussian_delta(0.0, signal) <= delta:
        return 0.0
    return 1 / _largest(lambda inverse: gaussian_delta(1 / inverse, signal) <= delta, 1e-9, 1e9)


def compose_signals(signals: Iterable[float]) -> float:
    """The signal of several releases together, √Σ μ²: what an accountant adds up.

    Example:
        >>> compose_signals([3.0, 4.0])
        5.0
    """
    return math.sqrt(math.fsum(signal**2 for signal in signals))


def sampled_epsilon(noise: float, share: float, rounds: int, delta: float) -> float:
    """ε of several rounds in each of which every client takes part with a probability: Rényi accounting, whole orders.

    Per round and order α, (1/(α−1)) log Σ_k C(α, k)(1−q)^(α−k) q^k exp(k(k−1)/(2z²)) (Mironov et al. 2019); rounds add,
    and the best order is taken. It holds for Poisson sampling: a coin per client.

    Args:
        noise: z, the noise's standard deviation over the sensitivity.
        share: q, the probability to take part.
        rounds: how many.
        delta: δ.

    Example:
        >>> round(sampled_epsilon(1.0, 0.01, 100, 1e-5), 2) < round(sampled_epsilon(1.0, 1.0, 100, 1e-5), 2)
        True
    """
    _check(1.0, delta)
    if not (noise > 0 and 0 < share <= 1):
        raise ConfigError(f"privacy: noise is {noise} and the share {share}, expected noise > 0 and a share up to 1")
    best = math.inf
    for order in _ORDERS:
        loss = rounds * _renyi(order, noise, share)
        best = min(best, loss + math.log1p(-1 / order) - (math.log(delta) + math.log(order)) / (order - 1))
    return max(0.0, best)


def _renyi(order: int, noise: float, share: float) -> float:
    if share == 1:
        return order / (2 * noise**2)
    terms = [
        math.log(math.comb(order, k))
        + (order - k) * math.log1p(-share)
        + k * math.log(share)
        + k * (k - 1) / (2 * noise**2)
        for k in range(order + 1)
    ]
    peak = max(terms)
    return (peak + math.log(math.fsum(math.exp(t - peak) for t in terms))) / (order - 1)


def _largest(holds: Callable[[float], bool], low: float, high: float) -> float:
    """The largest number for which something holds that holds for all smaller ones, by halving on a log scale."""
    for _ in range(_HALVINGS):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _normal(x: float) -> float:
    return 0.5 * math.erfc(-x / math.sqrt(2))


def _log_normal(x: float) -> float:
    """Log Φ(x); far out by its continued fraction, where Φ itself is zero in floating point."""
    if x > -30:
        return math.log(_normal(x))
    return -x * x / 2 - 0.5 * math.log(2 * math.pi) - math.log(-x + 1 / (-x + 2 / (-x + 3 / -x)))


def _check(epsilon: float, delta: float) -> None:
    if not (epsilon > 0 and 0 < delta < 1):
        raise ConfigError(f"privacy: epsilon is {epsilon} and delta {delta}, expected epsilon > 0 and 0 < delta < 1")

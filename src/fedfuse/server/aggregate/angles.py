"""Means whose weights are read off the angles between clients: on the sphere, and between a base and the mean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedfuse.core.messages import Cohort
from fedfuse.core.params import Params
from fedfuse.core.seams import ServerPart
from fedfuse.core.state import Bench, ServerState
from fedfuse.server.aggregate.mean import ALL_LAWS, weighted_mean
from fedfuse.server.aggregate.moves import fuse_weights, inner_products, move_along, sources_of

_STEPS = 200  # of the fixed point; a few are enough unless clients are spread over more than half a sphere
_STILL = 1e-12  # radians: nearer than float64 can tell the mean from its next step
_NO_DIRECTION = 1e-6  # a mean of unit vectors this short points nowhere


@dataclass(frozen=True, slots=True)
class SphericalMean(ServerPart):
    """SLERP: every tensor's direction is the mean on the sphere of the clients', its length the mean of theirs.

    With u_k = w_k/‖w_k‖ the mean μ solves Σ_k f_k log_μ(u_k) = 0 (Karcher); of two clients it is the point at t = f₂
    on their great circle, (sin((1−t)Ω) u₁ + sin(tΩ) u₂)/sin Ω. It lies in the span of the clients, so it is found from
    their cosines alone and is one weighted mean of their tensors. Where there is no such direction (a tensor of zeros,
    opposite clients) the plain mean is taken and noted.
    """

    needs: ClassVar[frozenset[str]] = frozenset()
    tensorwise: ClassVar[bool] = True
    laws: ClassVar[frozenset[str]] = ALL_LAWS

    def __call__(self, cohort: Cohort, state: ServerState, bench: Bench) -> ServerState:  # noqa: ARG002
        """Average directions on the sphere, and lengths."""
        sources, straight = sources_of(cohort), list[str]()

        def rule(name: str) -> Tensor:
            weights = sphere_weights(inner_products(sources, None, name), cohort.weights)
            if weights is None:
                straight.append(name)
            return weighted_mean(sources, cohort.weights if weights is None else weights, name)

        after = state.fused(fuse_weights(cohort, rule), spec=cohort.updates[0].spec)
        return after.noting(straight_means=straight) if straight else after


def sphere_weights(products: Tensor, shares: Tensor) -> Tensor | None:
    """The weights c with Σ_k c_k w_k = (Σ_k f_k ‖w_k‖) μ, from ⟨w_j, w_k⟩ alone; None where μ is not determined.

    Example:
        >>> products = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
        >>> sphere_weights(products, torch.tensor([0.5, 0.5], dtype=torch.float64)).mul(2**0.5).round(decimals=6)
        tensor([1., 1.], dtype=torch.float64)
    """
    lengths = products.diagonal().sqrt()
    if not bool((lengths > 0).all()):
        return None
    cosines = (products / lengths.outer(lengths)).clamp(-1, 1)
    mean = _karcher(cosines, shares)
    return None if mean is None else mean * (shares @ lengths) / lengths


def _karcher(cosines: Tensor, shares: Tensor) -> Tensor | None:
    """The coefficients a of μ = Σ a_k u_k, by steps along the mean of log_μ(u_k)."""
    length = (shares @ cosines @ shares).clamp(min=0).sqrt()
    if length < _NO_DIRECTION:
        return None
    mean = shares / length
    for _ in range(_STEPS):
        along = (cosines @ mean).clamp(-1, 1)
        angles = along.acos()
        stretch = shares / torch.sinc(angles / torch.pi)  # f θ/sin θ, which is f for parallel ones
        step = stretch - (stretch @ along) * mean
        length = (step @ cosines @ step).clamp(min=0).sqrt()
        if not bool(length.isfinite()):
            return None
        if length < _STILL:
            return mean
        mean = length.cos() * mean + length.sin() / length * step
        mean = mean / (mean @ cosines @ mean).sqrt()
    return None


@dataclass(frozen=True, slots=True)
class ModelStock(ServerPart):
    """w = w₀ + t Σ_k f_k δ_k with t = K cos θ / (1 + (K − 1) cos θ), tensor by tensor (Jang et al. 2024).

    cos θ is the mean cosine between two clients' moves: moves that agree are followed, moves that look like noise
    around a common centre are drawn back to the base. A cosine below 0 counts as 0, one client alone as 1.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"start"})
    tensorwise: ClassVar[bool] = True
    laws: ClassVar[frozenset[str]] = ALL_LAWS

    def __call__(self, cohort: Cohort, state: ServerState, bench: Bench) -> ServerState:  # noqa: ARG002
        """Go as far from the base as the clients' angle says."""
        start, sources, ratios = state.single.posterior.mean, sources_of(cohort), dict[str, float]()

        def rule(name: str) -> Tensor:
            ratios[name] = stock_ratio(sources, start, name)
            return move_along(sources, start, ratios[name] * cohort.weights, name)

        mean = fuse_weights(cohort, rule)
        return state.fused(mean, spec=cohort.updates[0].spec).noting(ratio=ratios)


def stock_ratio(sources: list[Params], start: Params, name: str) -> float:
    """The ratio t of one tensor: how far from the base the fused one stands on the way to the clients' mean.

    Example:
        >>> start, moved = {"w": torch.zeros(2)}, [{"w": torch.tensor([1.0, 0.0])}, {"w": torch.tensor([1.0, 1.0])}]
        >>> round(stock_ratio(moved, start, "w"), 4)  # 2 cos 45° / (1 + cos 45°)
        0.8284
    """
    count = len(sources)
    if count == 1:
        return 1.0
    products = inner_products(sources, start, name)
    lengths = products.diagonal().sqrt()
    cosines = torch.where(products == 0, 0.0, products / lengths.outer(lengths))
    cosine = float((cosines.sum() - cosines.diagonal().sum()) / (count * (count - 1)))
    cosine = min(max(cosine, 0.0), 1.0)
    return count * cosine / (1 + (count - 1) * cosine)

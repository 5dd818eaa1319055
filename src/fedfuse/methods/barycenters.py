"""Jamoussi et al., BA-BFL: Barycentric Aggregation for Bayesian Federated Learning, 2024; Ozer et al., 2022.

Clients learn Gaussian posteriors N(μ_k, v_k) of the last layers' weights (`Elbo` in client/elbo.py), and the server
fuses them weight by weight to the barycenter argmin_q Σ f_k D(q_k ‖ q) of a divergence D, with f_k a client's share of
the examples. For most divergences that is a plain mean in a chart of the Gaussians (aggregate/charts.py):

    eaa    μ = Σ f_k μ_k,   v = Σ f_k v_k                          wb     μ = Σ f_k μ_k,   √v = Σ f_k √v_k
    gaa    μ = Σ f_k μ_k,   v = Σ f_k² v_k                         rklb   μ/v = Σ f_k μ_k/v_k,   1/v = Σ f_k/v_k
    aalv   μ = Σ f_k μ_k,   log v = Σ f_k log v_k                  fklb   μ = Σ f_k μ_k,   v + μ² = Σ f_k (v_k + μ_k²)

The α-divergence between the last two has no such chart: `alpha_barycenter` finds its minimum by Newton's method.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, TypeAlias

import torch
from pydantic import Field, NonNegativeInt
from torch import Tensor

from fedfuse.client.elbo import USUAL, Variational
from fedfuse.core.messages import ClientUpdate, Cohort, Start
from fedfuse.core.model import Apart
from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import method
from fedfuse.core.seams import Result, ServerPart
from fedfuse.core.state import Bench, ServerState
from fedfuse.errors import ConfigError, NotConverged
from fedfuse.server.aggregate.charts import AALV, EAA, FKLB, GAA, RKLB, WB, Chart, FusionRule, MeanIn, Pair

_PIECE = 4096  # elements searched at a time: their many terms stay in cache
Triple: TypeAlias = tuple[Tensor, Tensor, Tensor]

_FLAT = 1e-9  # nearer to α = 0 or 1 than this the divergence is KL one way or the other, to rounding


@dataclass(frozen=True, slots=True)
class AlphaDivergence:
    """The rule of the α-divergence, weight by weight: see `alpha_barycenter`."""

    alpha: float
    shrinks: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not math.isfinite(self.alpha):
            raise ConfigError(
                f"the α-barycenter: alpha is {self.alpha}, expected a finite number; 0 is reverse KL and 1 is KL"
            )

    def __call__(self, means: Sequence[Tensor], logs: Iterable[Tensor], weights: Sequence[float]) -> Pair:
        """The fused mean and log-variance, elementwise in float64."""
        shape, shares = means[0].shape, torch.tensor(weights, dtype=torch.float64) / math.fsum(weights)
        mus, rhos = (torch.stack([t.flatten() for t in column]).split(_PIECE, 1) for column in (means, logs))
        pieces = zip(mus, rhos, strict=True)
        found = [alpha_barycenter(m, rho.double().exp(), shares, self.alpha) for m, rho in pieces]
        mean, variance = (torch.cat(column).view(shape) for column in zip(*found, strict=True))
        return mean, variance.log()


def alpha_barycenter(
    means: Tensor, variances: Tensor, weights: Tensor, alpha: float, *, tol: float = 1e-9, max_iters: int = 200
) -> tuple[Tensor, Tensor]:
    """The Gaussian nearest in α-divergence to Gaussians N(μ_k, v_k), elementwise in float64.

    argmin_{m, v} Σ_k w_k D_α(N(μ_k, v_k) ‖ N(m, v)), D_α = (1 − ∫ p^α q^{1−α}) / (α (1 − α)). The α-barycenter among
    all distributions (Theorem 1) is no Gaussian; this is its α-projection back onto them, since by eq. 7 both have
    the same minimizer among Gaussians. α = 0 is reverse KL, ½ Hellinger, 1 KL (moment matching).

    Newton's method in (m, log v), damped where the divergence would grow. Posteriors far apart can have several
    minima for α in (0, 1); the one reached from the reverse-KL barycenter is returned.

    Args:
        means: clients × elements.
        variances: as the means, above 0.
        weights: one per client, summing to 1.
        alpha: any number.
        tol: largest slope left, per standard deviation of m and per unit of log v.
        max_iters: limit of iterations.

    Raises:
        NotConverged: if the limit is reached.

    Example:
        >>> mu, v = torch.tensor([[0.0], [2.0]]), torch.tensor([[1.0], [0.25]])
        >>> [round(a.item(), 4) for a in alpha_barycenter(mu, v, torch.tensor([0.5, 0.5]), alpha=0.5)]
        [1.1456, 1.2266]
    """
    clients = _Clients(means.double(), variances.double(), weights.double()[:, None])
    m, v = clients.natural_mean()
    if abs(alpha) < _FLAT:
        return m, v
    if abs(alpha - 1) < _FLAT:
        return clients.moments()
    m, rho = m.clone(), clients.feasible(v, alpha).log()
    damping, todo = torch.zeros_like(m), torch.arange(len(m), device=m.device)
    slack = 1e-13 + 1e-15 / abs(alpha * (1 - alpha))  # rounding of the nearness, a logarithm divided by α (1 − α)
    for _ in range(max_iters):
        here = clients.at(todo)
        slope, curve = here.derivatives(m[todo], rho[todo], alpha)
        steep = torch.maximum(slope[0].abs() * (rho[todo] / 2).exp(), slope[1].abs()) > tol
        if not bool(steep.any()):
            return m, rho.exp()
        here, todo = here.at(steep), todo[steep]
        point = m[todo], rho[todo]
        step, curved = _newton([g[steep] for g in slope], [h[steep] for h in curve], point[1], damping[todo])
        trial = point[0] + step[0], point[1] + step[1]
        rise = here.nearness(*trial, alpha) - here.nearness(*point, alpha)
        better = curved & (rise >= -slack)
        m[todo], rho[todo] = (torch.where(better, a, b) for a, b in zip(trial, point, strict=True))
        less = torch.where(damping[todo] > 0.01, damping[todo] / 10, 0.0)  # none once it is small: Newton's own step
        damping[todo] = torch.where(better, less, (4 * damping[todo]).clamp(min=0.1))
    raise NotConverged(
        f"the barycenter of the α-divergence with α = {alpha:g}: after {max_iters} iterations {len(todo)} of {len(m)} "
        f"elements are not at rest within {tol:.0e}; take an α nearer to [0, 1]"
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Clients:
    """Gaussians clients × elements, and w (clients × 1); with V = α v + (1 − α) v_k, d = m − μ_k and c = α (1 − α)."""

    mu: Tensor
    v: Tensor
    w: Tensor

    def at(self, indices: Tensor) -> _Clients:
        return _Clients(self.mu[:, indices], self.v[:, indices], self.w)

    def natural_mean(self) -> tuple[Tensor, Tensor]:
        precision = (self.w / self.v).sum(0)
        return (self.w * self.mu / self.v).sum(0) / precision, 1 / precision

    def moments(self) -> tuple[Tensor, Tensor]:
        mean = (self.w * self.mu).sum(0)
        return mean, (self.w * (self.v + (self.mu - mean).square())).sum(0)

    def feasible(self, v: Tensor, alpha: float) -> Tensor:
        """A first variance for which all V are positive: beyond [0, 1] they need q wide, or narrow."""
        if alpha > 1:
            return torch.maximum(v, self.v.amax(0))
        return torch.minimum(v, self.v.amin(0)) if alpha < 0 else v

    def log_overlaps(self, m: Tensor, rho: Tensor, alpha: float) -> Tensor:
        """Logarithms of w_k ∫ p_k^α q^{1−α}; NaN where the integral does not exist."""
        wide = alpha * rho.exp() + (1 - alpha) * self.v
        scale = (alpha * rho + (1 - alpha) * self.v.log() - wide.log()) / 2
        return self.w.log() + scale - alpha * (1 - alpha) * (m - self.mu).square() / (2 * wide)

    def nearness(self, m: Tensor, rho: Tensor, alpha: float) -> Tensor:
        """The value log(Σ_k w_k ∫ p_k^α q^{1−α}) / c, which falls as Σ_k w_k D_α grows; −∞ where it does not exist."""
        total = torch.logsumexp(self.log_overlaps(m, rho, alpha), 0) / (alpha * (1 - alpha))
        return torch.nan_to_num(total, nan=-math.inf)

    def derivatives(self, m: Tensor, rho: Tensor, alpha: float) -> tuple[Pair, Triple]:
        """Slope and curvature of the nearness in (m, ρ = log v); c is cancelled by hand, so small α are exact too."""
        v, c = rho.exp(), alpha * (1 - alpha)
        wide = alpha * v + (1 - alpha) * self.v
        d, a = m - self.mu, alpha * v / wide
        share = torch.softmax(self.log_overlaps(m, rho, alpha), 0)
        g_m, g_rho = -d / wide, (self.v - v + d.square() * a) / (2 * wide)
        G_m, G_rho = (share * g_m).sum(0), (share * g_rho).sum(0)
        mm = (share * (c * g_m.square() - 1 / wide)).sum(0) - c * G_m.square()
        mr = (share * (c * g_m * g_rho + d * a / wide)).sum(0) - c * G_m * G_rho
        bend = d.square() * a * (1 - 2 * a) / (2 * wide) - v * self.v / (2 * wide.square())
        rr = (share * (c * g_rho.square() + bend)).sum(0) - c * G_rho.square()
        return (G_m, G_rho), (mm, mr, rr)


def _newton(slope: Sequence[Tensor], curve: Sequence[Tensor], rho: Tensor, damping: Tensor) -> tuple[Pair, Tensor]:
    """The step uphill by (damping · Fisher metric − Hessian)⁻¹, and where that matrix is positive definite."""
    (g, k), (mm, mr, rr) = slope, curve
    p, q, r = damping * (-rho).exp() - mm, -mr, damping / 2 - rr
    det = p * r - q * q
    curved = (p > 0) & (det > 0)
    safe = torch.where(curved, det, 1.0)
    reach = 3 * (rho / 2).exp()
    step_m = ((r * g - q * k) / safe).clamp(-reach, reach)
    return (step_m, ((p * k - q * g) / safe).clamp(-1.0, 1.0)), curved


@dataclass(frozen=True, slots=True)
class Personalize(ServerPart):
    """Give each client the barycenter of the fused posterior and its own; all train on from the fused one.

    Attributes:
        chart: where the mean of the two is taken.
        share: what the client's own posterior weighs, from 0 (the fused one) to 1 (its own).
    """

    chart: FusionRule
    share: float
    result: ClassVar[Result] = "apart"

    def __call__(self, state: ServerState, cohort: Cohort, bench: Bench) -> ServerState:
        """The clients' models in client order; the next round begins with the fused one."""
        common = state.single
        fused = ClientUpdate("", common.posterior, 1 - self.share, 0, common.spec)
        mix = MeanIn(self.chart)
        pairs = (Cohort((fused, replace(own, num_examples=self.share))) for own in cohort)
        members = tuple(mix(pair, state, bench).single for pair in pairs)
        return replace(state, model=Apart(members), starts={"": Start(common.spec, common.posterior.mean)})


Share: TypeAlias = Annotated[float, Field(ge=0, le=1)]

# What all these methods say alike of themselves.
_LAST = "The network's last layers are Bayesian; the others take the plain mean."
_OPTIONS = """
    Args:
        last: how many layers, counted from the end, are Bayesian; 0 is FedAvg.
        uniform: weigh every client alike, whatever its number of examples.
        personal: end with a model for each client, its own posterior weighing so much beside the fused one.
        how: how Bayesian layers are made, learned and asked.
    """


def fused_in(rule: FusionRule, last: int, uniform: bool, personal: float, how: Variational) -> Recipe:
    """Bayesian layers fused by a rule; with `personal`, a model for each client between the fused one and its own."""
    steps = (Personalize(rule, personal),) if personal else ()
    return how.recipe(last, MeanIn(rule, uniform=uniform), steps)


def barycenter_in(chart: Chart, paper: str, summary: str, remark: str = "") -> Callable[..., Recipe]:
    """Register the mean in a chart as a method, under the chart's name."""

    def barycenter(
        last: NonNegativeInt = 1, uniform: bool = False, personal: Share = 0.0, how: Variational = USUAL
    ) -> Recipe:
        return fused_in(chart, last, uniform, personal, how)

    barycenter.__name__ = barycenter.__qualname__ = name = chart.name.lower()
    barycenter.__doc__ = "\n".join([summary, "", f"    {_LAST}", *([f"    {remark}"] if remark else []), _OPTIONS])
    return method(name, paper=paper, family="posterior")(barycenter)


eaa = barycenter_in(
    EAA,
    "arXiv:2206.10897",
    "Empirical arithmetic aggregation: the mean of means and of variances, v = Σ f_k v_k.",
)
gaa = barycenter_in(
    GAA,
    "arXiv:2206.10897",
    "Gaussian arithmetic aggregation: the distribution of the weighted sum of independent draws, v = Σ f_k² v_k.",
    "Variances shrink about as 1/clients in every round, so that the network soon is a deterministic one.",
)
aalv = barycenter_in(
    AALV,
    "arXiv:2206.10897",
    "Arithmetic aggregation of log-variances: the mean of means and the geometric mean of variances.",
)
wb = barycenter_in(
    WB,
    "arXiv:2412.11646",
    "The Wasserstein-2 barycenter of the posteriors: standard deviations are averaged, √v = Σ f_k √v_k.",
)
rklb = barycenter_in(
    RKLB,
    "arXiv:2412.11646",
    "The reverse-KL barycenter of the posteriors: 1/v = Σ f_k / v_k and μ = v Σ f_k μ_k / v_k.",
    "A client's say about a weight grows with how sure it is of it.",
)
fklb = barycenter_in(
    FKLB,
    "arXiv:2412.11646",
    "The KL barycenter of the posteriors: the moments of their mixture, v = Σ f_k (v_k + (μ_k − μ)²).",
    "Where clients disagree about a weight the fused posterior is wide.",
)


@method("alpha", paper="arXiv:2412.11646", family="posterior")
def alpha(
    alpha: float = 0.5,
    last: NonNegativeInt = 1,
    uniform: bool = False,
    personal: Share = 0.0,
    how: Variational = USUAL,
) -> Recipe:
    """The Gaussian nearest to the posteriors in α-divergence: from reverse KL (α = 0) over Hellinger (½) to KL (1).

    The network's last layers are Bayesian; the others take the plain mean. The barycenter is found by iteration.

    Args:
        alpha: the order of the divergence; beyond [0, 1] not every set of posteriors has a barycenter.
        last: how many layers, counted from the end, are Bayesian; 0 is FedAvg.
        uniform: weigh every client alike, whatever its number of examples.
        personal: end with a model for each client, its own posterior weighing so much beside the fused one.
        how: how Bayesian layers are made, learned and asked.
    """
    return fused_in(AlphaDivergence(alpha), last, uniform, personal, how)

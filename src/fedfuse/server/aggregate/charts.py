"""Means of diagonal Gaussians: every rule is the plain mean, taken in coordinates of its own.

A chart goes from (mean, variance) to coordinates where the weighted mean is right, and comes back. With weights w
that sum to 1, elementwise and by their published names (arXiv:2412.11646):

| chart | mean | variance | what it is |
|---|---|---|---|
| EAA | Σ w μ | Σ w v | mean of means and variances |
| GAA | Σ w μ | Σ w² v | the Gaussian of the weighted sum of independent draws |
| AALV | Σ w μ | exp Σ w log v | mean of log-variances |
| WB | Σ w μ | (Σ w √v)² | Wasserstein-2 barycenter |
| RKLB | v Σ w μ/v | 1 / Σ (w/v) | reverse-KL barycenter: the product of the beliefs to the powers w |
| FKLB | Σ w μ | Σ w (v + (μ − mean)²) | KL barycenter: the moments of the mixture |

so that v_RKLB ≤ v_AALV ≤ v_WB ≤ v_EAA ≤ v_FKLB, each the next kind of mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from fedfuse.core.messages import ClientUpdate, Cohort
from fedfuse.core.params import Params
from fedfuse.core.posterior import Diag
from fedfuse.core.seams import ServerPart
from fedfuse.core.state import Bench, ServerState
from fedfuse.core.torch_utils import use_large_pages
from fedfuse.errors import ConfigError
from fedfuse.kernels import why_not
from fedfuse.server.aggregate.mean import ALL_LAWS, BLOCK, MIN_COMPILED, exact_weights, is_plain, weighted_mean
from fedfuse.wire.codec import forms_of, piece_of

Pair = tuple[Tensor, Tensor]
_RUN = 5 << 14  # elements fused at a time: long enough to call rarely, short enough that sums stay in cache
_LEAST = 1e-30  # a variance that rounding cannot take below zero
_SAMPLE = 500  # weights per layer whose standard deviations are looked at


class FusionRule(Protocol):
    """How independent Gaussians become one."""

    @property
    def shrinks(self) -> bool:
        """Whether even Gaussians that agree come out narrower."""
        ...

    def __call__(self, means: Sequence[Tensor], logs: Iterable[Tensor], weights: Sequence[float]) -> Pair:
        """The fused mean and log-variance, elementwise in float64; weights are of any positive scale."""
        ...


@dataclass(frozen=True, slots=True, repr=False)
class Chart:
    """Coordinates of Gaussians in which their fusion is a plain mean.

    A Gaussian comes as its mean and ρ = log v, which is how Bayesian layers hold it and the one form from which every
    coordinate is a single exponential away.

    Attributes:
        name: what the papers call it.
        to: (mean, ρ) ↦ coordinates.
        back: coordinates ↦ (mean, uncertainty), in place; the uncertainty is a variance, a deviation or a precision.
        log: uncertainty ↦ ρ, taken in the precision of what came.
        power: the second coordinate is weighed by w^power.
        centered: take coordinates around the first mean, so that squares of means lose no digits.
        compiled: what compiled code calls these coordinates, if it knows them.
    """

    name: str
    to: Callable[[Tensor, Tensor], Pair]
    back: Callable[[Tensor, Tensor], Pair]
    log: Callable[[Tensor], Tensor]
    power: int = 1
    centered: bool = False
    compiled: str = ""

    @property
    def shrinks(self) -> bool:
        """The variance of a mean of independent draws is below theirs."""
        return self.power > 1

    def __call__(self, means: Sequence[Tensor], logs: Iterable[Tensor], weights: Sequence[float]) -> Pair:
        """The mean in this chart, summed in float64; where no Gaussian knows anything the plain mean stays.

        Sums are divided once, at their end, as those of the plain mean are: where the first coordinate is the mean
        itself, it comes out as FedAvg's, bit for bit.
        """
        total = math.fsum(weights)
        origin = _wide(means[0]) if self.centered else None
        first, second = torch.zeros((2, *means[0].shape), dtype=torch.float64, device=means[0].device)
        rho = first
        for m, log, w in zip(means, logs, weights, strict=True):
            rho = _wide(log)
            a, b = self.to(_wide(m) if origin is None else _wide(m) - origin, rho)
            first.add_(a, alpha=w)
            second.add_(b, alpha=w**self.power)
        mean, uncertainty = self.back(first.div_(total), second.div_(total**self.power))
        mean = mean if origin is None else mean + origin
        if bool(mean.sum().isnan()):
            plain = sum((w * m.double() for m, w in zip(means, weights, strict=True)), torch.zeros_like(mean))
            mean = torch.where(mean.isnan(), plain / total, mean)
        return mean, self.log(uncertainty.to(rho.dtype))

    def __repr__(self) -> str:
        return self.name


def _to_variance(m: Tensor, rho: Tensor) -> Pair:
    return m, rho.exp()


def _identity_pair(a: Tensor, b: Tensor) -> Pair:
    return a, b


def _to_deviation(m: Tensor, rho: Tensor) -> Pair:
    return m, rho.mul(0.5).exp_()


def _to_natural(m: Tensor, rho: Tensor) -> Pair:
    precision = rho.neg().exp_()
    return m * precision, precision


def _from_natural(a: Tensor, b: Tensor) -> Pair:
    return a.div_(b), b  # not a number where no Gaussian knows anything


def _to_moments(m: Tensor, rho: Tensor) -> Pair:
    return m, rho.exp().addcmul_(m, m)


def _from_moments(a: Tensor, b: Tensor) -> Pair:
    return a, b.addcmul_(a, a, value=-1).clamp_(min=_LEAST)


def _identity(b: Tensor) -> Tensor:
    return b


def _log_square(b: Tensor) -> Tensor:
    return 2 * b.log()


def _log_reciprocal(b: Tensor) -> Tensor:
    return -b.log()


EAA = Chart("EAA", _to_variance, _identity_pair, torch.log, compiled="VARIANCES")
GAA = Chart("GAA", _to_variance, _identity_pair, torch.log, power=2, compiled="VARIANCES")
AALV = Chart("AALV", _identity_pair, _identity_pair, _identity, compiled="LOGS")
WB = Chart("WB", _to_deviation, _identity_pair, _log_square, compiled="DEVIATIONS")
RKLB = Chart("RKLB", _to_natural, _from_natural, _log_reciprocal, compiled="PRECISIONS")
FKLB = Chart("FKLB", _to_moments, _from_moments, torch.log, centered=True, compiled="MOMENTS")
CHARTS = {chart.name: chart for chart in (EAA, GAA, AALV, WB, RKLB, FKLB)}


def _wide(x: Tensor) -> Tensor:
    """In single precision at least: what is summed up has the digits of what came."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def mean_in(rule: FusionRule, means: Sequence[Tensor], variances: Sequence[Tensor], weights: Sequence[float]) -> Pair:
    """The fused mean and variance of Gaussians N(μ_k, v_k), elementwise in float64.

    Args:
        rule: a chart where the mean is taken, or another rule.
        means: one tensor per Gaussian.
        variances: likewise, above 0; infinite where a Gaussian knows nothing.
        weights: one number each; any positive scale.

    Example:
        >>> mu, v = [torch.tensor(0.0), torch.tensor(2.0)], [torch.tensor(1.0), torch.tensor(0.25)]
        >>> [round(float(t), 4) for t in mean_in(RKLB, mu, v, [1, 1])]
        [1.6, 0.4]
    """
    mean, rho = rule([m.double() for m in means], (v.double().log() for v in variances), weights)
    return mean, rho.exp()


@dataclass(frozen=True, slots=True)
class MeanIn(ServerPart):
    """Fuse diagonal posteriors by the weighted mean in a chart; tensors without variances take the plain one.

    A variance is found in the client's `Diag` geometry, or in the network itself, where a Bayesian layer keeps its
    log-variances with its means. Every tensor is read one block at a time.

    Attributes:
        chart: where the mean is taken.
        source: the evidence that gives the variances; none for networks that hold them.
        damping: precision added to every client's, 1/v + λ: a prior that keeps unknown directions at the plain mean.
        keep: hand the fused variances on, and not the means alone.
        uniform: weigh every client alike, whatever its number of examples.
    """

    chart: FusionRule
    source: str = ""
    damping: float = 0.0
    keep: bool = True
    uniform: bool = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.damping) and self.damping >= 0):
            raise ConfigError(f"a mean in {self.chart}: damping is {self.damping}, expected a number of at least 0")

    @property
    def needs(self) -> frozenset[str]:
        """The evidence that gives the variances."""
        return frozenset({self.source} if self.source else ())

    @property
    def tensorwise(self) -> bool:
        """Where variances come as evidence and go no further; a Bayesian layer has two tensors for one Gaussian."""
        return bool(self.source) and not self.keep

    @property
    def laws(self) -> frozenset[str]:
        """All of them, but that a variance of a sum shrinks however much clients agree."""
        return ALL_LAWS - {"agree"} if self.chart.shrinks else ALL_LAWS

    def __call__(self, cohort: Cohort, state: ServerState, bench: Bench) -> ServerState:  # noqa: ARG002
        """Fuse tensor by tensor; the facts say how wide the posteriors of Bayesian layers are."""
        sources, spec = [u.posterior.mean for u in cohort], cohort.updates[0].spec
        counts = [1.0] * len(cohort) if self.uniform else cohort.num_examples
        exact, total = exact_weights(counts, sources)
        weights = exact.tolist()
        log_variances = {} if self.source else spec.layout.log_variances
        mean: dict[str, Tensor] = {}
        variance: dict[str, Tensor] = {}
        for name in cohort.names:
            if name in log_variances:
                logs = [_LogVariances(s, log_variances[name]) for s in sources]
                mean[name], mean[log_variances[name]] = self._fuse(sources, name, logs, weights, _identity_pair)
            elif all(name in _variances(u) for u in cohort):
                logs = [_LogVariances(_variances(u), name, self.damping) for u in cohort]
                mean[name], variance[name] = self._fuse(sources, name, logs, weights, _to_variance)
            elif name not in log_variances.values():
                mean[name] = weighted_mean(sources, weights, name, total)
        geometry = Diag(variance) if variance and self.keep else None
        fused = state.fused({n: mean[n] for n in cohort.names}, geometry, spec)
        return fused.noting(**deviations(cohort, mean)) if log_variances else fused

    def _fuse(
        self,
        sources: Sequence[Params],
        name: str,
        logs: Sequence[_LogVariances],
        weights: Sequence[float],
        to_output: Callable[[Tensor, Tensor], Pair],
    ) -> Pair:
        """One tensor across clients: its mean and its variance, or log-variance, as `to_output` says, in its dtype."""
        form = forms_of(sources[0])[name]
        if (fused := self._fuse_compiled(sources, name, logs, weights)) is not None:
            return tuple(t.view(form.shape) for t in fused)  # type: ignore[return-value]
        mean, uncertainty = (torch.empty(form.shape, dtype=form.dtype) for _ in range(2))
        # shorter runs where there are very many clients, so that memory does not grow with them
        count, step = mean.numel(), max(1, min(_RUN, BLOCK * 16 // len(sources)))
        for begin, end in ((begin, min(begin + step, count)) for begin in range(0, count, step)):
            mus = [piece_of(source, name, begin, end) for source in sources]
            fused = self.chart(mus, (piece(begin, end) for piece in logs), weights)
            mean.view(-1)[begin:end], uncertainty.view(-1)[begin:end] = to_output(*fused)
        return mean, uncertainty

    def _fuse_compiled(
        self, sources: Sequence[Params], name: str, logs: Sequence[_LogVariances], weights: Sequence[float]
    ) -> Pair | None:
        """Mean and log-variance of one tensor by compiled code; None where it does not know them, or it is too small.

        It is for Bayesian layers, whose log-variances lie with their means.
        """
        count = math.prod(forms_of(sources[0])[name].shape)
        chart = self.chart
        if not isinstance(chart, Chart) or not chart.compiled or logs[0].damping is not None:
            return None
        if 2 * count * len(sources) < MIN_COMPILED or why_not():
            return None
        means = [piece_of(source, name, 0, count) for source in sources]
        rhos = [piece_of(log.params, log.name, 0, count) for log in logs]
        if not all(is_plain(piece, count) for piece in (*means, *rhos)):
            return None
        fused = use_large_pages(torch.empty(count)), use_large_pages(torch.empty(count))
        return fused if _fill_compiled(chart, (means, rhos), weights, fused) else None


def _variances(update: ClientUpdate) -> Params:
    geometry = update.posterior.geometry
    return geometry.variance if isinstance(geometry, Diag) else {}


@dataclass(frozen=True, slots=True)
class _LogVariances:
    """Runs of a client's log-variances: as a Bayesian layer holds them, or of variances with a damped precision."""

    params: Params
    name: str
    damping: float | None = None

    def __call__(self, begin: int, end: int) -> Tensor:
        piece = piece_of(self.params, self.name, begin, end)
        return piece if self.damping is None else -(1 / piece.double() + self.damping).log()


def _fill_compiled(
    chart: Chart, pieces: tuple[list[Tensor], list[Tensor]], weights: Sequence[float], target: Pair
) -> bool:
    """Fill mean and log-variance, a share of them by each thread; whether all numbers were in reach."""
    from fedfuse.kernels import charts

    count = len(target[0])
    if count < charts.LEAST:
        return False
    means, rhos = (np.array([t.data_ptr() for t in side], np.int64) for side in pieces)
    firsts, total = np.array(weights), math.fsum(weights)
    both, totals = (firsts, firsts**chart.power), (total, total**chart.power)
    shares = min(torch.get_num_threads(), max(1, count // BLOCK))
    step = -(-count // shares)

    def fill(begin: int) -> bool:
        mean, logs = (t[begin : begin + step].numpy() for t in target)
        return bool(charts.fuse(getattr(charts, chart.compiled), (means, rhos), both, totals, begin, mean, logs))

    if shares == 1:
        return fill(0)
    with ThreadPoolExecutor(shares) as pool:
        return all(list(pool.map(fill, range(0, count, step))))


def deviations(cohort: Cohort, fused: Params) -> dict[str, Any]:
    """How wide posteriors are: σ's 5th, 50th and 95th percentile per Bayesian layer, and each client's median.

    `sigma_apart` is how far clients differ about one weight: the standard deviation of log σ over clients, averaged
    over weights. About 500 weights of a layer are looked at.
    """
    layout = cohort.updates[0].spec.layout
    sigma, clients, apart = dict[str, Any](), dict[str, Any](), dict[str, float]()
    for layer in layout.layers:
        if (name := layout.log_variances.get(layer.weight)) is None:
            continue
        every = max(1, fused[name].numel() // _SAMPLE)
        sampled = [t.reshape(-1)[::every] for t in (fused[name], *cohort.tensors(name))]
        logs = np.asarray(torch.stack(sampled).cpu().double()) / 2
        apart[layer.name] = float(logs[1:].std(0).mean())
        logs.sort(1)
        ranks = [round(share * (logs.shape[1] - 1)) for share in (0.05, 0.5, 0.95)]
        sigma[layer.name] = dict(zip(("5 %", "50 %", "95 %"), np.exp(logs[0, ranks]).tolist(), strict=True))
        clients[layer.name] = dict(zip(cohort.clients, np.exp(logs[1:, ranks[1]]).tolist(), strict=True))
    return {"sigma": sigma, "sigma_clients": clients, "sigma_apart": apart}

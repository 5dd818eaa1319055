"""The weighted mean of weights, exact to float64 and independent of who answered first."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedfuse.client.evidence.control import walked
from fedfuse.core.messages import Cohort, Form
from fedfuse.core.params import Params
from fedfuse.core.state import Bench, ServerState
from fedfuse.wire.codec import LazyParams

# Elements per block: the float64 accumulator (2 MiB) stays in the second-level cache while clients pass by.
BLOCK = 1 << 18

ALL_LAWS = frozenset({"order", "one", "agree", "scale", "pure", "dtype", "finite", "repeat"})


def weighted_mean(sources: Sequence[Params], weights: Sequence[float] | Tensor, name: str) -> Tensor:
    """Σ_k w_k x_k of one tensor over clients, accumulated in float64 in the given order, in the tensor's own dtype.

    Works block by block, so that beyond the result it needs one block of memory however many clients there are,
    and tensors on disk are never read whole. A counter (whole numbers) takes the largest value instead.

    Example:
        >>> weighted_mean([{"w": torch.tensor([0.0])}, {"w": torch.tensor([4.0])}], [0.25, 0.75], "w")
        tensor([3.])
    """
    form = sources[0].forms[name] if isinstance(sources[0], LazyParams) else Form.of(sources[0][name])
    if not form.dtype.is_floating_point:
        return largest(sources, name)
    out = torch.empty(form.shape, dtype=form.dtype, device=_device(sources[0], name))
    flat, count = out.view(-1), math.prod(form.shape)
    shares = [float(w) for w in weights]
    total = torch.empty(min(BLOCK, count), dtype=torch.float64, device=out.device)
    pieces = [_reader(source, name) for source in sources]
    for begin in range(0, count, BLOCK):
        end = min(begin + BLOCK, count)
        block = total[: end - begin].zero_()
        for piece, share in zip(pieces, shares, strict=True):
            block.add_(piece(begin, end), alpha=share)
        flat[begin:end] = block
    return out


def largest(sources: Sequence[Params], name: str) -> Tensor:
    """The elementwise largest value over clients: how counters are fused."""
    out = sources[0][name].clone()
    for source in sources[1:]:
        torch.maximum(out, source[name], out=out)
    return out


def mean_of(cohort: Cohort, weights: Sequence[float] | Tensor | None = None) -> dict[str, Tensor]:
    """The weighted mean of every tensor; by default each client weighs as its examples."""
    sources = [u.posterior.mean for u in cohort]
    shares = cohort.weights if weights is None else weights
    return {name: weighted_mean(sources, shares, name) for name in cohort.names}


@dataclass(frozen=True, slots=True)
class Mean:
    """FedAvg: w = Σ_k (n_k / n) w_k, the mean where every client's geometry is flat.

    Attributes:
        uniform: weigh every client alike, whatever its number of examples.
    """

    uniform: bool = False
    needs: ClassVar[frozenset[str]] = frozenset()
    laws: ClassVar[frozenset[str]] = ALL_LAWS

    def __call__(self, cohort: Cohort, state: ServerState, bench: Bench) -> ServerState:  # noqa: ARG002
        """Average weights and running statistics; counters take the largest value."""
        weights = torch.full((len(cohort),), 1 / len(cohort), dtype=torch.float64) if self.uniform else None
        return state.fused(mean_of(cohort, weights), spec=cohort.updates[0].spec)


@dataclass(frozen=True, slots=True)
class NormalisedMean:
    """FedNova: average the clients' walks per gradient, then go as far as they went on average.

    w = w₀ − τ_eff Σ_k f_k (w₀ − w_k)/a_k with a_k = `walked`(τ_k, ρ) and τ_eff = Σ_k f_k a_k (Wang et al. 2020).
    With equal a_k this is FedAvg.

    Attributes:
        momentum: ρ of the clients' SGD; None takes it from the run's settings.
    """

    momentum: float | None = None
    needs: ClassVar[frozenset[str]] = frozenset({"start"})
    laws: ClassVar[frozenset[str]] = frozenset({"order", "one", "scale", "pure", "dtype", "finite", "repeat"})

    def __call__(self, cohort: Cohort, state: ServerState, bench: Bench) -> ServerState:
        """Mean of normalised walks, as one weighted mean of the start and the clients."""
        settings = bench.local.optimizer
        own = settings.momentum if settings.name == "sgd" else 0.0
        rho = own if self.momentum is None else self.momentum
        walks = torch.tensor([walked(u.steps, rho) for u in cohort], dtype=torch.float64)
        reach = float((cohort.weights * walks).sum())
        shares = cohort.weights * reach / walks
        roles = state.single.spec.layout.roles
        start, sources = state.single.posterior.mean, [u.posterior.mean for u in cohort]
        stays = torch.cat([1 - shares.sum().reshape(1), shares])
        mean = {
            # statistics are no walk: they are averaged as they are
            n: weighted_mean(sources, cohort.weights, n)
            if roles.get(n) in ("statistic", "counter")
            else weighted_mean([start, *sources], stays, n)
            for n in cohort.names
        }
        return state.fused(mean, spec=cohort.updates[0].spec).noting(effective_steps=reach)


def _device(source: Params, name: str) -> torch.device:
    return torch.device("cpu") if isinstance(source, LazyParams) else source[name].device


def _reader(source: Params, name: str) -> Callable[[int, int], Tensor]:
    """How to get a run of a tensor's elements."""
    if isinstance(source, LazyParams):
        return lambda begin, end: source.piece(name, begin, end)
    flat = source[name].detach().reshape(-1)
    return lambda begin, end: flat[begin:end]

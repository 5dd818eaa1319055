"""Partitioned variational inference at a client: its own factor of the common posterior, and what is left without it.

The common posterior is q = p Π_k t_k, one factor for every client's rows. A client keeps the natural parameters of its
own, and learns with the cavity q / t_k as its prior: what the others and the prior say.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fedfuse.core.params import Params
from fedfuse.core.precision import in_full
from fedfuse.core.state import Local, with_kind
from fedfuse.models.bayes import Factor, factors, prior_log_variance

_PRECISION, _SHIFT = "factor_precision", "factor_shift"
_LEAST = 1e-2  # a cavity keeps at least this share of the posterior's precision


class NaturalParameters(NamedTuple):
    """A Gaussian's natural parameters, in float64: precision 1/v and shift μ/v."""

    precision: Tensor
    shift: Tensor

    @classmethod
    def of(cls, mean: Tensor, log_variance: Tensor) -> NaturalParameters:
        """Of a mean and log v."""
        precision = (-log_variance.detach().double()).exp()
        return cls(precision, precision * mean.detach().double())


def posterior_before(local: Local) -> dict[str, Factor]:
    """Every Gaussian that the round began with, by name."""
    return {factor.name: factor for factor in factors(local.frozen("before", local.brief.params))}


def common_posterior(local: Local, scale: float) -> dict[str, NaturalParameters]:
    """What all believe before the round: at first the prior N(start, scale²/fan-in), then the fused posterior."""
    return {name: _belief_before(factor, local.brief.round, scale) for name, factor in posterior_before(local).items()}


def _belief_before(factor: Factor, round_: int, scale: float) -> NaturalParameters:
    usual = torch.full_like(factor.log_variance, prior_log_variance(factor.fan_in, scale))
    return NaturalParameters.of(factor.mean, factor.log_variance if round_ else usual)


def cavity(local: Local, scale: float) -> dict[str, tuple[Tensor, Tensor]]:
    """Mean and log-variance of the common posterior without this client's own factor, q / t_k.

    Where a factor takes nearly all of the precision, the cavity keeps a hundredth of it around the same mean.
    """
    precisions, shifts = local.recall(_PRECISION), local.recall(_SHIFT)
    kinds = {factor.name: in_full(factor.mean).dtype for factor in factors(local.module)}
    found = {}
    for name, (precision, shift) in common_posterior(local, scale).items():
        left = precision - precisions[name] if name in precisions else precision
        rest = shift - shifts[name] if name in shifts else shift
        narrow = left < _LEAST * precision
        left = torch.where(narrow, _LEAST * precision, left)
        mean = torch.where(narrow, shift / precision, rest / left)
        found[name] = mean.to(kinds[name]), -left.log().to(kinds[name])
    return found


@dataclass(frozen=True, slots=True)
class KeepFactor:
    """What a client of partitioned variational inference keeps: t_k ← t_k (q_k / q)^damping, in natural parameters."""

    scale: float
    damping: float

    def __call__(self, local: Local, notes: Params) -> Params:  # noqa: ARG002 - the seam's signature
        """The client's own factor after this round: its precision and shift beside every mean."""
        before, precisions, shifts = common_posterior(local, self.scale), local.recall(_PRECISION), local.recall(_SHIFT)
        kept: dict[str, dict[str, Tensor]] = {_PRECISION: {}, _SHIFT: {}}
        nothing = torch.zeros((), dtype=torch.float64)
        for factor in factors(local.module):
            own, old = NaturalParameters.of(factor.mean, factor.log_variance), before[factor.name]
            moved = own.precision - old.precision, own.shift - old.shift
            for kind, known, step in zip(kept, (precisions, shifts), moved, strict=True):
                kept[kind][factor.name] = known.get(factor.name, nothing) + self.damping * step
        return with_kind(_PRECISION, kept[_PRECISION]) | with_kind(_SHIFT, kept[_SHIFT])

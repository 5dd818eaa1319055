"""The objective of Bayesian layers: fit the rows, and stay near the prior."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor
from torch.autograd.function import once_differentiable

from fedfuse.core.params import Params
from fedfuse.core.recipe import Recipe
from fedfuse.core.seams import Aggregator, Batch, Objective, ServerStep, TaskLoss
from fedfuse.core.settings import Settings
from fedfuse.core.state import EXAMPLES, Local, with_kind
from fedfuse.core.torch_utils import in_full
from fedfuse.errors import RecipeError
from fedfuse.models.bayes import BayesianLayers, Factor, factors, factors_of, mean_fields, prior_log_variance
from fedfuse.training.pulls import Pull

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


Prior = Literal["start", "fan-in", "standard", "global", "cavity"]
Choice = Literal["start", "fan-in", "standard", "global"]
Weight = NonNegativeFloat | Literal["share"]


class Variational(Settings):
    """How Bayesian layers are made, learned and asked.

    Attributes:
        layers: names of the layers to make Bayesian, in place of the last ones.
        log_variance: log σ² every weight starts with; by default σ is a twentieth of 1/√fan-in.
        bias: whether biases are Gaussians too.
        prior: "start" is N(m, scale²/fan-in) around the means m that a round starts from, "fan-in" the same around 0,
            "standard" is N(0, scale²) as published, "global" from the second round on the posterior it starts from.
        scale: standard deviation of the prior, in the units that it names.
        kl: "share" divides KL by the number of examples of all clients, so that the prior is counted once; a number
            is the weight of KL divided by the client's own examples (1 as published), and 0 leaves the loss alone.
        noise: false trains and predicts at the means, a control.
        released: start as the released code does, log σ² at −9 and clamped to [−8, 8], so that it never learns.
        predict_draws: networks drawn to predict; the rounds before the last are scored with ten.
    """

    layers: tuple[str, ...] = ()
    log_variance: float | None = None
    bias: bool = False
    prior: Choice = "start"
    scale: PositiveFloat = 1.0
    kl: Weight = "share"
    noise: bool = True
    released: bool = False
    predict_draws: PositiveInt = 100

    def recipe(self, last: int, aggregate: Aggregator, steps: tuple[ServerStep, ...] = ()) -> Recipe:
        """Bayesian layers, their objective, and how they are fused; without such layers, plain training."""
        if last == 0 and not self.layers:
            return Recipe(aggregate=aggregate, steps=steps)
        return Recipe(
            objective=Elbo(self.kl, self.prior, self.scale),
            aggregate=aggregate,
            steps=steps,
            prepare_model=self.prepare(last),
            publishes=(EXAMPLES,) if self.kl == "share" else (),
        )

    def prepare(self, last: int) -> BayesianLayers:
        """What makes the layers Bayesian."""
        return BayesianLayers(
            last, self.layers, self.log_variance, self.bias, self.noise, self.released, self.predict_draws
        )


USUAL = Variational()


@dataclass(frozen=True, slots=True)
class Elbo:
    """The negative evidence lower bound per row: base + κ · KL(q ‖ prior) / n_k (eq. 3, divided by the n_k rows).

    With kl = "share", κ = n_k/n is the client's share of all n examples, so that KL is divided by n. Then the
    reverse-KL barycenter with these very shares is the posterior of all rows where that is Gaussian: a client's
    precision is P₀ + Λ_k/κ_k, and Σ κ_k (P₀ + Λ_k/κ_k) = P₀ + Σ Λ_k. A client that is not told n takes its own n_k.

    The base loss is that of one draw of the noise per example. With diagonal Gaussians KL is closed:
    ½ Σ (σ² + (μ − m)²) / s² − 1 − log(σ²/s²), the prior being N(m, s²).
    """

    kl: float | Literal["share"] = 1.0
    prior: Prior = "standard"
    scale: float = 1.0
    base: Objective = field(default_factory=TaskLoss)

    def __call__(self, local: Local, batch: Batch) -> Tensor:
        """The base loss and the pull of the prior."""
        loss = self.base(local, batch)
        return loss if self.kl == 0 else loss + self._weight(local) * self.divergence(local)

    def pull(self, local: Local) -> Pull | None:
        """The divergence as a pull of the task's loss; None where the base is another one."""
        if type(self.base) is not TaskLoss:
            return None
        if self.kl == 0:
            return Pull()
        priors = {f.name: self._prior(local, f) for f in factors_of(mean_fields(local.module))}
        return Pull(kl=self._weight(local), priors=priors) if priors else None

    def _weight(self, local: Local) -> float:
        """What KL is multiplied by: κ / n_k."""
        return 1 / local.all_examples if self.kl == "share" else self.kl / len(local.rows)

    def divergence(self, local: Local) -> Tensor:
        """KL of all Bayesian weights from their prior."""
        layers = local.once("elbo/layers", lambda client: mean_fields(client.module))
        parts = [kl_diagonal(f.mean, f.log_variance, *self._prior(local, f)) for f in factors_of(layers)]
        if not parts:
            raise RecipeError("the evidence lower bound needs Bayesian layers and the network has none; use last ≥ 1")
        return torch.stack(parts).sum()

    def _prior(self, local: Local, factor: Factor) -> tuple[Tensor | float, Tensor | float]:
        """Mean and log-variance of one tensor's prior."""
        if self.prior == "standard":
            return 0.0, 2 * math.log(self.scale)
        usual = prior_log_variance(factor.fan_in, self.scale)
        if self.prior == "fan-in":
            return 0.0, usual
        if self.prior == "cavity":
            return local.once("elbo/cavity", lambda client: cavity(client, self.scale))[factor.name]
        before = local.once("elbo/before", posterior_before)[factor.name]
        if self.prior == "global":  # nobody believes in the random start
            return (before.mean, before.log_variance) if local.brief.round else (0.0, 2 * math.log(self.scale))
        return before.mean, usual


def kl_diagonal(mean: Tensor, log_variance: Tensor, m: Tensor | float, log_v: Tensor | float) -> Tensor:
    """KL(N(mean, e^log_variance) ‖ N(m, e^log_v)) summed over all elements, in their own dtype or float32.

    Example:
        >>> kl_diagonal(torch.tensor([2.0]), torch.zeros(1), 0.0, 0.0)
        tensor(2.)
    """
    return _DiagonalDivergence.apply(in_full(mean), in_full(log_variance), m, log_v)  # type: ignore[no-any-return,no-untyped-call]


class _DiagonalDivergence(torch.autograd.Function):
    """The sum of `kl_diagonal` with its slopes in closed form: a third of the operations, in every step."""

    @staticmethod
    def forward(ctx: Any, mean: Tensor, log_variance: Tensor, m: Tensor | float, log_v: Tensor | float) -> Tensor:
        """Σ ½ (e^gap − 1 − gap) + ½ (mean − m)² e^−log_v, where the gap is of log-variances."""
        gap, precision = log_variance - log_v, (-torch.as_tensor(log_v, dtype=mean.dtype)).exp()
        wider, apart = gap.exp().sub_(1), mean - m
        pull = apart * precision
        ctx.save_for_backward(wider, pull)
        return ((wider - gap).sum() + torch.dot(apart.reshape(-1), pull.reshape(-1))) / 2

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """(mean − m) e^−log_v and ½ (e^gap − 1); the prior is given."""
        wider, pull = ctx.saved_tensors
        return pull * grad, wider * (grad / 2), None, None

"""Mean-field variational inference at a client: the objective of Bayesian layers, and the options methods share for it.

`Elbo` is the loss, `kl_diagonal` its closed-form part, `Variational` what a method lets its user choose.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor
from torch.autograd.function import once_differentiable

from fedfuse.core.recipe import Recipe
from fedfuse.core.seams import Aggregator, Batch, Objective, ServerStep, TaskLoss
from fedfuse.core.settings import Settings
from fedfuse.core.state import EXAMPLES, Local
from fedfuse.core.torch_utils import in_full
from fedfuse.errors import RecipeError
from fedfuse.models.bayes import BayesianLayers, Factor, factors, factors_of, mean_fields, prior_log_variance
from fedfuse.training.pulls import Pull

Prior: TypeAlias = Literal["start", "fan-in", "standard", "global"]
MeanAndLogVariance: TypeAlias = tuple[Tensor | float, Tensor | float]
OwnPrior: TypeAlias = Callable[[Local], Mapping[str, MeanAndLogVariance]]
"""A client's own prior: the mean and log-variance of every Gaussian tensor by name."""


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
    prior: Prior | OwnPrior = "standard"
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

    def divergence(self, local: Local) -> Tensor:
        """KL of all Bayesian weights from their prior."""
        layers = local.once("elbo/layers", lambda client: mean_fields(client.module))
        parts = [kl_diagonal(f.mean, f.log_variance, *self._prior(local, f)) for f in factors_of(layers)]
        if not parts:
            raise RecipeError("the evidence lower bound needs Bayesian layers and the network has none; use last ≥ 1")
        return torch.stack(parts).sum()

    def _weight(self, local: Local) -> float:
        """What KL is multiplied by: κ / n_k."""
        return 1 / local.all_examples if self.kl == "share" else self.kl / len(local.rows)

    def _prior(self, local: Local, factor: Factor) -> MeanAndLogVariance:
        """Mean and log-variance of one tensor's prior."""
        if not isinstance(self.prior, str):
            return local.once("elbo/own prior", self.prior)[factor.name]
        standard = 0.0, 2 * math.log(self.scale)
        if self.prior == "standard":
            return standard
        usual = prior_log_variance(factor.fan_in, self.scale)
        if self.prior == "fan-in":
            return 0.0, usual
        before = local.once("elbo/before", posterior_before)[factor.name]
        if self.prior == "start":
            return before.mean, usual
        # "global": the first round begins at random weights, which are no posterior of any rows
        return (before.mean, before.log_variance) if local.brief.round else standard


def posterior_before(local: Local) -> dict[str, Factor]:
    """Every Gaussian that the round began with, by name."""
    return {factor.name: factor for factor in factors(local.frozen("before", local.brief.params))}


def kl_diagonal(mean: Tensor, log_variance: Tensor, m: Tensor | float, log_v: Tensor | float) -> Tensor:
    """KL(N(mean, e^log_variance) ‖ N(m, e^log_v)) summed over all elements, in their own dtype or float32.

    Example:
        >>> kl_diagonal(torch.tensor([2.0]), torch.zeros(1), 0.0, 0.0)
        tensor(2.)
    """
    return _DiagonalDivergence.apply(in_full(mean), in_full(log_variance), m, log_v)  # type: ignore[no-any-return,no-untyped-call]


class _DiagonalDivergence(torch.autograd.Function):
    """The sum of `kl_diagonal` with its slopes in closed form: a third of autograd's operations, in every step."""

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
    prior: Prior = "start"
    scale: PositiveFloat = 1.0
    kl: NonNegativeFloat | Literal["share"] = "share"
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
            prepare_model=BayesianLayers(
                last, self.layers, self.log_variance, self.bias, self.noise, self.released, self.predict_draws
            ),
            publishes=(EXAMPLES,) if self.kl == "share" else (),
        )


USUAL = Variational()

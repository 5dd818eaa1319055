"""The objective of Bayesian layers: fit the rows, and stay near the prior."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

import torch
from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor

from fedfuse.core.precision import in_full
from fedfuse.core.recipe import Recipe
from fedfuse.core.seams import Aggregator, Batch, Objective, TaskLoss
from fedfuse.core.settings import Settings
from fedfuse.core.state import Local
from fedfuse.errors import RecipeError
from fedfuse.models.bayes import BayesianLayers, factors

Prior = Literal["standard", "global"]


class Variational(Settings):
    """How Bayesian layers are made, learned and asked.

    Attributes:
        layers: names of the layers to make Bayesian, in place of the last ones.
        log_variance: log σ² every weight starts with.
        bias: whether biases are Gaussians too.
        prior: "standard" is N(0, scale²) in every round, "global" from the second round on the fused posterior.
        scale: standard deviation of the standard prior.
        kl: weight of KL / n in the loss; 0 leaves the loss alone.
        noise: false trains and predicts at the means, a control.
        released: start as the released code does, log σ² at −9 and clamped to [−8, 8], so that it never learns.
        draws: networks drawn to predict.
    """

    layers: tuple[str, ...] = ()
    log_variance: float = -6.0
    bias: bool = False
    prior: Prior = "standard"
    scale: PositiveFloat = 1.0
    kl: NonNegativeFloat = 0.1
    noise: bool = True
    released: bool = False
    draws: PositiveInt = 10

    def recipe(self, last: int, aggregate: Aggregator) -> Recipe:
        """Bayesian layers, their objective, and how they are fused; without such layers, plain training."""
        if last == 0 and not self.layers:
            return Recipe(aggregate=aggregate)
        return Recipe(
            objective=Elbo(self.kl, self.prior, self.scale), aggregate=aggregate, prepare_model=self._prepare(last)
        )

    def _prepare(self, last: int) -> BayesianLayers:
        return BayesianLayers(last, self.layers, self.log_variance, self.bias, self.noise, self.released, self.draws)


USUAL = Variational()


@dataclass(frozen=True, slots=True)
class Elbo:
    """The negative evidence lower bound per row: base + kl · KL(q ‖ prior) / n (eq. 3, divided by the n rows).

    The base loss is that of one draw of the noise per example. With diagonal Gaussians KL is closed:
    ½ Σ (σ² + (μ − m)²) / s² − 1 − log(σ²/s²), the prior N(m, s²) being N(0, scale²) or, from the second round on, the
    posterior that the round began with.
    """

    kl: float = 1.0
    prior: Prior = "standard"
    scale: float = 1.0
    base: Objective = field(default_factory=TaskLoss)

    def __call__(self, local: Local, batch: Batch) -> Tensor:
        """The base loss and the pull of the prior."""
        loss = self.base(local, batch)
        return loss if self.kl == 0 else loss + self.kl / len(local.rows) * self.divergence(local)

    def divergence(self, local: Local) -> Tensor:
        """KL of all Bayesian weights from their prior."""
        parts = [
            kl_diagonal(mean, log_variance, *self._prior(local, name))
            for name, mean, log_variance in factors(local.module)
        ]
        if not parts:
            raise RecipeError("the evidence lower bound needs Bayesian layers and the network has none; use last ≥ 1")
        return torch.stack(parts).sum()

    def _prior(self, local: Local, name: str) -> tuple[Tensor | float, Tensor | float]:
        """Mean and log-variance of one tensor's prior."""
        if self.prior == "standard" or local.brief.round == 0:  # nobody believes in the random start
            return 0.0, 2 * math.log(self.scale)
        return local.once("elbo/prior", _posterior_before)[name]


def kl_diagonal(mean: Tensor, log_variance: Tensor, m: Tensor | float, log_v: Tensor | float) -> Tensor:
    """KL(N(mean, e^log_variance) ‖ N(m, e^log_v)) summed over all elements, in their own dtype or float32.

    Example:
        >>> kl_diagonal(torch.tensor([2.0]), torch.zeros(1), 0.0, 0.0)
        tensor(2.)
    """
    mean, log_variance = in_full(mean), in_full(log_variance)
    gap = log_variance - log_v
    away = (mean - m).square() * (-torch.as_tensor(log_v)).exp()
    return (gap.exp() + away - 1 - gap).sum() / 2


def _posterior_before(local: Local) -> dict[str, tuple[Tensor, Tensor]]:
    """Mean and log-variance, as its layer sees it, of every Gaussian the round began with."""
    start = local.frozen("before", local.brief.params)
    return {name: (mean, log_variance) for name, mean, log_variance in factors(start)}

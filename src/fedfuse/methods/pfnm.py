"""Yurochkin et al., Bayesian Nonparametric Federated Learning of Neural Networks, ICML 2019."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from pydantic import Field, PositiveFloat, PositiveInt

from fedfuse.client.evidence.counts import LabelCounts
from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import method
from fedfuse.linalg.atoms import Odds
from fedfuse.server.aggregate.chain import Matcher, VarianceScale
from fedfuse.server.aggregate.matched import MatchedUnits

Choices: TypeAlias = Annotated[tuple[PositiveFloat, ...], Field(min_length=1)]


@method("pfnm", paper="arXiv:1905.12022", family="matched")
def pfnm(
    gamma: Choices = (1.0, 1e-3, 50.0),
    variance: Choices = (1.0, 0.1, 0.5),
    prior_variance: Choices = (1.0, 10.0),
    bias_mean: float = 0.1,
    sweeps: PositiveInt = 5,
    shrink: bool = True,
    odds: Odds = "exact",
    scale: VarianceScale = "absolute",
) -> Recipe:
    """Match the hidden units of fully connected networks; the common network grows as wide as they differ.

    Every client's unit is a noisy copy of a common one, and a Beta–Bernoulli process says how many of those there are.
    The best choice of hyper-parameters on the server's rows is taken; without such rows the first of each.

    Args:
        gamma: masses of the process to choose from; more makes wider networks.
        variance: choices of σ², how far a client's unit is from the common one.
        prior_variance: choices of σ₀², how far common units are from the prior's mean.
        bias_mean: the prior's mean of biases; that of weights is zero.
        sweeps: how often every client is matched again, at most.
        shrink: take the most probable units, m/(m + σ²/σ₀²) of the mean of m clients' copies; else the mean itself.
        odds: weigh a unit's popularity by 2 log(m/(J − m)), as derived ("exact"), or half as much ("released").
        scale: take variances as they are, or as multiples of the mean square of a layer's weights ("layer").
    """
    matcher = Matcher(bias_mean=bias_mean, sweeps=sweeps, shrink=shrink, odds=odds, scale=scale)
    return Recipe(evidence=(LabelCounts(),), aggregate=MatchedUnits(gamma, variance, prior_variance, matcher))

"""Wang et al., Federated Learning with Matched Averaging, ICLR 2020."""

from __future__ import annotations

from pydantic import PositiveFloat, PositiveInt

from fedfuse.client.evidence.counts import LabelCounts
from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import method
from fedfuse.linalg.atoms import Odds
from fedfuse.server.aggregate.chain import Matcher, VarianceScale
from fedfuse.server.aggregate.layerwise import MatchedLayers


@method("fedma", paper="arXiv:2002.06440", family="matched")
def fedma(
    gamma: PositiveFloat = 7.0,
    variance: PositiveFloat = 1.0,
    prior_variance: PositiveFloat = 1.0,
    bias_mean: float = 0.1,
    sweeps: PositiveInt = 5,
    shrink: bool = True,
    odds: Odds = "exact",
    scale: VarianceScale = "absolute",
) -> Recipe:
    """Match hidden units layer by layer from the inputs on; between two layers clients train what comes after.

    In every exchange one more hidden layer is settled: clients hold it and all before it. The last layer is averaged,
    class by class, by the clients' shares of each class. A network of H hidden layers takes H + 1 rounds for a pass,
    and further passes start from the units each client takes part in; with rounds = 1 all layers are matched at once.

    Args:
        gamma: mass of the process; more makes wider networks.
        variance: σ², how far a client's unit is from the common one.
        prior_variance: σ₀², how far common units are from the prior's mean.
        bias_mean: the prior's mean of biases; that of weights is zero.
        sweeps: how often every client is matched again, at most.
        shrink: take the most probable units, m/(m + σ²/σ₀²) of the mean of m clients' copies; else the mean itself.
            Before a norm, which undoes any scale, it is always the mean.
        odds: weigh a unit's popularity by 2 log(m/(J − m)), as derived ("exact"), or half as much ("released").
        scale: take variances as they are, or as multiples of the mean square of a layer's weights ("layer").
    """
    matcher = Matcher(gamma, variance, prior_variance, bias_mean, sweeps, shrink, odds, scale)
    return Recipe(evidence=(LabelCounts(),), aggregate=MatchedLayers(matcher), publishes=("held",))

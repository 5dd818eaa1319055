"""Zhang et al., Validating the Lottery Ticket Hypothesis with Inertial Manifold Theory, NeurIPS 2021."""

from __future__ import annotations

from pydantic import PositiveInt

from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import method
from fedfuse.methods._pruning import RATES, Rates
from fedfuse.server.aggregate.mean import Mean
from fedfuse.server.steps.mask import MagnitudeMask
from fedfuse.training.pulls import Masked


@method(
    "imc", paper="Validating the Lottery Ticket Hypothesis with Inertial Manifold Theory, NeurIPS 2021", family="pruned"
)
def imc(every: PositiveInt = 10, times: PositiveInt = 3, rates: Rates = RATES) -> Recipe:
    """FedAvg that masks the smallest weights in several steps, towards the rate that the curvature's spectrum suggests.

    The rate is FedAP's, found at the first step; the masks are unstructured: messages shrink as a sparse encoding
    would, training gets no faster.

    Args:
        every: rounds between two prunings.
        times: prunings in all; each leaves the same share of what is left.
        rates: when the first one comes, and how the rate is found.
    """
    mask = MagnitudeMask(rates.at - 1, every, times, rates.expected_rate())
    return Recipe(evidence=rates.evidence, aggregate=Mean(), steps=(mask,), project=Masked(), publishes=("mask",))

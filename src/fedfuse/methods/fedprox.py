"""Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020."""

from __future__ import annotations

from pydantic import NonNegativeFloat

from fedfuse.client.objectives import Proximal
from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import method
from fedfuse.server.aggregate.mean import Mean


@method("fedprox", paper="arXiv:1812.06127")
def fedprox(mu: NonNegativeFloat = 0.01) -> Recipe:
    """FedAvg whose clients are pulled towards the global model: loss + μ/2 ‖w − w_global‖².

    Args:
        mu: the strength of the pull; 0 is FedAvg.
    """
    return Recipe(objective=Proximal(mu), aggregate=Mean())

"""Li et al., Model-Contrastive Federated Learning, CVPR 2021."""

from __future__ import annotations

from pydantic import NonNegativeFloat, PositiveFloat

from fedfuse.client.objectives import Contrastive, KeepModel
from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import method
from fedfuse.server.aggregate.mean import Mean


@method("moon", paper="arXiv:2103.16257")
def moon(mu: NonNegativeFloat = 1.0, temperature: PositiveFloat = 0.5) -> Recipe:
    """FedAvg whose clients keep their representations near the global model's and away from their last own.

    The representation is the input of the network's last linear layer; give the model a projection head
    (`head = 256`) for the published form. In a client's first round the term is exactly zero.

    Args:
        mu: the weight of the contrastive term.
        temperature: T of the contrast.
    """
    return Recipe(objective=Contrastive(mu, temperature), memory=(KeepModel(),), aggregate=Mean())

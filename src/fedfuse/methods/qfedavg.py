"""Li et al., Fair Resource Allocation in Federated Learning, ICLR 2020."""

from __future__ import annotations

from pydantic import NonNegativeFloat

from fedfuse.client.evidence.loss import StartLoss
from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import method
from fedfuse.server.aggregate.fair import FairMean


@method("qfedavg", paper="arXiv:1905.10497")
def qfedavg(q: NonNegativeFloat = 0.2) -> Recipe:
    """Clients on which the global model does worse weigh more, by the q-th power of their loss.

    Args:
        q: 0 is the plain mean with equal weights; large values serve the worst client.
    """
    return Recipe(evidence=(StartLoss(),), aggregate=FairMean(q))

"""Zhang et al., FedDUAP: Federated Learning with Dynamic Update and Adaptive Pruning, IJCAI 2022."""

from __future__ import annotations

from fedfuse.client.evidence.counts import LabelCounts
from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import method
from fedfuse.methods._pruning import RANKING, RATES, Ranking, Rates
from fedfuse.server.aggregate.mean import Mean
from fedfuse.server.steps.dynamic import USUAL, ServerUpdate
from fedfuse.server.steps.prune import Prune


@method("fedduap", paper="arXiv:2204.11536")
def fedduap(update: ServerUpdate = USUAL, rates: Rates = RATES, ranking: Ranking = RANKING) -> Recipe:
    """FedDU in every round, and FedAP once: steps on the server's own rows, then a smaller network for everybody.

    Args:
        update: how the server walks.
        rates: when and how much is pruned.
        ranking: which filters stay.
    """
    prune = Prune(rates.at - 1, rates.expected(), "magnitude", ranking.images, ranking.tolerance)
    evidence = rates.evidence or (LabelCounts(),)
    return Recipe(evidence=evidence, aggregate=Mean(), steps=(update.step(), prune))

"""Zhang et al., FedDUAP: Federated Learning with Dynamic Update and Adaptive Pruning, IJCAI 2022."""

from __future__ import annotations

from fedfuse.client.evidence.counts import LabelCounts
from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import method
from fedfuse.methods._pruning import RANKING, RATES, FilterRanking, Rates
from fedfuse.server.aggregate.mean import Mean
from fedfuse.server.steps.dynamic import USUAL, ServerUpdate


@method("fedduap", paper="arXiv:2204.11536", family="pruned")
def fedduap(update: ServerUpdate = USUAL, rates: Rates = RATES, ranking: FilterRanking = RANKING) -> Recipe:
    """FedDU in every round, and FedAP once: steps on the server's own rows, then a smaller network for everybody.

    Args:
        update: how the server walks.
        rates: when and how much is pruned.
        ranking: which filters stay.
    """
    prune = ranking.step(rates.at - 1, rates.expected_rate(), "magnitude")
    evidence = rates.evidence or (LabelCounts(),)
    return Recipe(evidence=evidence, aggregate=Mean(), steps=(update.step(), prune))

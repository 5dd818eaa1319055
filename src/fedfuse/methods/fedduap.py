"""Zhang et al., FedDUAP: Federated Learning with Dynamic Update and Adaptive Pruning, IJCAI 2022."""

from __future__ import annotations

from fedfuse.client.evidence.counts import LabelCounts
from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import method
from fedfuse.server.aggregate.mean import Mean
from fedfuse.server.steps.dynamic import USUAL as UPDATE
from fedfuse.server.steps.dynamic import ServerUpdate
from fedfuse.server.steps.prune import USUAL as PRUNING
from fedfuse.server.steps.prune import Pruning


@method("fedduap", paper="arXiv:2204.11536")
def fedduap(update: ServerUpdate = UPDATE, pruning: Pruning = PRUNING) -> Recipe:
    """FedDU in every round, and FedAP once: steps on the server's own rows, then a smaller network for everybody.

    Args:
        update: how the server walks.
        pruning: when and how much is pruned.
    """
    evidence = pruning.evidence or (LabelCounts(),)
    return Recipe(evidence=evidence, aggregate=Mean(), steps=(update.step(), pruning.step()))

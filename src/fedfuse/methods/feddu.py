"""Zhang et al., FedDUAP: Federated Learning with Dynamic Update and Adaptive Pruning, IJCAI 2022: the update."""

from __future__ import annotations

from fedfuse.client.evidence.counts import LabelCounts
from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import method
from fedfuse.server.aggregate.mean import Mean
from fedfuse.server.steps.dynamic import USUAL, ServerUpdate


@method("feddu", paper="arXiv:2204.11536", family="server rows")
def feddu(update: ServerUpdate = USUAL) -> Recipe:
    """FedAvg, then some steps on the server's own rows: many while the model is poor and the cohort one-sided.

    The server trains the mean w on its rows to w_s and goes the part α = f′(acc) · n₀ D(P̄) / (n₀ D(P̄) + n′ D(P₀)) ·
    C · decayᵗ of the way. D is the Jensen–Shannon divergence of the cohort's and of the server's labels from those of
    all clients, which is why clients tell how many rows of each class they have.

    Args:
        update: how the server walks.
    """
    return Recipe(evidence=(LabelCounts(),), aggregate=Mean(), steps=(update.step(),))

"""Zhang et al., FedDUAP: Federated Learning with Dynamic Update and Adaptive Pruning, IJCAI 2022: the pruning."""

from __future__ import annotations

from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import method
from fedfuse.methods._pruning import RANKING, RATES, FilterRanking, Rates
from fedfuse.server.aggregate.mean import Mean


@method("fedap", paper="arXiv:2204.11536", family="pruned")
def fedap(rates: Rates = RATES, ranking: FilterRanking = RANKING) -> Recipe:
    """FedAvg that removes channels once, at a rate that everybody's curvature suggests and each layer's weights adapt.

    Every client of the round, and the server, reads a rate off the spectrum of its Hessian; they are averaged by
    n_k / (D(P_k) + ε) (eq. 6). The share of a layer's weights below the global magnitude threshold is its own rate,
    and the filters with the lowest feature-map ranks on the server's rows go. From the next round on clients train
    the smaller network.

    Args:
        rates: when and how much.
        ranking: which filters stay.
    """
    step = ranking.step(rates.at - 1, rates.expected_rate(), "magnitude")
    return Recipe(evidence=rates.evidence, aggregate=Mean(), steps=(step,))

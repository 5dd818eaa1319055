"""Yoshida et al., Hybrid-FL for Wireless Networks: Cooperative Learning Mechanism Using Non-IID Data, ICC 2020."""

from __future__ import annotations

from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import method
from fedfuse.server.aggregate.mean import Mean
from fedfuse.server.roster import WithServer


@method("hybrid_fl", paper="arXiv:1905.07210", family="server rows")
def hybrid_fl() -> Recipe:
    """FedAvg in which the server trains on its own rows as one more client, in every round.

    Its model weighs as many examples as it has, so a server with as many rows as the chosen clients together makes
    half of every mean, whatever its labels are.
    """
    return Recipe(aggregate=Mean(), roster=WithServer())

"""Wang et al., Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization, NeurIPS 2020."""

from __future__ import annotations

from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import method
from fedfuse.server.aggregate.normalized import NormalizedMean


@method("fednova", paper="arXiv:2007.07481")
def fednova(momentum: float | None = None) -> Recipe:
    """Average the clients' walks per local step, so that those who step more do not pull harder.

    Args:
        momentum: the clients' SGD momentum; by default the run's own.
    """
    return Recipe(aggregate=NormalizedMean(momentum))

"""McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017."""

from __future__ import annotations

from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import method
from fedfuse.server.aggregate.mean import Mean


@method("fedavg", paper="arXiv:1602.05629")
def fedavg(uniform: bool = False) -> Recipe:
    """Average the clients' weights by their number of examples.

    Args:
        uniform: weigh every client alike.
    """
    return Recipe(aggregate=Mean(uniform))

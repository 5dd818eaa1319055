"""Yadav et al., TIES-Merging: Resolving Interference When Merging Models, NeurIPS 2023."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import method
from fedfuse.server.aggregate.sparse import TrimElectMerge


@method("ties", paper="arXiv:2306.01708", family="base")
def ties(density: Annotated[float, Field(gt=0, le=1)] = 0.2, scale: float = 1.0) -> Recipe:
    """Keep each client's largest moves, elect a sign for every weight, and average the moves that agree with it.

    Args:
        density: the share of each tensor's coordinates that a client keeps.
        scale: λ, what the merged move is multiplied by.
    """
    return Recipe(aggregate=TrimElectMerge(density, scale))

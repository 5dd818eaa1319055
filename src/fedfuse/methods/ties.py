"""Yadav et al., TIES-Merging: Resolving Interference When Merging Models, NeurIPS 2023."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import method
from fedfuse.methods._metrics import metric_named
from fedfuse.server.aggregate.moves import ScaledMove
from fedfuse.server.aggregate.sparse import TrimAndElect, TrimElectMerge


@method("ties", paper="arXiv:2306.01708", family="base")
def ties(
    density: Annotated[float, Field(gt=0, le=1)] = 0.2,
    scale: float = 1.0,
    metric: str | None = None,
    options: dict[str, Any] | None = None,
) -> Recipe:
    """Keep each client's largest moves, elect a sign for every weight, and average the moves that agree with it.

    Args:
        density: the share of each tensor's coordinates that a client keeps.
        scale: λ, what the merged move is multiplied by.
        metric: average those moves as this method does, by evidence: regmean, fisher or fedlpa.
        options: of that method.
    """
    if metric is None:
        return Recipe(aggregate=TrimElectMerge(density, scale))
    inner = metric_named("ties", metric, options)
    merge = ScaledMove(TrimAndElect(inner.aggregate, density), scale, average=True)
    return Recipe(aggregate=merge, evidence=inner.evidence)

"""Ilharco et al., Editing Models with Task Arithmetic, ICLR 2023."""

from __future__ import annotations

from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import method
from fedfuse.server.aggregate.moves import TaskArithmetic


@method("task_arithmetic", paper="arXiv:2212.04089", family="base")
def task_arithmetic(scale: float = 0.3, average: bool = False) -> Recipe:
    """Add the clients' moves from their common start, scaled: w₀ + λ Σ (w_k − w₀).

    Args:
        scale: λ; 0.3 to 0.5 for several tasks. A negative one forgets what a client learned.
        average: take the mean of the moves instead of their sum; with scale 1 that is FedAvg.
    """
    return Recipe(aggregate=TaskArithmetic(scale, average))

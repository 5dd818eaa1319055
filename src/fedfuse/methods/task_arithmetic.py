"""Ilharco et al., Editing Models with Task Arithmetic, ICLR 2023."""

from __future__ import annotations

from typing import Any

from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import method
from fedfuse.methods._metrics import metric_named
from fedfuse.server.aggregate.moves import ScaledMove, TaskArithmetic


@method("task_arithmetic", paper="arXiv:2212.04089", family="base")
def task_arithmetic(
    scale: float = 0.3, average: bool = False, metric: str | None = None, options: dict[str, Any] | None = None
) -> Recipe:
    """Add the clients' moves from their common start, scaled: w₀ + λ Σ (w_k − w₀).

    Args:
        scale: λ; 0.3 to 0.5 for several tasks. A negative one forgets what a client learned.
        average: take the mean of the moves instead of their sum; with scale 1 that is FedAvg.
        metric: take the mean of the moves as this method does, by evidence: regmean, fisher or fedlpa.
        options: of that method.
    """
    if metric is None:
        return Recipe(aggregate=TaskArithmetic(scale, average))
    inner = metric_named("task_arithmetic", metric, options)
    return Recipe(aggregate=ScaledMove(inner.aggregate, scale, average), evidence=inner.evidence)

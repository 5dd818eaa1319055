"""Yu et al., Language Models are Super Mario: Absorbing Abilities from Homologous Models as a Free Lunch, ICML 2024."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import method
from fedfuse.methods._metrics import rule_named
from fedfuse.server.aggregate.sparse import DropAndRescale


@method("dare", paper="arXiv:2311.03099", family="base")
def dare(
    drop: Annotated[float, Field(ge=0, lt=1)] = 0.9,
    then: str = "task_arithmetic",
    options: dict[str, Any] | None = None,
) -> Recipe:
    """Drop most coordinates of each client's move by lot, enlarge the rest to make up for them, then fuse by a rule.

    Args:
        drop: the probability with which a coordinate is dropped.
        then: the method that fuses what is left, such as ties or fedavg; or one that reads evidence, such as regmean.
        options: of that method.
    """
    inner = rule_named("dare", "then", then, options)
    return Recipe(aggregate=DropAndRescale(drop, inner.aggregate), evidence=inner.evidence)

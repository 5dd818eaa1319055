"""Hsu, Qi, Brown. Measuring the Effects of Non-Identical Data Distribution, 2019."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, PositiveFloat

from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import method
from fedfuse.server.aggregate.adaptive import ServerOptimiser

Fraction = Annotated[float, Field(ge=0, lt=1)]


@method("fedavgm", paper="arXiv:1909.06335")
def fedavgm(lr: PositiveFloat = 1.0, momentum: Fraction = 0.9) -> Recipe:
    """FedAvg with momentum on the server.

    Args:
        lr: the server's rate.
        momentum: β of the server.
    """
    return Recipe(aggregate=ServerOptimiser("momentum", lr, beta1=momentum))

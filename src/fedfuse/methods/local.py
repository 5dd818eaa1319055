"""No federation at all."""

from __future__ import annotations

from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import method
from fedfuse.server.aggregate.apart import KeepApart


@method("local")
def local() -> Recipe:
    """Every client trains alone; its scores are the mean of the clients' own models' scores."""
    return Recipe(aggregate=KeepApart())

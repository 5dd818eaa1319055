"""Jang et al., Model Stock: All We Need Is Just a Few Fine-Tuned Models, ECCV 2024."""

from __future__ import annotations

from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import method
from fedfuse.server.aggregate.angles import ModelStock


@method("model_stock", paper="arXiv:2403.19522", family="base")
def model_stock() -> Recipe:
    """Go from the common start towards the clients' mean, tensor by tensor as far as the angle of their moves says.

    t = K cos θ / (1 + (K − 1) cos θ): all the way where moves agree, not at all where they are orthogonal.
    """
    return Recipe(aggregate=ModelStock())

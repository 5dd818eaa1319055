"""Shoemake, Animating Rotation with Quaternion Curves, SIGGRAPH 1985; of several models, the Karcher mean."""

from __future__ import annotations

from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import method
from fedfuse.server.aggregate.angles import SphericalMean


@method("slerp", paper="doi:10.1145/325165.325242")
def slerp() -> Recipe:
    """Average the clients' directions on the sphere, tensor by tensor, and their lengths.

    Of two models this is spherical interpolation, at the share of examples of the second one; of several it is their
    Karcher mean. The plain mean of directions that disagree is shorter than each of them; this one is not.
    """
    return Recipe(aggregate=SphericalMean())

"""GAMF: all clients' hidden units are matched jointly, by graduated assignment, before the mean."""

from __future__ import annotations

from pydantic import PositiveFloat, PositiveInt

from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import method
from fedfuse.server.aggregate.mean import Mean
from fedfuse.server.align.alignment import AlignUnits
from fedfuse.server.align.graph import ByGraph
from fedfuse.server.steps.repair import Repair, RestateNorms


@method("gamf", paper="Liu et al., ICML 2022", family="matched")
def gamf(
    hot: PositiveFloat = 0.5,
    cold: PositiveFloat = 0.02,
    cooling: PositiveFloat = 0.5,
    sweeps: PositiveInt = 20,
    uniform: bool = True,
    renorm: bool = False,
    repair: bool = False,
) -> Recipe:
    """Match the hidden units of all clients at once as nodes of graphs, then average.

    Args:
        hot: temperature at which soft orders begin, as a share of the largest gain.
        cold: temperature at which they become permutations.
        cooling: factor from one temperature to the next.
        sweeps: passes over all clients and layers in the last climb.
        uniform: weigh every client alike, as the paper does; else by its examples.
        renorm: estimate BatchNorm's statistics anew on the server's rows.
        repair: rescale hidden units without BatchNorm to the parents' activation statistics on the server's rows.
    """
    return Recipe(
        align=AlignUnits(ByGraph(hot, cold, cooling, sweeps)),
        aggregate=Mean(uniform),
        steps=(RestateNorms(),) * renorm + (Repair(uniform),) * repair,
    )

"""OTFusion: hidden units are transported onto a reference's before the mean."""

from __future__ import annotations

from pydantic import NonNegativeFloat, PositiveInt

from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import method
from fedfuse.server.aggregate.mean import Mean
from fedfuse.server.align.activations import Inputs
from fedfuse.server.align.alignment import AlignUnits, Reference
from fedfuse.server.align.transport import ByTransport, Ground, Reading
from fedfuse.server.steps.repair import Repair, RestateNorms


@method("otfusion", paper="arXiv:1910.05653", family="matched")
def otfusion(
    ground: Ground = "weights",
    reg: NonNegativeFloat = 0.0,
    reference: Reference = "largest",
    reading: Reading = "conserve",
    inputs: Inputs = "auto",
    rows: PositiveInt = 256,
    uniform: bool = True,
    renorm: bool = False,
    repair: bool = False,
) -> Recipe:
    """Transport every client's hidden units onto the reference's, layer by layer, then average.

    Clients may have networks of different widths; the result has the reference's.

    Args:
        ground: what tells units apart: their "weights" or their "activations".
        reg: temperature of entropic plans as a share of the mean cost; 0 for exact ones.
        reference: the "largest" client, the "first", or the "mean" of the aligned ones, iterated.
        reading: how merged units are read: "conserve" their sum, or the "average" of the paper.
        inputs: for activations: the "server"'s rows, "synthetic" noise, or "auto".
        rows: for activations: how many inputs at most.
        uniform: weigh every client alike, as the paper does; else by its examples.
        renorm: estimate BatchNorm's statistics anew on the server's rows.
        repair: rescale hidden units without BatchNorm to the parents' activation statistics on the server's rows.
    """
    way = ByTransport(reg, ground, reading, inputs, rows)
    return Recipe(
        align=AlignUnits(way, reference),
        aggregate=Mean(uniform),
        steps=(RestateNorms(),) * renorm + (Repair(uniform),) * repair,
    )

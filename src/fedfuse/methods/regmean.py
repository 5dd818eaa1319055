"""Jin et al., Dataless Knowledge Fusion by Merging Weights of Language Models, ICLR 2023."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, PositiveInt

from fedfuse.client.evidence.inputs import InputFactors
from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import method
from fedfuse.nets.blocks import Which
from fedfuse.server.aggregate.natural import Shares
from fedfuse.server.aggregate.regression import RegressionMean


@method("regmean", paper="arXiv:2212.09849", family="posterior")
def regmean(
    alpha: Annotated[float, Field(ge=0, le=1)] = 0.9,
    shares: Shares = "examples",
    layers: Which = "all",
    min_rows: PositiveInt | None = None,
    block_width: PositiveInt | None = None,
) -> Recipe:
    """Fuse layers by regression: the fused layer's answers are nearest to everybody's own on everybody's own inputs.

    Clients send the second moments A_k of every layer's inputs, which takes a pass forward, no labels and no gradients;
    M = (Σ f_k M_k A_k)(Σ f_k A_k)⁻¹, FedLPA's equation with B = I. Layers without input moments are averaged.

    Args:
        alpha: what A_k's off-diagonals are multiplied by before the solve; 1 leaves them as they are.
        shares: a client counts by its examples, or uniform.
        layers: all that read vectors, patches or tokens, or plain: linear layers and convolutions alone.
        min_rows: a client with fewer rows sends no directions, only sizes; by default twice the batch it trains with.
        block_width: of layers that read more numbers, send blocks of at most so many along A_k's diagonal.
    """
    return Recipe(
        evidence=(InputFactors(layers, min_rows, width=block_width),), aggregate=RegressionMean(alpha, shares)
    )

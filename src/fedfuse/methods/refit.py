"""Refitting the last layer of a finished network, as in FedCGS (AAAI 2025) and Fed3R (ICML 2024); RegMean++."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Annotated

from pydantic import Field

from fedfuse.client.evidence.answers import LayerAnswers
from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import method
from fedfuse.errors import RecipeError
from fedfuse.methods._closed_form import USUAL, HeadFit
from fedfuse.methods.ridge import ridge
from fedfuse.nets.turns import TURN, count_turns
from fedfuse.server.aggregate.layer_by_layer import RefitLayers


@method("refit", paper="arXiv:2406.01116", family="statistics")
def refit(how: HeadFit = USUAL, layers: bool = False, alpha: Annotated[float, Field(ge=0, le=1)] = 0.9) -> Recipe:
    """Keep a network and fit its last layer in closed form to everybody's rows, in one exchange without training.

    It is `ridge` on the features of the network at hand, a fused one say; `refit = "head"` puts it behind any method.

    Args:
        how: which sums, and how the head is fitted to them.
        layers: before the last, fuse all other layers again from the bottom up, one exchange each: by regression on
            what each layer reads behind the layers already fused (RegMean++). Clients must have trained before.
        alpha: what off-diagonals of those layers' input moments are multiplied by.
    """
    recipe = ridge("given", how)
    if not layers:
        return recipe
    if how.epsilon is not None:
        raise RecipeError("refit: the layers below the head are fused without noise; leave out epsilon or layers")
    return replace(
        recipe,
        evidence=(LayerAnswers(how.moments, alpha),),
        aggregate=RefitLayers(how.fit()),
        publishes=(TURN,),
        lasts=partial(count_turns, layer=how.layer),
    )

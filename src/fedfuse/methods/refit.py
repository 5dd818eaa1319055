"""Refitting the last layer of a finished network, as in FedCGS (AAAI 2025) and Fed3R (ICML 2024); RegMean++; REPAIR."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

from pydantic import Field

from fedfuse.client.evidence.answers import LayerAnswers
from fedfuse.client.evidence.units import UnitEvidence
from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import find_method, method
from fedfuse.core.spec import Spec
from fedfuse.errors import RecipeError
from fedfuse.methods._closed_form import USUAL, HeadFit
from fedfuse.methods.ridge import ridge
from fedfuse.nets.turns import TURN, count_turns
from fedfuse.nets.units import TURN as TURN_OF_UNITS
from fedfuse.nets.units import rescalable_layers
from fedfuse.server.aggregate.layer_by_layer import RefitLayers
from fedfuse.server.aggregate.mean import Mean
from fedfuse.server.steps.repair_units import KeepUnitGoals, RepairUnits


@method("refit", paper="arXiv:2406.01116", family="statistics")
def refit(
    how: HeadFit = USUAL,
    layers: bool = False,
    alpha: Annotated[float, Field(ge=0, le=1)] = 0.9,
    units: bool = False,
) -> Recipe:
    """Keep a network and fit its last layer in closed form to everybody's rows, in one exchange without training.

    It is `ridge` on the features of the network at hand, a fused one say; `refit = "head"` puts it behind any method.

    Args:
        how: which sums, and how the head is fitted to them.
        layers: before the last, fuse all other layers again from the bottom up, one exchange each: by regression on
            what each layer reads behind the layers already fused (RegMean++). Clients must have trained before.
        alpha: what off-diagonals of those layers' input moments are multiplied by.
        units: leave the last layer, and rescale hidden units without a norm to their means and deviations in the
            clients' own networks (REPAIR), one exchange per layer. Clients must have trained before.
    """
    if units:
        return _repair(how, layers)
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


def refit_ending(said: str | Mapping[str, Any]) -> Recipe:
    """The recipe behind another method's last round that `refit` asks for in a file: a short word, or options.

    Example:
        >>> refit_ending("units") == refit_ending({"units": True})
        True
    """
    options = _SHORT[said] if isinstance(said, str) else said
    return find_method(refit.__name__).recipe(**options)


_SHORT: Mapping[str, Mapping[str, Any]] = {"head": {}, "layers": {"layers": True}, "units": {"units": True}}


def _repair(how: HeadFit, layers: bool) -> Recipe:
    if layers or how != USUAL:
        raise RecipeError("refit: units are rescaled and no layer is fitted; leave out units or the other options")
    return Recipe(
        label="repair",
        trains=False,
        evidence=(UnitEvidence("mean"), UnitEvidence("std")),
        aggregate=Mean(),
        steps=(RepairUnits(),),
        publishes=(TURN_OF_UNITS,),
        lasts=_count_layers,
        follows=_bring_statistics,
    )


def _count_layers(network: Spec) -> int:
    """An exchange per layer; without any there is one, in which nothing happens."""
    return max(1, len(rescalable_layers(network)))


def _bring_statistics(before: Recipe, rounds: int) -> Recipe:
    """In their last round, the parents say what their own units give; alignments move that with the units."""
    last = rounds - 1
    evidence = (UnitEvidence("mean", last), UnitEvidence("std", last))
    return replace(before, evidence=before.evidence + evidence, steps=(*before.steps, KeepUnitGoals(last)))

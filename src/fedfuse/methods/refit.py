"""Refitting the last layer of a finished network, as in FedCGS (AAAI 2025) and Fed3R (ICML 2024); RegMean++."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Annotated

from pydantic import Field, NonNegativeFloat, PositiveFloat

from fedfuse.client.evidence.answers import LayerAnswers
from fedfuse.client.evidence.moments import Moments, Precision
from fedfuse.client.evidence.private_moments import Counts
from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import method
from fedfuse.errors import RecipeError
from fedfuse.linalg.ridge import Rule
from fedfuse.methods.ridge import Delta, ridge
from fedfuse.nets.turns import TURN, count_turns
from fedfuse.server.aggregate.closed_form import FitHead, Head
from fedfuse.server.aggregate.layer_by_layer import RefitLayers


@method("refit", paper="arXiv:2406.01116", family="statistics")
def refit(
    penalty: NonNegativeFloat | Rule = "gcv",
    head: Head = "ridge",
    temperature: PositiveFloat | None = None,
    layer: str = "",
    precision: Precision = "network",
    epsilon: PositiveFloat | None = None,
    delta: Delta = 1e-5,
    clip: PositiveFloat = 1.0,
    counts: Counts = "noised",
    reproducible: bool = False,
    layers: bool = False,
    alpha: Annotated[float, Field(ge=0, le=1)] = 0.9,
) -> Recipe:
    """Keep a network and fit its last layer in closed form to everybody's rows, in one exchange without training.

    It is `ridge` on the features of the network at hand, a fused one say; `refit = "head"` puts it behind any method.

    Args:
        penalty: λ in units of ΣG's mean eigenvalue; "gcv" (generalized cross-validation) and "evidence" (marginal
            likelihood) choose it from the sums.
        head: ridge, or gaussian for linear discriminant analysis from the same sums.
        temperature: what answers are divided by to be logits; by default 0.1 for ridge and 1 for gaussian.
        layer: the linear layer that is fitted; by default the last.
        precision: "network" computes features as the network does, "float64" in float64, at about twice the time.
        epsilon: add noise that makes each client's sums (ε, δ)-differentially private in any one row; none by default.
        delta: its δ.
        clip: the length that features are shortened to before they are summed, where there is noise.
        counts: class counts are noised, or public by agreement.
        reproducible: draw the noise from the seed, for simulations alone; else from the operating system.
        layers: before the last, fuse all other layers again from the bottom up, one exchange each: by regression on
            what each layer reads behind the layers already fused (RegMean++). Clients must have trained before.
        alpha: what off-diagonals of those layers' input moments are multiplied by.
    """
    privacy = {"epsilon": epsilon, "delta": delta, "clip": clip, "counts": counts, "reproducible": reproducible}
    recipe = ridge("given", penalty, head, temperature, layer, precision, **privacy)
    if not layers:
        return recipe
    if epsilon is not None:
        raise RecipeError("refit: the layers below the head are fused without noise; leave out epsilon or layers")
    return replace(
        recipe,
        evidence=(LayerAnswers(Moments(layer, precision), alpha),),
        aggregate=RefitLayers(FitHead(layer, penalty, head, temperature)),
        publishes=(TURN,),
        lasts=partial(count_turns, layer=layer),
    )

"""Keeping every network and averaging what they predict."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveFloat, PositiveInt

from fedfuse.client.class_sums import LabelCounts
from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import method
from fedfuse.nets.mixture import MeanProbability
from fedfuse.server.aggregate.ensemble import KeepAll, Shares
from fedfuse.server.steps.distill import InputSource, distillation


@method("ensemble", family="predictions")
def ensemble(
    weights: Literal["uniform", "examples"] = "uniform",
    shares: Shares = "none",
    distill: InputSource = "none",
    inputs: PositiveInt = 2000,
    held_classes: bool = False,
    temperature: PositiveFloat = 20.0,
    epochs: PositiveInt = 100,
    lr: PositiveFloat = 1e-3,
) -> Recipe:
    """Keep every client's network and average their probabilities: p(x) = Σ_k w_k softmax(f_k(x)).

    The networks may differ; only their classes must agree. With `distill`, one network learns to answer as they do.

    Args:
        weights: "uniform" counts every client alike, "examples" by its number of examples.
        shares: weigh each network's vote for a class by its share of that class's rows, p(c|x) ∝ Σ_j s_jc p_j(c|x), by
            the label "counts" that clients send or as their output "biases" let guess; `weights` then do not count.
        distill: the inputs on which one network learns from all: "server" rows, "unlabelled" inputs, "impressions" or
            "generated" ones made of the networks themselves; "none" keeps all networks.
        inputs: how many "impressions" are made.
        held_classes: make "impressions" of a network only for the classes its client has rows of, by the label counts
            that clients then send.
        temperature: of distillation.
        epochs: of distillation.
        lr: of distillation, by Adam.
    """
    return Recipe(
        evidence=(LabelCounts(),) * (shares == "counts" or held_classes),
        aggregate=KeepAll(MeanProbability(), weights, shares=shares),
        steps=distillation(distill, inputs, temperature, epochs, lr, held_classes),
    )

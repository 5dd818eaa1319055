"""Diao, Li and He, Towards Addressing Label Skews in One-Shot Federated Learning, ICLR 2023."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from fedfuse.client.openset import OpenSet
from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import method
from fedfuse.nets.combine import OpenSetVote
from fedfuse.server.aggregate.ensemble import KeepAll
from fedfuse.server.outputs import UnknownClass
from fedfuse.server.steps.distill import InputSource, distillation


@method("fedov", paper="https://openreview.net/forum?id=rzrqh85f4Sc", family="predictions")
def fedov(
    voters: PositiveInt | Literal["all"] = "all",
    steps: NonNegativeInt = 5,
    stride: PositiveFloat = 0.002,
    reach: PositiveFloat = 0.5,
    mix: NonNegativeFloat = 0.01,
    distill: InputSource = "none",
    inputs: PositiveInt = 2000,
    temperature: PositiveFloat = 20.0,
    epochs: PositiveInt = 100,
    lr: PositiveFloat = 1e-3,
) -> Recipe:
    """Networks with an output for "unknown", trained on destroyed rows too, vote on what they know.

    Every client's network gets one output more. An input's votes are the class probabilities of the networks that
    least take it for unknown.

    Args:
        voters: how many networks vote on an input, or "all".
        steps: adversarial steps that make outliers harder.
        stride: the size of such a step.
        reach: how far the steps may move a pixel.
        mix: weight of the term of mixed features.
        distill: the inputs on which one network learns from all: "server" rows, "unlabelled" inputs, "impressions" or
            "generated" ones made of the networks themselves; "none" keeps all networks.
        inputs: how many "impressions" are made.
        temperature: of distillation.
        epochs: of distillation.
        lr: of distillation, by Adam.
    """
    return Recipe(
        objective=OpenSet(steps, stride, reach, mix),
        prepare_model=UnknownClass(),
        aggregate=KeepAll(OpenSetVote(voters)),
        steps=distillation(distill, inputs, temperature, epochs, lr),
    )

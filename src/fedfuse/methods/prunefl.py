"""Jiang et al., Model Pruning Enables Efficient Federated Learning on Edge Devices, TNNLS 2022."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, NonNegativeFloat, PositiveInt

from fedfuse.client.evidence.gradients import SquaredGradients
from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import method
from fedfuse.server.aggregate.mean import Mean
from fedfuse.server.steps.mask import Exchange, PruneFirst, Reconfigure
from fedfuse.training.projections import Masked


@method("prunefl", paper="arXiv:1909.12326", family="pruned")
def prunefl(
    every: PositiveInt = 50,
    drop: Annotated[float, Field(gt=0, lt=1)] = 0.3,
    half_life: PositiveInt = 10_000,
    overhead: NonNegativeFloat = 0.1,
    steps: PositiveInt = 50,
    change: Annotated[float, Field(gt=0, lt=1)] = 0.1,
    patience: PositiveInt = 5,
    most: PositiveInt = 50,
    batches: PositiveInt = 5,
) -> Recipe:
    """FedAvg of a masked network whose weights are traded for those worth more per unit of round time.

    First, before any client trains, the server finds a small network on its own rows; then, every so many rounds, the
    mask is traded by everybody's squared gradients. The masks are unstructured: messages shrink as a sparse encoding
    would, training gets no faster.

    Args:
        every: rounds between two trades, in which clients send squared gradients.
        drop: the share of each layer's weights, the smallest, that each trade puts in doubt.
        half_life: rounds after which only half as many are put in doubt.
        overhead: the part of a round's time that pruning cannot save, as a share of the whole network's.
        steps: of the server's training between two trades of the first stage.
        change: a smaller relative change of the density counts as none.
        patience: so many of those in a row end the first stage.
        most: trades of the first stage, at most.
        batches: batches a squared gradient is a mean over.
    """
    trade, gradients = Exchange(drop, overhead), SquaredGradients(every, batches)
    return Recipe(
        project=Masked(),
        evidence=(gradients,),
        aggregate=Mean(),
        steps=(Reconfigure(every, trade, half_life),),
        publishes=("mask",),
        before_first_round=PruneFirst(steps, trade, change, patience, most, batches),
    )

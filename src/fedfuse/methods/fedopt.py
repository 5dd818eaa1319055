"""The server as an optimiser: Hsu et al., 2019; Reddi et al., Adaptive Federated Optimization, ICLR 2021."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, PositiveFloat

from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import method
from fedfuse.server.aggregate.adaptive import ServerOptimiser

Fraction = Annotated[float, Field(ge=0, lt=1)]


@method("fedavgm", paper="arXiv:1909.06335")
def fedavgm(lr: PositiveFloat = 1.0, momentum: Fraction = 0.9) -> Recipe:
    """FedAvg with momentum on the server.

    Args:
        lr: the server's rate.
        momentum: β of the server.
    """
    return Recipe(aggregate=ServerOptimiser("momentum", lr, beta1=momentum))


@method("fedadam", paper="arXiv:2003.00295")
def fedadam(
    lr: PositiveFloat = 0.01, beta1: Fraction = 0.9, beta2: Fraction = 0.99, tau: PositiveFloat = 1e-3
) -> Recipe:
    """FedAvg whose server takes an Adam step along the mean move.

    Args:
        lr: the server's rate.
        beta1: the first moment's memory.
        beta2: the second moment's memory.
        tau: the floor of the step's denominator.
    """
    return Recipe(aggregate=ServerOptimiser("adam", lr, beta1, beta2, tau))


@method("fedyogi", paper="arXiv:2003.00295")
def fedyogi(
    lr: PositiveFloat = 0.01, beta1: Fraction = 0.9, beta2: Fraction = 0.99, tau: PositiveFloat = 1e-3
) -> Recipe:
    """FedAvg whose server takes a Yogi step along the mean move.

    Args:
        lr: the server's rate.
        beta1: the first moment's memory.
        beta2: the second moment's memory.
        tau: the floor of the step's denominator.
    """
    return Recipe(aggregate=ServerOptimiser("yogi", lr, beta1, beta2, tau))

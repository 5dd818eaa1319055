"""How weights move along gradients, compiled: SGD, Adam and AMSGrad, with what they remember during a round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedfuse.core.settings import Optimizer
from fedfuse.kernels.chain import learn
from fedfuse.kernels.target import Floats

_NOTHING = np.zeros(0, np.float32)


@dataclass(slots=True)
class CompiledSgd:
    """v ← ρ v + g + λ w;  w ← w − η v."""

    momentum: float
    weight_decay: float
    velocity: Floats

    def step(self, w: Floats, g: Floats, scale: float, rate: float) -> None:
        """One step along the gradients times a scale; see `learn.step`."""
        learn.step(w, g, self.velocity, scale, rate, self.momentum, self.weight_decay)


@dataclass(slots=True)
class CompiledAdam:
    """Adam with L2 weight decay; with room for the largest second moments, AMSGrad."""

    betas: tuple[float, float]
    weight_decay: float
    first: Floats
    second: Floats
    largest: Floats
    eps: float
    steps: int = 0

    def step(self, w: Floats, g: Floats, scale: float, rate: float) -> None:
        """One step along the gradients times a scale; see `learn.adam_step`."""
        self.steps += 1
        b1, b2 = self.betas
        corrections = 1 / (1 - b1**self.steps), (1 - b2**self.steps) ** -0.5
        moments = self.first, self.second, self.largest
        learn.adam_step(w, g, *moments, self.betas, corrections, scale, rate, self.weight_decay, self.eps)


def rows_needed(optimizer: Optimizer) -> int:
    """How many numbers an optimizer remembers of each weight.

    Example:
        >>> [rows_needed(Optimizer(name=name)) for name in ("sgd", "adam", "amsgrad")]
        [0, 2, 3]
    """
    if optimizer.name == "sgd":
        return 1 if optimizer.momentum else 0
    return 3 if optimizer.name == "amsgrad" else 2


def make_descent(optimizer: Optimizer, rows: Sequence[Floats]) -> CompiledSgd | CompiledAdam:
    """A fresh optimizer.

    Args:
        optimizer: its name and settings.
        rows: of zeros, as many as it needs.
    """
    if optimizer.name == "sgd":
        return CompiledSgd(optimizer.momentum, optimizer.weight_decay, rows[0] if rows else _NOTHING)
    largest = rows[2] if optimizer.name == "amsgrad" else _NOTHING
    return CompiledAdam(optimizer.betas, optimizer.weight_decay, rows[0], rows[1], largest, optimizer.eps)

"""What a chain is made of and told: its layers as data, the shapes between them, and how Gaussian weights learn."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from torch import Tensor

Shape: TypeAlias = tuple[int, ...]


class Uncovered(Exception):
    """Something the kernels do not do, in a few words."""


@dataclass(frozen=True, slots=True)
class Conv:
    """A convolution with a square kernel."""

    name: str
    outputs: int
    kernel: int
    stride: int
    padding: int
    bias: bool


@dataclass(frozen=True, slots=True)
class Linear:
    """A fully connected layer."""

    name: str
    outputs: int
    bias: bool


@dataclass(frozen=True, slots=True)
class MeanFieldLinear(Linear):
    """A fully connected layer of Gaussian weights; without `noise` it works at their means."""

    noise: bool


@dataclass(frozen=True, slots=True)
class Norm:
    """A batch norm with weights, biases and running statistics."""

    name: str
    eps: float
    momentum: float


@dataclass(frozen=True, slots=True)
class Activation:
    """An elementwise function; `slope` is a leaky ReLU's below zero, and 0 a plain one's."""

    kind: Literal["relu", "tanh"]
    slope: float = 0.0


@dataclass(frozen=True, slots=True)
class PoolLayer:
    """The largest or the mean value of square windows."""

    kind: Literal["max", "mean"]
    kernel: int
    stride: int
    padding: int = 0


@dataclass(frozen=True, slots=True)
class Dropout:
    """Values set to zero with probability p, the others scaled up."""

    p: float


@dataclass(frozen=True, slots=True)
class Flatten:
    """An image as a row of numbers."""


@dataclass(frozen=True, slots=True)
class VarianceLearning:
    """How the log-variances of Gaussian weights learn.

    Attributes:
        rate: of the natural gradient's step, for every unit of the weights' learning rate.
        examples: what makes a mean loss the loss of all rows.
        weight: κ of κ KL(q ‖ prior).
        priors: means and log-variances of the prior by the weights' names.
    """

    rate: float
    examples: float
    weight: float = 0.0
    priors: Mapping[str, tuple[Tensor | float, Tensor | float]] = field(default_factory=dict)


Layer: TypeAlias = Conv | Linear | Norm | Activation | PoolLayer | Dropout | Flatten


def shape_after(layer: Layer, shape: Shape) -> Shape:
    """The shape of one example after a layer.

    Example:
        >>> shape_after(PoolLayer("max", 2, 2), (6, 24, 24))
        (6, 12, 12)
    """
    match layer:
        case Conv(outputs=outputs, kernel=k, stride=s, padding=p):
            after: Shape = (outputs, *((side + 2 * p - k) // s + 1 for side in shape[1:]))
        case PoolLayer(kernel=k, stride=s, padding=p):
            after = (shape[0], *((side + 2 * p - k) // s + 1 for side in shape[1:]))
        case Linear(outputs=outputs):
            after = (outputs,)
        case Flatten():
            after = (math.prod(shape),)
        case _:
            return shape
    if min(after) < 1:
        raise Uncovered(f"{type(layer).__name__} that leaves no pixel of {shape}")
    return after

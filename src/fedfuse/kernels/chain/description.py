"""A chain as data: its layers, the shapes between them, how Gaussian weights learn, and when compiling is worth it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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


# The rule of `is_faster` is taken from measurements, so that no clock decides a result. Measured against torch on one
# core for some twenty networks and batches of 1 to 256 (`benchmarks/train.py`): the gain is what torch spends on calls
# and on narrow convolutions. It falls below 1.3 once a convolution multiplies some thousand pairs of channels, or a
# batch some ten million weights of linear layers. Batches that leave lanes empty waste them.
_PAIRS, _FEW_PAIRS = 1000, 128  # input times output channels of a convolution: for full lanes, and in any case
_PRODUCTS = 13_000_000  # batch size times weights of linear layers
_LANES = 16  # of most machines; `target` knows the real ones, but needs numba


def is_faster(layers: Sequence[Layer], shape: Shape, batch: int) -> bool:
    """Whether the kernels are expected to be at least 1.3 times as fast as torch.

    Args:
        layers: of the network.
        shape: of one example.
        batch: examples in a batch.

    Example:
        >>> is_faster([Linear("fc", 100, True)], (784,), batch=64), is_faster([Linear("fc", 4096, True)], (784,), 64)
        (True, False)
    """
    filled = batch / (-(-batch // _LANES) * _LANES)
    pairs, weights = 0, 0
    for layer in layers:
        if isinstance(layer, Conv):
            pairs = max(pairs, shape[0] * layer.outputs)
        elif isinstance(layer, Linear):
            weights += shape[0] * layer.outputs
        shape = shape_after(layer, shape)
    return pairs <= max(_PAIRS * filled, _FEW_PAIRS) and weights * batch <= _PRODUCTS

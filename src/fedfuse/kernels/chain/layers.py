"""The layers of a chain at work: each reads one buffer, writes the next, and passes gradients back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from fedfuse.kernels.chain import images, pointwise
from fedfuse.kernels.chain.buffers import Images, Table, blocks_of, flatten, flatten_back
from fedfuse.kernels.chain.images import convolve, convolve_to_biases, convolve_to_inputs, convolve_to_weights
from fedfuse.kernels.chain.pointwise import (
    Runs,
    follow_statistics,
    norm_coefficients,
    norm_moments,
    normalize,
    normalize_to_inputs,
    normalize_to_weights,
)
from fedfuse.kernels.chain.tables import (
    add_noise,
    add_through_squares,
    connect,
    connect_to_biases,
    connect_to_inputs,
    connect_to_weights,
    multiply,
    square,
)
from fedfuse.kernels.chain.tiles import Three, Two
from fedfuse.kernels.target import LANES, Floats


@dataclass(slots=True)
class Numbers:
    """What all layers share: weights and gradients in one long row, running statistics in another, and zeros."""

    weights: Floats
    grads: Floats
    statistics: Floats
    zero: Floats = field(default_factory=lambda: np.zeros(LANES, np.float32))
    keys: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Variances:
    """Of all Gaussian weights, in long rows of their own: log-variances ρ, e^ρ, its slopes, and the prior.

    The prior's rows are means, precisions and log-variances; see `tables.learn_variances`.
    """

    rho: Floats
    values: Floats
    slopes: Floats
    prior: tuple[Floats, Floats, Floats]


class Op(Protocol):
    """A layer at work."""

    def forward(self, count: int, /) -> None:
        """From its input to its output, for the first `count` examples."""
        ...

    def backward(self, count: int, /) -> None:
        """From its output's gradient to its input's, and to its weights'."""
        ...


@dataclass(slots=True)
class ConvOp:
    """A convolution; the first layer's input needs no gradient."""

    name: str
    x: Images
    y: Images
    own: Numbers
    offsets: Two
    size: Three
    bias: bool
    first: bool
    _sums: Floats = field(init=False)

    def __post_init__(self) -> None:
        self._sums = np.zeros(self.y.channels * LANES, np.float32)

    def forward(self, count: int) -> None:
        """Write y = x ⋆ w + b."""
        x, y, weights = self.x, self.y, self.own.weights
        convolve(blocks_of(count), x.data, x.form, weights, self.offsets, self.size, y.data, y.form)

    def backward(self, count: int) -> None:
        """Write the gradients of the weights and the biases, and pass y's back to x."""
        x, y, own, blocks = self.x, self.y, self.own, blocks_of(count)
        weights, biases = self.offsets
        convolve_to_weights(blocks, x.data, x.form, y.grads, y.form, self.size, own.grads, weights)
        if self.bias:
            convolve_to_biases(blocks, y.grads, y.form, own.grads, biases, self._sums)
        self.pass_back(count)

    def pass_back(self, count: int) -> None:
        """From its output's gradient to its input's alone."""
        x, y, own = self.x, self.y, self.own
        if not self.first:
            at = self.offsets[0]
            convolve_to_inputs(blocks_of(count), y.grads, y.form, own.weights, at, self.size, own.zero, x.grads, x.form)

    def read_inputs(self, count: int) -> Tensor:
        """A copy of what it reads."""
        return self.x.copy_out(self.x.data, count)

    def read_gradients(self, count: int, scale: float) -> Tensor:
        """A copy of the gradient at its output, times a scale."""
        return self.y.copy_out(self.y.grads, count, scale)


@dataclass(slots=True)
class LinearOp:
    """A fully connected layer; the first layer's input needs no gradient.

    Where images were flattened for it, `order` has their channels, height and width: a table has channels last.
    """

    name: str
    x: Table
    y: Table
    own: Numbers
    offsets: Two
    bias: bool
    first: bool
    order: tuple[int, ...] = ()

    def forward(self, count: int) -> None:
        """Write y = x Wᵀ + b."""
        x, y = self.x, self.y
        connect(count, x.data, x.form, self.own.weights, self.offsets, y.data, y.form)

    def backward(self, count: int) -> None:
        """Write the gradients of the weights and the biases, and pass y's back to x."""
        x, y, own = self.x, self.y, self.own
        weights, biases = self.offsets
        connect_to_weights(count, x.data, x.form, y.grads, y.form, own.zero, own.grads, weights)
        if self.bias:
            connect_to_biases(count, y.grads, y.form, own.grads, biases)
        self.pass_back(count)

    def pass_back(self, count: int) -> None:
        """From its output's gradient to its input's alone."""
        x, y, own = self.x, self.y, self.own
        if not self.first:
            connect_to_inputs(count, y.grads, y.form, own.weights, self.offsets[0], own.zero, x.grads, x.form)

    def read_inputs(self, count: int) -> Tensor:
        """A copy of what it reads, in the order that torch's layer has its columns."""
        rows = self.x.rows_of(self.x.data, count)
        if not self.order:
            return rows.clone()
        channels, height, width = self.order
        images: Tensor = rows.unflatten(1, (height, width, channels))
        return images.permute(0, 3, 1, 2).flatten(1)

    def read_gradients(self, count: int, scale: float) -> Tensor:
        """A copy of the gradient at its output, times a scale."""
        return self.y.rows_of(self.y.grads, count) * scale


@dataclass(slots=True)
class MeanFieldOp:
    """A fully connected layer of Gaussian weights: `plain` is that of their means."""

    plain: LinearOp
    own: Variances
    offsets: Two
    noise: bool
    _squares: Table = field(init=False)
    _outputs: Floats = field(init=False)
    _drawn: Tensor = field(init=False)

    def __post_init__(self) -> None:
        x, y = self.plain.x, self.plain.y
        self._squares, self._outputs = Table(x.batch, x.columns), np.zeros_like(y.data)
        self._drawn = torch.empty(y.batch, y.columns)

    @property
    def place(self) -> Two:
        """Where its log-variances begin, and how many there are."""
        return self.offsets[0], self.plain.y.columns * self.plain.x.features

    def forward(self, count: int) -> None:
        """Draw from N(x μᵀ + b, x² vᵀ), by the noise that torch's layer would take from torch's generator."""
        self.plain.forward(count)
        if not self.noise:
            return
        x, y, squares = self.plain.x, self.plain.y, self._squares
        square(x.data, squares.data, count * x.features)
        connect(count, squares.data, x.form, self.own.values, self.offsets, self._outputs, y.form)
        drawn = self._drawn[:count].normal_()
        add_noise(count, y.data, self._outputs, y.form, drawn.reshape(-1).numpy())

    def backward(self, count: int) -> None:
        """Pass the means' gradient back, and the variances' the same way, through squares."""
        plain, own, squares, zero = self.plain, self.own, self._squares, self.plain.own.zero
        x, y, slopes = plain.x, plain.y, self._outputs  # where `add_noise` left ∂y/∂v in place of v
        plain.backward(count)
        if not self.noise:
            return
        multiply(y.grads, slopes, count * y.features)
        connect_to_weights(count, squares.data, x.form, slopes, y.form, zero, own.slopes, self.offsets[0])
        if not plain.first:
            connect_to_inputs(count, slopes, y.form, own.values, self.offsets[0], zero, squares.grads, x.form)
            add_through_squares(x.data, squares.grads, x.grads, count * x.features)


@dataclass(slots=True)
class NormOp:
    """A batch norm; a batch of one passes it by its running statistics."""

    x: Images | Table
    y: Images | Table
    own: Numbers
    offsets: Two
    statistics: Two
    eps: float
    momentum: float
    batches: int = 0
    _mean: Floats = field(init=False)
    _scale: Floats = field(init=False)

    def __post_init__(self) -> None:
        channels, lanes = self._size
        self._mean, self._scale = (np.zeros(channels * lanes, np.float32) for _ in range(2))

    @property
    def _size(self) -> Two:
        """Channels, and the numbers a channel has in a pixel."""
        return (self.x.channels, LANES) if isinstance(self.x, Images) else (self.x.columns, 1)

    def _runs(self, count: int) -> Runs:
        """As of other layers, but a table row by row, without its filling."""
        if isinstance(self.x, Images):
            return runs_of(self.x, self.y, count)
        columns, length = self.x.form
        return (1, count, columns, 0, 0, length, 0, 0, length)

    def _live(self, count: int) -> Floats:
        """1 where the last block of lanes has an example."""
        channels, lanes = self._size
        last = count - (blocks_of(count) - 1) * LANES if lanes > 1 else 1
        return np.tile((np.arange(lanes) < last).astype(np.float32), channels)

    def _numbers(self, count: int) -> int:
        """How many numbers of a channel a batch has."""
        return count * (self.x.height * self.x.width if isinstance(self.x, Images) else 1)

    def forward(self, count: int) -> None:
        """Take the batch's statistics, let the running ones follow, and normalize."""
        x, own, runs, size = self.x, self.own, self._runs(count), self._size
        mean, scale, channels = self._mean, self._scale, size[0]
        if count > 1:
            numbers = self._numbers(count)
            norm_moments(x.data, runs, size, self._live(count), numbers, mean, scale)
            follow_statistics(own.statistics, mean, scale, self.statistics, channels, numbers, self.momentum)
            self.batches += 1
        else:
            mean[:channels], scale[:channels] = (own.statistics[at : at + channels] for at in self.statistics)
        scale[:channels] = 1 / np.sqrt(scale[:channels] + np.float32(self.eps))
        normalize(x.data, self.y.data, runs, size, own.weights, self.offsets, mean, scale)

    def backward(self, count: int) -> None:
        """Write the gradients of weights and biases, and pass y's back to x, through the batch's statistics."""
        x, dy, own, runs, size = self.x, self.y.grads, self.own, self._runs(count), self._size
        normalize_to_weights(x.data, dy, runs, size, self._mean, self._scale, own.grads, self.offsets)
        numbers = self._numbers(count) if count > 1 else 0
        known = norm_coefficients(own.weights, own.grads, self.offsets, self._scale, numbers, size[0])
        normalize_to_inputs(x.data, dy, x.grads, runs, size, self._live(count), self._mean, known)


@dataclass(frozen=True, slots=True)
class PlainOp:
    """A layer without weights: its pass forward and its pass back."""

    forward: Callable[[int], None]
    backward: Callable[[int], None]


def relu(x: Images | Table, y: Images | Table, slope: float) -> Op:
    """ReLU, leaky or not."""
    return PlainOp(
        lambda count: pointwise.relu(x.data, y.data, runs_of(x, y, count), slope),
        lambda count: pointwise.relu_back(y.data, y.grads, x.grads, runs_of(x, y, count), slope),
    )


def tanh(x: Images | Table, y: Images | Table) -> Op:
    """The hyperbolic tangent."""
    return PlainOp(
        lambda count: pointwise.tanh(x.data, y.data, runs_of(x, y, count)),
        lambda count: pointwise.tanh_back(y.data, y.grads, x.grads, runs_of(x, y, count)),
    )


def dropout(x: Images | Table, y: Images | Table, own: Numbers, index: int, p: float) -> Op:
    """Dropout; its mask comes from the key that a batch has for it, `own.keys[index]`."""
    across, most = (LANES, padded_batch(x)) if isinstance(x, Images) else (0, x.batch)
    mask = np.zeros(most * x.features, np.float32)

    def forward(count: int) -> None:
        pointwise.draw_mask(mask, count, x.features, across, own.keys[index], 1 - p)
        pointwise.multiply_mask(x.data, mask, y.data, runs_of(x, y, count))

    # on the way back the two buffers' borders change sides
    return PlainOp(forward, lambda count: pointwise.multiply_mask(y.grads, mask, x.grads, runs_of(y, x, count)))


def max_pool(x: Images, y: Images, size: Three) -> Op:
    """Max-pooling; it remembers which pixel of each window was the largest."""
    chosen = np.zeros(padded_batch(y) * y.features, np.int32)
    return PlainOp(
        lambda count: images.max_pool(blocks_of(count), x.data, x.form, size, y.data, y.form, chosen),
        lambda count: images.max_pool_back(blocks_of(count), y.grads, y.form, size, chosen, x.grads, x.form),
    )


def mean_pool(x: Images, y: Images, size: Three) -> Op:
    """Average pooling."""
    return PlainOp(
        lambda count: images.mean_pool(blocks_of(count), x.data, x.form, size, y.data, y.form),
        lambda count: images.mean_pool_back(blocks_of(count), y.grads, y.form, size, x.grads, x.form),
    )


def to_table(x: Images, y: Table) -> Op:
    """From images to a table."""
    return PlainOp(
        lambda count: flatten(count, x.data, x.form, y.data, y.form[1]),
        lambda count: flatten_back(count, y.grads, y.form[1], x.grads, x.form),
    )


def runs_of(x: Images | Table, y: Images | Table, count: int) -> Runs:
    """Two buffers of one kind and size as runs of numbers."""
    return x.runs(y, count)  # type: ignore[arg-type]


def padded_batch(images: Images) -> int:
    """Lanes of all blocks of images."""
    return blocks_of(images.batch) * LANES

"""The layers of a chain at work: each reads one buffer, writes the next, and passes gradients back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedfuse.kernels.chain import connect, convolve, move, normalize, pointwise, pool, posterior
from fedfuse.kernels.chain.buffers import Images, Table, blocks_of
from fedfuse.kernels.chain.pointwise import Runs
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

    The prior's rows are means, precisions and log-variances; see `posterior.learn`.
    """

    rho: Floats
    values: Floats
    slopes: Floats
    prior: tuple[Floats, Floats, Floats]


class Op(Protocol):
    """A layer at work."""

    def forward(self, count: int) -> None:
        """From its input to its output, for the first `count` examples."""
        ...

    def backward(self, count: int) -> None:
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
        """See `convolve.forward`."""
        x, y, weights = self.x, self.y, self.own.weights
        convolve.forward(blocks_of(count), x.data, x.form, weights, self.offsets, self.size, y.data, y.form)

    def backward(self, count: int) -> None:
        """See `convolve`."""
        x, y, own, blocks = self.x, self.y, self.own, blocks_of(count)
        weights, biases = self.offsets
        convolve.to_weights(blocks, x.data, x.form, y.grads, y.form, self.size, own.grads, weights)
        if self.bias:
            convolve.to_biases(blocks, y.grads, y.form, own.grads, biases, self._sums)
        self.pass_back(count)

    def pass_back(self, count: int) -> None:
        """From its output's gradient to its input's alone."""
        x, y, own = self.x, self.y, self.own
        if not self.first:
            at = self.offsets[0]
            convolve.to_inputs(blocks_of(count), y.grads, y.form, own.weights, at, self.size, own.zero, x.grads, x.form)

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
        """See `connect.forward`."""
        x, y = self.x, self.y
        connect.forward(count, x.data, x.form, self.own.weights, self.offsets, y.data, y.form)

    def backward(self, count: int) -> None:
        """See `connect`."""
        x, y, own = self.x, self.y, self.own
        weights, biases = self.offsets
        connect.to_weights(count, x.data, x.form, y.grads, y.form, own.zero, own.grads, weights)
        if self.bias:
            connect.to_biases(count, y.grads, y.form, own.grads, biases)
        self.pass_back(count)

    def pass_back(self, count: int) -> None:
        """From its output's gradient to its input's alone."""
        x, y, own = self.x, self.y, self.own
        if not self.first:
            connect.to_inputs(count, y.grads, y.form, own.weights, self.offsets[0], own.zero, x.grads, x.form)

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
        posterior.square(x.data, squares.data, count * x.features)
        connect.forward(count, squares.data, x.form, self.own.values, self.offsets, self._outputs, y.form)
        drawn = self._drawn[:count].normal_()
        posterior.disturb(count, y.data, self._outputs, y.form, drawn.reshape(-1).numpy())

    def backward(self, count: int) -> None:
        """See `connect`; the variances' gradient goes the same way, through squares."""
        plain, own, squares, zero = self.plain, self.own, self._squares, self.plain.own.zero
        x, y, slopes = plain.x, plain.y, self._outputs
        plain.backward(count)
        if not self.noise:
            return
        posterior.multiply(y.grads, slopes, count * y.features)
        connect.to_weights(count, squares.data, x.form, slopes, y.form, zero, own.slopes, self.offsets[0])
        if not plain.first:
            connect.to_inputs(count, slopes, y.form, own.values, self.offsets[0], zero, squares.grads, x.form)
            posterior.add_through_squares(x.data, squares.grads, x.grads, count * x.features)


def runs_of(x: Images | Table, y: Images | Table, count: int) -> Runs:
    """Two buffers of one kind and size as runs of numbers."""
    return x.runs(y, count)  # type: ignore[arg-type]


@dataclass(slots=True)
class ReluOp:
    """ReLU, leaky or not."""

    x: Images | Table
    y: Images | Table
    slope: float

    def forward(self, count: int) -> None:
        """See `pointwise.relu`."""
        pointwise.relu(self.x.data, self.y.data, runs_of(self.x, self.y, count), self.slope)

    def backward(self, count: int) -> None:
        """See `pointwise.relu_back`."""
        y = self.y
        pointwise.relu_back(y.data, y.grads, self.x.grads, runs_of(self.x, y, count), self.slope)


@dataclass(slots=True)
class TanhOp:
    """The hyperbolic tangent."""

    x: Images | Table
    y: Images | Table

    def forward(self, count: int) -> None:
        """See `pointwise.tanh`."""
        pointwise.tanh(self.x.data, self.y.data, runs_of(self.x, self.y, count))

    def backward(self, count: int) -> None:
        """See `pointwise.tanh_back`."""
        pointwise.tanh_back(self.y.data, self.y.grads, self.x.grads, runs_of(self.x, self.y, count))


@dataclass(slots=True)
class DropoutOp:
    """Dropout; its mask comes from a key of its own for every batch."""

    x: Images | Table
    y: Images | Table
    own: Numbers
    index: int
    p: float
    _mask: Floats = field(init=False)

    def __post_init__(self) -> None:
        across = padded_batch(self.x) if isinstance(self.x, Images) else self.x.batch
        self._mask = np.zeros(across * self.x.features, np.float32)

    def forward(self, count: int) -> None:
        """Draw a mask, and apply it."""
        across = LANES if isinstance(self.x, Images) else 0
        key = self.own.keys[self.index]
        pointwise.draw_mask(self._mask, count, self.x.features, across, key, 1 - self.p)
        pointwise.multiply_mask(self.x.data, self._mask, self.y.data, runs_of(self.x, self.y, count))

    def backward(self, count: int) -> None:
        """Apply the same mask; the roles of the two buffers' borders change sides."""
        pointwise.multiply_mask(self.y.grads, self._mask, self.x.grads, runs_of(self.y, self.x, count))


def padded_batch(images: Images) -> int:
    """Lanes of all blocks of images."""
    return blocks_of(images.batch) * LANES


@dataclass(slots=True)
class MaxPoolOp:
    """Max-pooling; it remembers which pixel of each window was the largest."""

    x: Images
    y: Images
    size: Three
    _chosen: npt.NDArray[np.int32] = field(init=False)

    def __post_init__(self) -> None:
        self._chosen = np.zeros(padded_batch(self.y) * self.y.features, np.int32)

    def forward(self, count: int) -> None:
        """See `pool.largest`."""
        x, y = self.x, self.y
        pool.largest(blocks_of(count), x.data, x.form, self.size, y.data, y.form, self._chosen)

    def backward(self, count: int) -> None:
        """See `pool.largest_back`."""
        x, y = self.x, self.y
        pool.largest_back(blocks_of(count), y.grads, y.form, self.size, self._chosen, x.grads, x.form)


@dataclass(slots=True)
class MeanPoolOp:
    """Average pooling."""

    x: Images
    y: Images
    size: Three

    def forward(self, count: int) -> None:
        """See `pool.mean`."""
        pool.mean(blocks_of(count), self.x.data, self.x.form, self.size, self.y.data, self.y.form)

    def backward(self, count: int) -> None:
        """See `pool.mean_back`."""
        pool.mean_back(blocks_of(count), self.y.grads, self.y.form, self.size, self.x.grads, self.x.form)


@dataclass(slots=True)
class FlattenOp:
    """From images to a table."""

    x: Images
    y: Table

    def forward(self, count: int) -> None:
        """See `move.flatten`."""
        move.flatten(count, self.x.data, self.x.form, self.y.data, self.y.form[1])

    def backward(self, count: int) -> None:
        """See `move.flatten_back`."""
        move.flatten_back(count, self.y.grads, self.y.form[1], self.x.grads, self.x.form)


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
            normalize.moments(x.data, runs, size, self._live(count), numbers, mean, scale)
            normalize.follow(own.statistics, mean, scale, self.statistics, channels, numbers, self.momentum)
            self.batches += 1
        else:
            mean[:channels], scale[:channels] = (own.statistics[at : at + channels] for at in self.statistics)
        scale[:channels] = 1 / np.sqrt(scale[:channels] + np.float32(self.eps))
        normalize.forward(x.data, self.y.data, runs, size, own.weights, self.offsets, mean, scale)

    def backward(self, count: int) -> None:
        """See `normalize`."""
        x, dy, own, runs, size = self.x, self.y.grads, self.own, self._runs(count), self._size
        normalize.to_weights(x.data, dy, runs, size, self._mean, self._scale, own.grads, self.offsets)
        numbers = self._numbers(count) if count > 1 else 0
        known = normalize.coefficients(own.weights, own.grads, self.offsets, self._scale, numbers, size[0])
        normalize.to_inputs(x.data, dy, x.grads, runs, size, self._live(count), self._mean, known)

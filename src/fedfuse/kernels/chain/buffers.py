"""Where a chain keeps its numbers: images, tables, and all weights in one long row; and how rows get in and out.

Images are laid out [block][row][column][channel][lane], the batch's examples in the lanes of as many blocks as it
takes. A form of images is (height, width, border, channels), the height and width without the border, which is zero and
as wide as the next convolution's padding. A form of tables is (columns, length of a row); each row is filled up with
zeros to a multiple of LANES.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from fedfuse.kernels.chain.pointwise import Runs
from fedfuse.kernels.chain.tiles import Four, Two
from fedfuse.kernels.target import LANES, Floats, Ints, compile_kernel, pad_to_lanes

_TOGETHER = 16  # lanes, which are a multiple of it


def blocks_of(count: int) -> int:
    """Blocks of lanes that `count` examples fill.

    Example:
        >>> blocks_of(1), blocks_of(LANES + 1)
        (1, 2)
    """
    return -(-count // LANES)


@dataclass(slots=True, eq=False)
class Images:
    """Values and gradients laid out [block][row][column][channel][lane], within a border that stays zero."""

    batch: int
    channels: int
    height: int
    width: int
    border: int = 0
    form: Four = field(init=False)  # height, width, border, channels
    data: Floats = field(init=False)
    grads: Floats = field(init=False)

    def __post_init__(self) -> None:
        self.form = self.height, self.width, self.border, self.channels
        size = blocks_of(self.batch) * (self.height + 2 * self.border) * self._line
        self.data, self.grads = np.zeros(size, np.float32), np.zeros(size, np.float32)

    @property
    def _line(self) -> int:
        return (self.width + 2 * self.border) * self.channels * LANES

    @property
    def features(self) -> int:
        """Numbers of one example."""
        return self.height * self.width * self.channels

    def strides(self) -> tuple[int, int, int]:
        """Where the first row begins, and how far it is from block to block and from row to row."""
        first = self.border * (self._line + self.channels * LANES)
        return first, (self.height + 2 * self.border) * self._line, self._line

    def copy_out(self, numbers: Floats, count: int, scale: float = 1.0) -> Tensor:
        """Values or gradients of the first examples, times a scale, as torch has them; channels are last in memory."""
        rows = np.empty(count * self.features, np.float32)
        images_out(count, numbers, self.form, scale, rows)
        return torch.from_numpy(rows).view(count, self.height, self.width, self.channels).permute(0, 3, 1, 2)

    def runs(self, other: Images, count: int) -> Runs:
        """These images and others of their size as runs of numbers; see `pointwise`."""
        return (blocks_of(count), self.height, self.width * self.channels * LANES, *self.strides(), *other.strides())


@dataclass(slots=True, eq=False)
class Table:
    """Values and gradients of one row per example, filled up with zeros."""

    batch: int
    columns: int
    features: int = field(init=False)  # numbers of one example, the filling too
    form: Two = field(init=False)  # columns, and the length of a row
    data: Floats = field(init=False)
    grads: Floats = field(init=False)

    def __post_init__(self) -> None:
        self.features = pad_to_lanes(self.columns)
        self.form = self.columns, self.features
        size = self.batch * self.features
        self.data, self.grads = np.zeros(size, np.float32), np.zeros(size, np.float32)

    def rows_of(self, numbers: Floats, count: int) -> Tensor:
        """Values or gradients of the first examples without the filling; a view."""
        return torch.from_numpy(numbers[: count * self.features]).view(count, self.features)[:, : self.columns]

    def runs(self, other: Table, count: int) -> Runs:  # noqa: ARG002 - both lie alike
        """This table and another of its size as one run of numbers; see `pointwise`."""
        return (1, 1, count * self.features, 0, 0, 0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a tensor lies in a long row: its shape, and the order of its axes there."""

    offset: int
    shape: tuple[int, ...]
    axes: tuple[int, ...]
    rows: int

    @property
    def columns(self) -> int:
        """Numbers of a row."""
        return math.prod(self.shape) // self.rows

    @property
    def length(self) -> int:
        """Numbers from row to row."""
        return pad_to_lanes(self.columns)

    def view(self, row: Floats) -> Tensor:
        """That part of the row as a tensor with one row per output, without the filling."""
        whole = torch.from_numpy(row)
        return whole.as_strided((self.rows, self.columns), (self.length, 1), self.offset)

    def write(self, row: Floats, tensor: Tensor) -> None:
        """Copy a tensor into the row."""
        self.view(row).copy_(tensor.reshape(self.shape).permute(self.axes).reshape(self.rows, -1))

    def read(self, row: Floats, tensor: Tensor) -> None:
        """Copy it back."""
        there = [self.shape[axis] for axis in self.axes]
        back = [self.axes.index(axis) for axis in range(len(self.axes))]
        tensor.copy_(self.view(row).reshape(there).permute(back).reshape(tensor.shape))


@dataclass(slots=True)
class FlatTensors:
    """Tensors by name, side by side in one long row; every one begins at a multiple of LANES."""

    slots: dict[str, Slot] = field(default_factory=dict)
    size: int = 0

    def add(self, name: str, shape: tuple[int, ...], axes: tuple[int, ...], rows: int) -> int:
        """Make room for a tensor; gives where it begins."""
        slot = Slot(self.size, shape, axes, rows)
        self.slots[name] = slot
        self.size += rows * slot.length
        return slot.offset

    def skip(self, count: int) -> int:
        """Make room that stays zero; gives where it begins."""
        begin = self.size
        self.size += pad_to_lanes(count)
        return begin

    def zeros(self) -> Floats:
        """A long row of zeros."""
        return np.zeros(self.size, np.float32)

    def write(self, tensors: Mapping[str, Tensor], row: Floats) -> Floats:
        """Copy these tensors into a long row, which has zeros between them; gives the row back."""
        for name, tensor in tensors.items():
            self.slots[name].write(row, tensor)
        return row


@compile_kernel
def pixel(form: Four, block: int, h: int, q: int) -> int:
    """Where a pixel of images of this form begins; rows and columns count from the border's end."""
    height, width, border, channels = form
    return ((block * (height + 2 * border) + h + border) * (width + 2 * border) + q + border) * channels * LANES


@compile_kernel
def rows_in(count: int, x: Floats, order: Ints, begin: int, features: int, length: int, table: Floats) -> None:
    """table[i] = x[order[begin + i]], whose rows are `features` long."""
    for i in range(count):
        a, b = order[begin + i] * features, i * length
        source, target = x[a : a + features], table[b : b + features]
        for f in range(features):
            target[f] = source[f]


@compile_kernel
def images_in(count: int, x: Floats, order: Ints, begin: int, images: Floats, form: Four) -> None:
    """images[block, …, lane] = x[order[begin + i]], whose rows are [row][column][channel]; lanes without are zero."""
    for block in range((count + LANES - 1) // LANES):
        first = block * LANES
        for lane in range(0, LANES, _TOGETHER):
            if first + lane + _TOGETHER <= count:
                rows = order[begin + first + lane : begin + first + lane + _TOGETHER]
                _lanes_in(x, rows, images, form, block, lane)
            else:
                for one in range(lane, lane + _TOGETHER):
                    row = order[begin + first + one] if first + one < count else -1
                    _lane_in(x, row, images, form, block, one)


@compile_kernel
def _lanes_in(x: Floats, rows: Ints, images: Floats, form: Four, block: int, lane: int) -> None:
    """Fill `_TOGETHER` lanes at once, so that their cache misses overlap."""
    height, line = form[0], form[1] * form[3]
    size = height * line
    for h in range(height):
        b = pixel(form, block, h, 0) + lane
        for v in range(line):
            target = images[b + v * LANES : b + v * LANES + _TOGETHER]
            for i in range(_TOGETHER):
                target[i] = x[np.uint64(rows[i] * size + h * line + v)]  # unsigned: no index counts from the end


@compile_kernel
def _lane_in(x: Floats, row: int, images: Floats, form: Four, block: int, lane: int) -> None:
    """Fill one lane, with zeros where there is no row."""
    height, line = form[0], form[1] * form[3]
    for h in range(height):
        a, b = (row * height + h) * line, pixel(form, block, h, 0) + lane
        for v in range(line):
            images[b + v * LANES] = x[a + v] if row >= 0 else np.float32(0)


@compile_kernel
def images_out(count: int, images: Floats, form: Four, scale: float, rows: Floats) -> None:
    """rows[i] = scale · image i as a row, [row][column][channel]; the inverse of `images_in`."""
    height, line, factor = form[0], form[1] * form[3], np.float32(scale)
    size = height * line
    for block in range((count + LANES - 1) // LANES):
        first = block * LANES
        lanes = min(LANES, count - first)
        for h in range(height):
            b = pixel(form, block, h, 0)
            for lane in range(lanes):
                a = (first + lane) * size + h * line
                target = rows[a : a + line]
                for v in range(line):
                    target[v] = factor * images[b + v * LANES + lane]


@compile_kernel
def flatten(count: int, images: Floats, form: Four, table: Floats, length: int) -> None:
    """table[i] = image i as a row, [row][column][channel]; the images have no border."""
    features = form[0] * form[1] * form[3]
    for block in range((count + LANES - 1) // LANES):
        first = block * LANES
        lanes = min(LANES, count - first)
        for f in range(features):
            a = (block * features + f) * LANES
            for lane in range(lanes):
                table[(first + lane) * length + f] = images[a + lane]


@compile_kernel
def flatten_back(count: int, table: Floats, length: int, images: Floats, form: Four) -> None:
    """The inverse of `flatten`; lanes without an example become zero."""
    features = form[0] * form[1] * form[3]
    for block in range((count + LANES - 1) // LANES):
        first = block * LANES
        lanes = min(LANES, count - first)
        for f in range(features):
            a = (block * features + f) * LANES
            for lane in range(lanes):
                images[a + lane] = table[(first + lane) * length + f]
            for lane in range(lanes, LANES):
                images[a + lane] = 0

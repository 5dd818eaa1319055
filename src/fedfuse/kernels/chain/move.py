"""Examples from where they lie into tables or lanes, and from lanes into tables and back."""

from __future__ import annotations

import numpy as np

from fedfuse.kernels.chain.convolve import pixel
from fedfuse.kernels.chain.tiles import Four
from fedfuse.kernels.target import LANES, Floats, Ints, compile_kernel

_TOGETHER = 16  # lanes, which are a multiple of it


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
    """Fill so many lanes at once: what misses the cache is waited for together."""
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

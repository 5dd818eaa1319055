"""Fully connected layers on tables of one row per example, each row filled up with zeros to a multiple of LANES.

A form of tables is (columns, length of a row); weights have one row per output, as long as the input's rows.
"""

from __future__ import annotations

from fedfuse.kernels.chain.tiles import LEFTS, RIGHTS, ROWS, Two, fill, products, share, tile
from fedfuse.kernels.target import LANES, Floats, compile_kernel


@compile_kernel
def forward(count: int, x: Floats, xform: Two, w: Floats, offsets: Two, y: Floats, yform: Two) -> None:
    """Write y = x Wᵀ + bias."""
    (wo, bo), (outputs, row), length = offsets, yform, xform[1]
    for i in range(count):
        for o in range(outputs):
            y[i * row + o] = w[bo + o]
    lefts, rights = (count + LEFTS - 1) // LEFTS, (outputs + RIGHTS - 1) // RIGHTS
    i, counts = 0, (1, length // LANES)
    for s in range(lefts):
        n, j = share(count - i, lefts - s), 0
        for t in range(rights):
            m = share(outputs - j, rights - t)
            ws, xs = (wo + j * length, 0, LANES, length), (i * length, 0, LANES, length)
            products(n, m, counts, w, ws, x, xs, y, (i * row + j, row, 1))
            j += m
        i += n


@compile_kernel
def to_inputs(count: int, dy: Floats, yform: Two, w: Floats, wo: int, zero: Floats, dx: Floats, xform: Two) -> None:
    """Write dx = dy W."""
    tiles, length, row = (count + ROWS - 1) // ROWS, xform[1], yform[1]
    for c in range(0, length, LANES):
        i = 0
        for t in range(tiles):
            n = share(count - i, tiles - t)
            ws, ys = (wo + c, 0, 0, length), (i * row, 0, 0, 1, row)
            tile(n, (1, 1, yform[0]), w, ws, dy, ys, zero, (0, 0), dx, (i * length + c, length))
            i += n


@compile_kernel
def to_weights(count: int, x: Floats, xform: Two, dy: Floats, yform: Two, zero: Floats, g: Floats, go: int) -> None:
    """Write dW = dyᵀ x."""
    (outputs, row), length = yform, xform[1]
    tiles = (outputs + ROWS - 1) // ROWS
    for c in range(0, length, LANES):
        o = 0
        for t in range(tiles):
            n = share(outputs - o, tiles - t)
            xs, ys = (c, 0, 0, length), (o, 0, 0, row, 1)
            tile(n, (1, 1, count), x, xs, dy, ys, zero, (0, 0), g, (go + o * length + c, length))
            o += n


@compile_kernel
def to_biases(count: int, dy: Floats, yform: Two, g: Floats, go: int) -> None:
    """The sums of the columns of dy."""
    outputs, row = yform
    sums = g[go : go + outputs]
    fill(g, go, go + outputs, 0.0)
    for i in range(count):
        here = dy[i * row : i * row + outputs]
        for o in range(outputs):
            sums[o] += here[o]

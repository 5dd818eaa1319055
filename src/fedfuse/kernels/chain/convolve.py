"""Convolutions on images laid out [block][row][column][channel][lane], the batch's examples in the lanes.

A form of images is (height, width, border, channels), the height and width without the border, which is zero and as
wide as the next convolution's padding.
"""

from __future__ import annotations

from fedfuse.kernels.chain.tiles import LEFTS, RIGHTS, ROWS, Four, Three, Two, fill, products, share, tile, total
from fedfuse.kernels.target import LANES, Floats, compile_kernel

_NEAR = 6144  # numbers of an output's gradient that are gone through while they are near (24 KiB)


@compile_kernel
def pixel(form: Four, block: int, h: int, q: int) -> int:
    """Where a pixel of images of this form begins; rows and columns count from the border's end."""
    height, width, border, channels = form
    return ((block * (height + 2 * border) + h + border) * (width + 2 * border) + q + border) * channels * LANES


@compile_kernel
def forward(blocks: int, x: Floats, xform: Four, w: Floats, offsets: Two, size: Three, y: Floats, yform: Four) -> None:
    """Write y = bias + Σ w · x.

    Args:
        blocks: how many blocks of lanes.
        x: the images.
        xform: their form.
        w: all weights of the network.
        offsets: where the layer's weights and where its biases begin.
        size: the kernel's side, its stride, and the length of a row of weights.
        y: the images that come out.
        yform: their form.
    """
    (wo, bo), (kernel, stride, row) = offsets, size
    outputs, taps = yform[3], kernel * xform[3]
    line, tiles = (xform[1] + 2 * xform[2]) * xform[3] * LANES, (yform[3] + ROWS - 1) // ROWS
    for block in range(blocks):
        o = 0
        for t in range(tiles):
            n = share(outputs - o, tiles - t)
            ws = (wo + o * row, taps, 0, 1, row)
            for h in range(yform[0]):
                for q in range(yform[1]):
                    xo = pixel(xform, block, h * stride - xform[2], q * stride - xform[2])
                    zo = pixel(yform, block, h, q) + o * LANES
                    tile(n, (kernel, 1, taps), x, (xo, line, 0, LANES), w, ws, w, (bo + o, 1), y, (zo, LANES))
            o += n


@compile_kernel
def _reach(position: int, kernel: int, stride: int, outputs: int) -> Three:
    """Of the outputs that a pixel at this position of the padded input reaches: the last, its tap, and how many."""
    tap = position % stride
    last = (position - tap) // stride
    if last > outputs - 1:
        tap += (last - outputs + 1) * stride
        last = outputs - 1
    taps = (kernel - 1 - tap) // stride + 1 if tap < kernel else 0
    return last, tap, min(taps, last + 1)


@compile_kernel
def to_inputs(
    blocks: int, dy: Floats, yform: Four, w: Floats, wo: int, size: Three, zero: Floats, dx: Floats, xform: Four
) -> None:
    """The gradient with respect to x within its border: every pixel gathers from the outputs it reached."""
    height, width, border, inputs = xform
    kernel, stride, row = size
    column, line = yform[3] * LANES, (yform[1] + 2 * yform[2]) * yform[3] * LANES
    tiles = (inputs + ROWS - 1) // ROWS
    for block in range(blocks):
        c = 0
        for t in range(tiles):
            n = share(inputs - c, tiles - t)
            for h in range(height):
                last_h, tap_h, taps_h = _reach(h + border, kernel, stride, yform[0])
                for q in range(width):
                    last_q, tap_q, taps_q = _reach(q + border, kernel, stride, yform[1])
                    ys = (pixel(yform, block, last_h, last_q), -line, -column, LANES)
                    first = wo + (tap_h * kernel + tap_q) * inputs + c
                    ws = (first, stride * kernel * inputs, stride * inputs, row, 1)
                    zs = (pixel(xform, block, h, q) + c * LANES, LANES)
                    tile(n, (taps_h, taps_q, yform[3]), dy, ys, w, ws, zero, (0, 0), dx, zs)
            c += n


@compile_kernel
def to_weights(blocks: int, x: Floats, xform: Four, dy: Floats, yform: Four, size: Three, g: Floats, go: int) -> None:
    """The gradient with respect to the weights: inner products over pixels and lanes."""
    kernel, stride, row = size
    outputs, taps = yform[3], kernel * xform[3]
    fill(g, go, go + outputs * row, 0.0)
    lefts, rights = (outputs + LEFTS - 1) // LEFTS, (taps + RIGHTS - 1) // RIGHTS
    line, column = (yform[1] + 2 * yform[2]) * outputs * LANES, outputs * LANES
    down, right = stride * (xform[1] + 2 * xform[2]) * xform[3] * LANES, stride * xform[3] * LANES
    rows = max(1, _NEAR // (yform[1] * LEFTS * LANES))
    for block in range(blocks):
        for h in range(0, yform[0], rows):
            counts, o = (min(rows, yform[0] - h), yform[1]), 0
            for i in range(lefts):
                n = share(outputs - o, lefts - i)
                ds = (pixel(yform, block, h, 0) + o * LANES, line, column, LANES)
                for k in range(kernel):
                    xo, j = pixel(xform, block, h * stride + k - xform[2], -xform[2]), 0
                    for t in range(rights):
                        m = share(taps - j, rights - t)
                        xs, gs = (xo + j * LANES, down, right, LANES), (go + o * row + k * taps + j, row, 1)
                        products(n, m, counts, x, xs, dy, ds, g, gs)
                        j += m
                o += n


@compile_kernel
def to_biases(blocks: int, dy: Floats, yform: Four, g: Floats, go: int, sums: Floats) -> None:
    """The gradient with respect to the biases: sums over pixels and lanes."""
    size = yform[3] * LANES
    fill(sums, 0, size, 0.0)
    for block in range(blocks):
        for h in range(yform[0]):
            start = pixel(yform, block, h, 0)
            for q in range(yform[1]):
                here = dy[start + q * size : start + (q + 1) * size]
                for i in range(size):
                    sums[i] += here[i]
    for o in range(yform[3]):
        g[go + o] = total(sums, o * LANES, (o + 1) * LANES)

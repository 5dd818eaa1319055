"""Loops over images: convolutions and pooling, forward and back. See `buffers` for the layout and for forms."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fedfuse.kernels.chain.buffers import pixel
from fedfuse.kernels.chain.tiles import LEFTS, RIGHTS, ROWS, Four, Three, Two, fill, products, share, tile, total
from fedfuse.kernels.target import LANES, Floats, compile_kernel

Argmaxes = npt.NDArray[np.int32]
_NEAR = 6144  # numbers of an output's gradient that are gone through while they are near (24 KiB)


@compile_kernel
def convolve(blocks: int, x: Floats, xform: Four, w: Floats, offsets: Two, size: Three, y: Floats, yform: Four) -> None:
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
        # output channels outermost: a tile's rows of weights stay in the cache for the whole image
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
def convolve_to_inputs(
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
def _reach(position: int, kernel: int, stride: int, outputs: int) -> Three:
    """Of the outputs that a pixel at this position of the padded input reaches: the last, its tap, and how many."""
    # Tap t of output o reads position p = o · stride + t. The largest o has the smallest t; from there, one output less
    # is one stride more of the tap. Where the largest o lies beyond the edge, whole strides lead back to the last one.
    tap = position % stride
    last = (position - tap) // stride
    if last > outputs - 1:
        tap += (last - outputs + 1) * stride
        last = outputs - 1
    taps = (kernel - 1 - tap) // stride + 1 if tap < kernel else 0
    return last, tap, min(taps, last + 1)


@compile_kernel
def convolve_to_weights(
    blocks: int, x: Floats, xform: Four, dy: Floats, yform: Four, size: Three, g: Floats, go: int
) -> None:
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
def convolve_to_biases(blocks: int, dy: Floats, yform: Four, g: Floats, go: int, sums: Floats) -> None:
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


@compile_kernel
def max_pool(blocks: int, x: Floats, xform: Four, size: Three, y: Floats, yform: Four, chosen: Argmaxes) -> None:
    """Write y = the largest of each window, and which it was: the first of equals, and NaN before all, as in torch."""
    kernel, stride, padding = size
    length = xform[3] * LANES
    for block in range(blocks):
        for h in range(yform[0]):
            for q in range(yform[1]):
                b = pixel(yform, block, h, q)
                c = ((block * yform[0] + h) * yform[1] + q) * length
                target, largest_at = y[b : b + length], chosen[c : c + length]
                if kernel == 2 and padding == 0:
                    a, d = pixel(xform, block, h * stride, q * stride), pixel(xform, block, h * stride + 1, q * stride)
                    _take_largest(x[a : a + 2 * length], x[d : d + 2 * length], target, largest_at)
                    continue
                fill(y, b, b + length, -np.inf)
                for k in range(kernel * kernel):
                    i, j = h * stride - padding + k // kernel, q * stride - padding + k % kernel
                    if 0 <= i < xform[0] and 0 <= j < xform[1]:
                        a = pixel(xform, block, i, j)
                        _take_larger(x[a : a + length], target, largest_at, k)


@compile_kernel
def _take_largest(upper: Floats, lower: Floats, target: Floats, largest_at: Argmaxes) -> None:
    """Of two by two pixels, without going through memory in between."""
    n = target.size
    a, b, c, d = upper[:n], upper[n:], lower[:n], lower[n:]
    for v in range(n):
        best, k = a[v], np.int32(0)
        for_b = (b[v] > best) | (b[v] != b[v])
        best, k = (b[v], np.int32(1)) if for_b else (best, k)
        for_c = (c[v] > best) | (c[v] != c[v])
        best, k = (c[v], np.int32(2)) if for_c else (best, k)
        for_d = (d[v] > best) | (d[v] != d[v])
        target[v] = d[v] if for_d else best
        largest_at[v] = np.int32(3) if for_d else k


@compile_kernel
def _take_larger(source: Floats, target: Floats, largest_at: Argmaxes, k: int) -> None:
    for v in range(source.size):
        here, best = source[v], target[v]
        more = (here > best) | (here != here)
        target[v] = here if more else best
        largest_at[v] = np.int32(k) if more else largest_at[v]


@compile_kernel
def max_pool_back(blocks: int, dy: Floats, yform: Four, size: Three, chosen: Argmaxes, dx: Floats, xform: Four) -> None:
    """Write dx = dy at the position that was the largest; windows that overlap add up."""
    kernel, stride, padding = size
    length, overlap = xform[3] * LANES, stride < kernel
    if overlap:
        fill(dx, 0, blocks * xform[0] * xform[1] * length, 0.0)
    for block in range(blocks):
        for h in range(yform[0]):
            for q in range(yform[1]):
                b = pixel(yform, block, h, q)
                c = ((block * yform[0] + h) * yform[1] + q) * length
                source, largest_at = dy[b : b + length], chosen[c : c + length]
                for k in range(kernel * kernel):
                    i, j = h * stride - padding + k // kernel, q * stride - padding + k % kernel
                    if 0 <= i < xform[0] and 0 <= j < xform[1]:
                        a = pixel(xform, block, i, j)
                        _give(source, largest_at, dx[a : a + length], k, overlap)


@compile_kernel
def _give(source: Floats, largest_at: Argmaxes, target: Floats, k: int, add: bool) -> None:
    zero = np.float32(0)
    if add:
        for v in range(source.size):
            target[v] += source[v] if largest_at[v] == k else zero
    else:
        for v in range(source.size):
            target[v] = source[v] if largest_at[v] == k else zero


@compile_kernel
def mean_pool(blocks: int, x: Floats, xform: Four, size: Three, y: Floats, yform: Four) -> None:
    """Write y = the mean of each window."""
    kernel, stride, _ = size
    length, part = xform[3] * LANES, np.float32(1 / (kernel * kernel))
    for block in range(blocks):
        for h in range(yform[0]):
            for q in range(yform[1]):
                b = pixel(yform, block, h, q)
                target = y[b : b + length]
                fill(y, b, b + length, 0.0)
                for k in range(kernel * kernel):
                    a = pixel(xform, block, h * stride + k // kernel, q * stride + k % kernel)
                    source = x[a : a + length]
                    for v in range(length):
                        target[v] += source[v]
                for v in range(length):
                    target[v] *= part


@compile_kernel
def mean_pool_back(blocks: int, dy: Floats, yform: Four, size: Three, dx: Floats, xform: Four) -> None:
    """Write dx = dy shared out evenly; windows that overlap add up."""
    kernel, stride, _ = size
    length, part = xform[3] * LANES, np.float32(1 / (kernel * kernel))
    fill(dx, 0, blocks * xform[0] * xform[1] * length, 0.0)
    for block in range(blocks):
        for h in range(yform[0]):
            for q in range(yform[1]):
                b = pixel(yform, block, h, q)
                source = dy[b : b + length]
                for k in range(kernel * kernel):
                    a = pixel(xform, block, h * stride + k // kernel, q * stride + k % kernel)
                    target = dx[a : a + length]
                    for v in range(length):
                        target[v] += part * source[v]

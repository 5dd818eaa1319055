"""Pooling of images laid out [block][row][column][channel][lane]; what is pooled has no border, what comes may."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fedfuse.kernels.chain.convolve import pixel
from fedfuse.kernels.chain.tiles import Four, Three, fill
from fedfuse.kernels.target import LANES, Floats, compile_kernel

Argmaxes = npt.NDArray[np.int32]


@compile_kernel
def largest(blocks: int, x: Floats, xform: Four, size: Three, y: Floats, yform: Four, chosen: Argmaxes) -> None:
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
def largest_back(blocks: int, dy: Floats, yform: Four, size: Three, chosen: Argmaxes, dx: Floats, xform: Four) -> None:
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
def mean(blocks: int, x: Floats, xform: Four, size: Three, y: Floats, yform: Four) -> None:
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
def mean_back(blocks: int, dy: Floats, yform: Four, size: Three, dx: Floats, xform: Four) -> None:
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

"""Batch norms. Images and tables are runs of numbers (see `pointwise`); a channel's numbers lie side by side.

An image's row is [column][channel][lane]; a table is one row after another of [feature], as if it had one lane. So
both are pixels of `size` = (channels, lanes) numbers, and sums are first taken for every one of these. `live` is 1 for
the numbers of a pixel that are an example's in the last group, and 0 for lanes without one.
"""

from __future__ import annotations

import numpy as np

from fedfuse.kernels.chain.pointwise import Runs
from fedfuse.kernels.chain.tiles import Two, fill, total
from fedfuse.kernels.target import Floats, compile_kernel


@compile_kernel
def moments(x: Floats, runs: Runs, size: Two, live: Floats, count: int, mean: Floats, variance: Floats) -> None:
    """The mean and the biased variance of every channel, which has `count` numbers in all.

    Both arrays have room for a pixel; the first of each channel's numbers there are the result.
    """
    groups, rows, length, xo, xg, xr, _, _, _ = runs
    pixel = size[0] * size[1]
    fill(mean, 0, pixel, 0.0)
    for g in range(groups):
        for a in range(xo + g * xg, xo + g * xg + rows * xr, xr):
            for p in range(a, a + length, pixel):
                here = x[p : p + pixel]
                if g == groups - 1:
                    for i in range(pixel):
                        mean[i] += live[i] * here[i]
                else:
                    for i in range(pixel):
                        mean[i] += here[i]
    _gather(mean, size, count)
    _add_squares(x, runs, size, live, mean, variance)
    _gather(variance, size, count)


@compile_kernel
def _gather(sums: Floats, size: Two, count: int) -> None:
    """Every channel's sum over its lanes, divided by the count, moved to the front."""
    channels, lanes = size
    for c in range(channels):
        whole = 0.0
        for i in range(c * lanes, (c + 1) * lanes):
            whole += np.float64(sums[i])
        sums[c] = whole / count


@compile_kernel
def _add_squares(x: Floats, runs: Runs, size: Two, live: Floats, mean: Floats, variance: Floats) -> None:
    groups, rows, length, xo, xg, xr, _, _, _ = runs
    channels, lanes = size
    fill(variance, 0, channels * lanes, 0.0)
    for g in range(groups):
        for a in range(xo + g * xg, xo + g * xg + rows * xr, xr):
            for p in range(a, a + length, channels * lanes):
                for c in range(channels):
                    middle = mean[c]
                    here, out = x[p + c * lanes : p + (c + 1) * lanes], variance[c * lanes : (c + 1) * lanes]
                    alive = live[c * lanes : (c + 1) * lanes]
                    for i in range(lanes):
                        d = here[i] - middle
                        out[i] += d * d if g < groups - 1 else alive[i] * d * d


@compile_kernel
def follow(
    running: Floats, mean: Floats, variance: Floats, offsets: Two, channels: int, count: int, step: float
) -> None:
    """Running statistics, at `offsets`, go a step towards the batch's; their variance is the unbiased one."""
    part, unbiased = np.float32(step), np.float32(count / (count - 1))
    for c in range(channels):
        running[offsets[0] + c] += part * (mean[c] - running[offsets[0] + c])
        running[offsets[1] + c] += part * (unbiased * variance[c] - running[offsets[1] + c])


@compile_kernel
def forward(x: Floats, y: Floats, runs: Runs, size: Two, w: Floats, offsets: Two, mean: Floats, scale: Floats) -> None:
    """Write y = (x − mean) · scale · weight + bias, scale being one over the standard deviation."""
    groups, rows, length, xo, xg, xr, yo, yg, yr = runs
    (channels, lanes), (wo, bo) = size, offsets
    for g in range(groups):
        for r in range(rows):
            a, b = xo + g * xg + r * xr, yo + g * yg + r * yr
            for p in range(0, length, channels * lanes):
                for c in range(channels):
                    at = p + c * lanes
                    source, target = x[a + at : a + at + lanes], y[b + at : b + at + lanes]
                    factor, middle, bias = scale[c] * w[wo + c], mean[c], w[bo + c]
                    for i in range(lanes):
                        target[i] = (source[i] - middle) * factor + bias


@compile_kernel
def to_weights(
    x: Floats, dy: Floats, runs: Runs, size: Two, mean: Floats, scale: Floats, g: Floats, offsets: Two
) -> None:
    """The gradients of weights, Σ dy · (x − mean) · scale, and of biases, Σ dy; dy is 0 in lanes without an example."""
    groups, rows, length, xo, xg, xr, yo, yg, yr = runs
    channels, lanes = size
    weights, biases = np.zeros(channels * lanes, np.float32), np.zeros(channels * lanes, np.float32)
    for group in range(groups):
        for r in range(rows):
            a, b = xo + group * xg + r * xr, yo + group * yg + r * yr
            for p in range(0, length, channels * lanes):
                for c in range(channels):
                    at, own = p + c * lanes, c * lanes
                    source, pull = x[a + at : a + at + lanes], dy[b + at : b + at + lanes]
                    to_w, to_b, middle = weights[own : own + lanes], biases[own : own + lanes], mean[c]
                    for i in range(lanes):
                        to_w[i] += pull[i] * (source[i] - middle)
                        to_b[i] += pull[i]
    for c in range(channels):
        g[offsets[0] + c] = total(weights, c * lanes, (c + 1) * lanes) * scale[c]
        g[offsets[1] + c] = total(biases, c * lanes, (c + 1) * lanes)


@compile_kernel
def coefficients(
    w: Floats, g: Floats, offsets: Two, scale: Floats, count: int, channels: int
) -> tuple[Floats, Floats, Floats]:
    """Three numbers of every channel for `to_inputs`: weight · scale, Σdy/N, and Σ(dy·x̂)/N · scale."""
    part = np.float32(1 / count) if count else np.float32(0)
    factor, shift, tilt = np.empty(channels, np.float32), np.empty(channels, np.float32), np.empty(channels, np.float32)
    for c in range(channels):
        factor[c] = w[offsets[0] + c] * scale[c]
        shift[c] = g[offsets[1] + c] * part
        tilt[c] = g[offsets[0] + c] * part * scale[c]
    return factor, shift, tilt


@compile_kernel
def to_inputs(
    x: Floats,
    dy: Floats,
    dx: Floats,
    runs: Runs,
    size: Two,
    live: Floats,
    mean: Floats,
    known: tuple[Floats, Floats, Floats],
) -> None:
    """Write dx = weight · scale · (dy − Σdy/N − x̂ Σ(dy·x̂)/N), with what `coefficients` knows.

    For a count of 0 these have no sums, as it must be for statistics that do not depend on x.
    """
    groups, rows, length, xo, xg, xr, yo, yg, yr = runs
    (channels, lanes), (factor, shift, tilt) = size, known
    for group in range(groups):
        last = group == groups - 1
        for r in range(rows):
            a, b = xo + group * xg + r * xr, yo + group * yg + r * yr
            for p in range(0, length, channels * lanes):
                for c in range(channels):
                    at = p + c * lanes
                    source, pull = x[a + at : a + at + lanes], dy[b + at : b + at + lanes]
                    target, alive = dx[a + at : a + at + lanes], live[c * lanes : (c + 1) * lanes]
                    for i in range(lanes):
                        value = factor[c] * (pull[i] - shift[c] - (source[i] - mean[c]) * tilt[c])
                        target[i] = alive[i] * value if last else value

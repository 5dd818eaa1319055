"""Elementwise layers and batch norms, on images or tables as runs of numbers.

A run's form is (groups, rows, numbers in a row, and for x and y each: where the first begins, from group to group,
from row to row); x and y may have other borders, and so other strides. A table is one group of one row.

For batch norms an image's row is [column][channel][lane], and a table is one row after another of [feature], as if it
had one lane. So both are pixels of `size` = (channels, lanes) numbers, and sums are first taken for every one of these.
`live` is 1 for the numbers of a pixel that are an example's in the last group, and 0 for lanes without one.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fedfuse.kernels.chain.tiles import Two, fill, total
from fedfuse.kernels.target import Floats, compile_kernel

Runs = tuple[int, int, int, int, int, int, int, int, int]
ZERO = np.float32(0)


@compile_kernel
def relu(x: Floats, y: Floats, runs: Runs, slope: float) -> None:
    """Write y = x where x > 0, else slope · x; NaN stays NaN."""
    groups, rows, length, xo, xg, xr, yo, yg, yr = runs
    steep = np.float32(slope)
    for g in range(groups):
        for r in range(rows):
            a, b = xo + g * xg + r * xr, yo + g * yg + r * yr
            source, target = x[a : a + length], y[b : b + length]
            for i in range(length):
                target[i] = steep * source[i] if source[i] <= ZERO else source[i]


@compile_kernel
def relu_back(y: Floats, dy: Floats, dx: Floats, runs: Runs, slope: float) -> None:
    """Write dx = dy where y > 0, else slope · dy."""
    groups, rows, length, xo, xg, xr, yo, yg, yr = runs
    steep = np.float32(slope)
    for g in range(groups):
        for r in range(rows):
            a, b = xo + g * xg + r * xr, yo + g * yg + r * yr
            target, seen, source = dx[a : a + length], y[b : b + length], dy[b : b + length]
            for i in range(length):
                target[i] = steep * source[i] if seen[i] <= ZERO else source[i]


@compile_kernel
def tanh(x: Floats, y: Floats, runs: Runs) -> None:
    """Write y = tanh x, by a quotient of polynomials without branches, exact to five units of 2⁻²⁴."""
    groups, rows, length, xo, xg, xr, yo, yg, yr = runs
    for g in range(groups):
        for r in range(rows):
            a, b = xo + g * xg + r * xr, yo + g * yg + r * yr
            source, target = x[a : a + length], y[b : b + length]
            for i in range(length):
                target[i] = _tanh(source[i])


@compile_kernel
def _tanh(x: Any) -> Any:
    """Eigen's approximation; beyond ±7.9 the nearest float32 is ±1."""
    f = np.float32
    v = min(max(x, f(-7.90531110763549805)), f(7.90531110763549805))
    v = x if x != x else v
    s = v * v
    top = s * f(-2.76076847742355e-16) + f(2.00018790482477e-13)
    top = s * top + f(-8.60467152213735e-11)
    top = s * top + f(5.12229709037114e-08)
    top = s * top + f(1.48572235717979e-05)
    top = s * top + f(6.37261928875436e-04)
    top = s * top + f(4.89352455891786e-03)
    low = s * f(1.19825839466702e-06) + f(1.18534705686654e-04)
    low = s * low + f(2.26843463243900e-03)
    low = s * low + f(4.89352518554385e-03)
    return v * top / low


@compile_kernel
def tanh_back(y: Floats, dy: Floats, dx: Floats, runs: Runs) -> None:
    """Write dx = (1 − y²) dy."""
    groups, rows, length, xo, xg, xr, yo, yg, yr = runs
    for g in range(groups):
        for r in range(rows):
            a, b = xo + g * xg + r * xr, yo + g * yg + r * yr
            target, seen, source = dx[a : a + length], y[b : b + length], dy[b : b + length]
            for i in range(length):
                target[i] = (np.float32(1) - seen[i] * seen[i]) * source[i]


@compile_kernel
def draw_mask(mask: Floats, examples: int, features: int, across: int, key: int, keep: float) -> None:
    """Write mask = 1/keep with probability `keep`, else 0: a function of the key, the example and the feature alone.

    Args:
        mask: [group][feature][example] with `across` examples in a group, or [example][feature] if `across` is 0.
        examples: how many.
        features: of each.
        across: as above.
        key: a fresh number of 32 bits for every batch and layer.
        keep: the probability.
    """
    up, below = np.float32(1 / keep), np.uint32(min(keep * 4294967296.0, 4294967295.0))
    for e in range(examples):
        own = _mix(np.uint32(key) ^ _mix(np.uint32(e + 1)))
        first = (e // across) * features * across + e % across if across else e * features
        step = across if across else 1
        for f in range(features):
            drawn = _mix(own + np.uint32(f) * np.uint32(0x9E3779B1))
            mask[first + f * step] = up if drawn < below else ZERO


@compile_kernel
def _mix(value: Any) -> Any:
    """A number of 32 bits stirred until every bit depends on every other (MurmurHash3's finish)."""
    v = np.uint32(value)
    v ^= v >> np.uint32(16)
    v = np.uint32(v * np.uint32(0x85EBCA6B))
    v ^= v >> np.uint32(13)
    v = np.uint32(v * np.uint32(0xC2B2AE35))
    return np.uint32(v ^ (v >> np.uint32(16)))


@compile_kernel
def multiply_mask(x: Floats, mask: Floats, y: Floats, runs: Runs) -> None:
    """Write y = mask · x; the mask has no border."""
    groups, rows, length, xo, xg, xr, yo, yg, yr = runs
    for g in range(groups):
        for r in range(rows):
            a, b, c = xo + g * xg + r * xr, yo + g * yg + r * yr, (g * rows + r) * length
            source, factor, target = x[a : a + length], mask[c : c + length], y[b : b + length]
            for i in range(length):
                target[i] = factor[i] * source[i]


@compile_kernel
def norm_moments(x: Floats, runs: Runs, size: Two, live: Floats, count: int, mean: Floats, variance: Floats) -> None:
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
def follow_statistics(
    running: Floats, mean: Floats, variance: Floats, offsets: Two, channels: int, count: int, step: float
) -> None:
    """Running statistics, at `offsets`, go a step towards the batch's; their variance is the unbiased one."""
    part, unbiased = np.float32(step), np.float32(count / (count - 1))
    for c in range(channels):
        running[offsets[0] + c] += part * (mean[c] - running[offsets[0] + c])
        running[offsets[1] + c] += part * (unbiased * variance[c] - running[offsets[1] + c])


@compile_kernel
def normalize(
    x: Floats, y: Floats, runs: Runs, size: Two, w: Floats, offsets: Two, mean: Floats, scale: Floats
) -> None:
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
def normalize_to_weights(
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
def norm_coefficients(
    w: Floats, g: Floats, offsets: Two, scale: Floats, count: int, channels: int
) -> tuple[Floats, Floats, Floats]:
    """Three numbers of every channel for `normalize_to_inputs`: weight · scale, Σdy/N, and Σ(dy·x̂)/N · scale."""
    part = np.float32(1 / count) if count else np.float32(0)
    factor, shift, tilt = np.empty(channels, np.float32), np.empty(channels, np.float32), np.empty(channels, np.float32)
    for c in range(channels):
        factor[c] = w[offsets[0] + c] * scale[c]
        shift[c] = g[offsets[1] + c] * part
        tilt[c] = g[offsets[0] + c] * part * scale[c]
    return factor, shift, tilt


@compile_kernel
def normalize_to_inputs(
    x: Floats,
    dy: Floats,
    dx: Floats,
    runs: Runs,
    size: Two,
    live: Floats,
    mean: Floats,
    known: tuple[Floats, Floats, Floats],
) -> None:
    """Write dx = weight · scale · (dy − Σdy/N − x̂ Σ(dy·x̂)/N), with what `norm_coefficients` knows.

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

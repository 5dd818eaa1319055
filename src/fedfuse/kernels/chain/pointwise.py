"""Elementwise layers, on images or tables as runs of numbers: x and y may have other borders, and so other strides.

A run's form is (groups, rows, numbers in a row, and for x and for y each: where the first begins, from group to group,
from row to row). A table is one group of one row.
"""

from __future__ import annotations

from typing import Any

import numpy as np

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
def _mix(value: Any) -> Any:
    """A number of 32 bits stirred until every bit depends on every other (MurmurHash3's finish)."""
    v = np.uint32(value)
    v ^= v >> np.uint32(16)
    v = np.uint32(v * np.uint32(0x85EBCA6B))
    v ^= v >> np.uint32(13)
    v = np.uint32(v * np.uint32(0xC2B2AE35))
    return np.uint32(v ^ (v >> np.uint32(16)))


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
def multiply_mask(x: Floats, mask: Floats, y: Floats, runs: Runs) -> None:
    """Write y = mask · x; the mask has no border."""
    groups, rows, length, xo, xg, xr, yo, yg, yr = runs
    for g in range(groups):
        for r in range(rows):
            a, b, c = xo + g * xg + r * xr, yo + g * yg + r * yr, (g * rows + r) * length
            source, factor, target = x[a : a + length], mask[c : c + length], y[b : b + length]
            for i in range(length):
                target[i] = factor[i] * source[i]

"""Loops over tables: fully connected layers, and such layers of Gaussian weights. See `buffers` for forms.

Weights have one row per output, as long as the input's rows. Of Gaussian weights N(μ, v) an output is N(x μᵀ, x² vᵀ)
(local reparametrisation, Kingma et al. 2015), so outputs are drawn instead of weights, and log-variances learn.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fedfuse.kernels.chain.tiles import LEFTS, RIGHTS, ROWS, Two, fill, products, share, tile
from fedfuse.kernels.target import LANES, Floats, compile_exactly, compile_kernel

_TINY = np.float32(1e-16)  # keeps the square root differentiable where nothing varies
_HALF, _ONE = np.float32(0.5), np.float32(1)
_LN2, _LN2_REST = 0.693359375, -2.12194440e-4  # log 2 in two parts, the first times a small whole number exact


@compile_kernel
def connect(count: int, x: Floats, xform: Two, w: Floats, offsets: Two, y: Floats, yform: Two) -> None:
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
def connect_to_inputs(
    count: int, dy: Floats, yform: Two, w: Floats, wo: int, zero: Floats, dx: Floats, xform: Two
) -> None:
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
def connect_to_weights(
    count: int, x: Floats, xform: Two, dy: Floats, yform: Two, zero: Floats, g: Floats, go: int
) -> None:
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
def connect_to_biases(count: int, dy: Floats, yform: Two, g: Floats, go: int) -> None:
    """The sums of the columns of dy."""
    outputs, row = yform
    sums = g[go : go + outputs]
    fill(g, go, go + outputs, 0.0)
    for i in range(count):
        here = dy[i * row : i * row + outputs]
        for o in range(outputs):
            sums[o] += here[o]


@compile_kernel
def square(x: Floats, y: Floats, count: int) -> None:
    """Write y = x² for the first `count` numbers."""
    source, target = x[:count], y[:count]
    for i in range(count):
        target[i] = source[i] * source[i]


@compile_kernel
def add_noise(count: int, y: Floats, variances: Floats, form: Two, noise: Floats) -> None:
    """Add √v ε to y, and leave ∂y/∂v = ε / (2 √v) in place of v; the noise has no filling."""
    outputs, row = form
    for i in range(count):
        out, seen = y[i * row : i * row + outputs], variances[i * row : i * row + outputs]
        drawn = noise[i * outputs : (i + 1) * outputs]
        for o in range(outputs):
            deviation = np.sqrt(seen[o] + _TINY)
            out[o] += deviation * drawn[o]
            seen[o] = _HALF * drawn[o] / deviation


@compile_kernel
def multiply(x: Floats, y: Floats, count: int) -> None:
    """Write y = x y for the first `count` numbers."""
    source, target = x[:count], y[:count]
    for i in range(count):
        target[i] *= source[i]


@compile_kernel
def add_through_squares(x: Floats, through: Floats, dx: Floats, count: int) -> None:
    """Add the gradient that came through x²: dx += 2 x · through."""
    source, given, target = x[:count], through[:count], dx[:count]
    for i in range(count):
        target[i] += (source[i] + source[i]) * given[i]


@compile_kernel
def learn_variances(
    means: Floats,
    grads: Floats,
    begin: int,
    rho: Floats,
    variances: Floats,
    slopes: Floats,
    prior: tuple[Floats, Floats, Floats],
    place: Two,
    weight: float,
    rate: float,
) -> float:
    """Add κ KL's gradient to the means', and take the natural step of log-variances ρ; gives κ KL.

    ∂L/∂ρ = v ∂L/∂v + κ ½ (v/s² − 1), and ρ ← ρ − η ∂L/∂ρ, at most 1 up or down; afterwards v = e^ρ again.

    Args:
        means: all weights, this layer's from `begin` on.
        grads: their gradients.
        begin: see `means`.
        rho: log-variances.
        variances: e^ρ.
        slopes: ∂L/∂v of the loss without KL.
        prior: means, precisions 1/s² and log s² of the prior; filling has 0, 1, 0 and so stays as it is.
        place: where the layer's log-variances begin, and how many there are.
        weight: κ.
        rate: η.
    """
    first, count = place
    kappa, eta, total = np.float32(weight), np.float32(rate), np.float32(0)
    mu, g = means[begin : begin + count], grads[begin : begin + count]
    r, v, d = rho[first : first + count], variances[first : first + count], slopes[first : first + count]
    m, p, s = (
        prior[0][first : first + count],
        prior[1][first : first + count],
        prior[2][first : first + count],
    )
    for i in range(count):
        apart, wider = mu[i] - m[i], v[i] * p[i] - _ONE
        pull = apart * p[i]
        total += wider - (r[i] - s[i]) + apart * pull
        g[i] += kappa * pull
        move = -eta * (v[i] * d[i] + kappa * _HALF * wider)
        r[i] += min(max(move, -_ONE), _ONE)
        v[i] = _variance_of(r[i])
    return 0.5 * weight * np.float64(total)


@compile_kernel
def write_variances(rho: Floats, variances: Floats, begin: int, end: int) -> None:
    """Write v = e^ρ from `begin` to `end`."""
    source, target = rho[begin:end], variances[begin:end]
    for i in range(end - begin):
        target[i] = _variance_of(source[i])


@compile_kernel
def _variance_of(rho: Any) -> Any:
    """Give e^ρ; beyond what a float32 can tell it stays at the end, and NaN stays NaN."""
    near = _exp(min(max(rho, np.float32(-87.0)), np.float32(88.0)))
    return rho if rho != rho else near


@compile_exactly
def _exp(x: float) -> float:
    """Give eˣ of a float32 between −87 and 88, within two units of its last place: 2ⁿ times a polynomial of the rest.

    The polynomial and the two parts of log 2 are those of Cephes' `expf`.
    """
    n = np.floor(x * np.float32(1.4426950408889634) + np.float32(0.5))
    r = x - n * np.float32(_LN2)
    r = r - n * np.float32(_LN2_REST)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * (r * r) + r + np.float32(1.0)
    return p * np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)  # type: ignore[no-any-return]

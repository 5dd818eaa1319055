"""Fully connected layers of Gaussian weights: outputs are drawn instead of weights, and log-variances learn.

Of a layer's weights N(μ, v) an output is N(x μᵀ, x² vᵀ) (local reparametrisation, Kingma et al. 2015). Draws, means and
variances have the forms of `connect`: one row per example, one row of weights per output.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fedfuse.kernels.chain.tiles import Two
from fedfuse.kernels.exponential import exp
from fedfuse.kernels.target import Floats, compile_kernel

_TINY = np.float32(1e-16)  # keeps the square root differentiable where nothing varies
_HALF, _ONE = np.float32(0.5), np.float32(1)


@compile_kernel
def _variance_of(rho: Any) -> Any:
    """Give e^ρ; beyond what a float32 can tell it stays at the end, and NaN stays NaN."""
    near = exp(min(max(rho, np.float32(-87.0)), np.float32(88.0)))
    return rho if rho != rho else near


@compile_kernel
def write_variances(rho: Floats, variances: Floats, begin: int, end: int) -> None:
    """Write v = e^ρ from `begin` to `end`."""
    source, target = rho[begin:end], variances[begin:end]
    for i in range(end - begin):
        target[i] = _variance_of(source[i])


@compile_kernel
def square(x: Floats, y: Floats, count: int) -> None:
    """Write y = x² for so many numbers."""
    source, target = x[:count], y[:count]
    for i in range(count):
        target[i] = source[i] * source[i]


@compile_kernel
def disturb(count: int, y: Floats, variances: Floats, form: Two, noise: Floats) -> None:
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
    """Write y = x y for so many numbers."""
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
def learn(
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

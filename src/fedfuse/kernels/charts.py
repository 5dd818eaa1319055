"""Sums of Gaussians in a chart's coordinates, each mean and each log-variance read once: see `server.aggregate.charts`.

Sums are in float64 and in the order of the clients, every product and sum rounded by itself, so that neither blocks
nor threads nor the processor move a bit. Exponentials are in float32 as torch's are, and like those within two units of
the last place; the two do not share their bits.
"""

from __future__ import annotations

import numpy as np

from fedfuse.kernels.exponential import exp
from fedfuse.kernels.mean import Doubles, add_rows, point_at
from fedfuse.kernels.target import Floats, Ints, compile_exactly

LOGS, VARIANCES, PRECISIONS, MOMENTS = range(4)  # what the second coordinate is
_NEAR = 1024  # numbers whose sums are held at once: both stay in the first cache
_MOST = np.float32(80.0)  # beyond it an exponential might not be a float32, and is torch's


@compile_exactly
def sum_coordinates(
    kind: int,
    power: float,
    rows: tuple[Ints, Ints],
    weights: tuple[Doubles, Doubles],
    begin: int,
    mean: Floats,
    uncertainty: Floats,
) -> bool:
    """Write the mean in a chart and its uncertainty; whether every exponential was in reach.

    Args:
        kind: what the second coordinate is: ρ (LOGS), exp(power ρ) (VARIANCES), the same and the first is m times it
            (PRECISIONS), or exp ρ + (m − m₁)² and the first is m − m₁ (MOMENTS).
        power: 1, ½ or −1.
        rows: where each client's means and log-variances lie, float32.
        weights: of the first coordinate and of the second.
        begin: the first number to fuse.
        mean: filled.
        uncertainty: filled, as the chart has it.
    """
    first, second = np.empty(_NEAR, np.float64), np.empty(_NEAR, np.float64)
    fits = True
    for start in range(0, mean.size, _NEAR):
        count = min(_NEAR, mean.size - start)
        a, b = first[:count], second[:count]
        for i in range(count):
            a[i] = 0.0
            b[i] = 0.0
        if kind in (LOGS, VARIANCES):
            add_rows(rows[0], weights[0], begin + start, a)
        if kind == LOGS:
            add_rows(rows[1], weights[1], begin + start, b)
        elif kind == VARIANCES:
            fits &= _add_variances(rows[1], weights[1], np.float32(power), begin + start, b)  # type: ignore[arg-type]
        origin = point_at(rows[0][0], begin + start, count)
        for k in range(rows[0].size if kind in (PRECISIONS, MOMENTS) else 0):
            m, rho = point_at(rows[0][k], begin + start, count), point_at(rows[1][k], begin + start, count)
            if kind == PRECISIONS:
                fits &= _add_precisions(m, rho, weights[0][k], weights[1][k], a, b)
            else:
                fits &= _add_moments(m, rho, origin, weights[0][k], weights[1][k], a, b)
        _finish(kind, a, b, origin, mean[start : start + count], uncertainty[start : start + count])
    return fits


@compile_exactly
def _finish(kind: int, a: Doubles, b: Doubles, origin: Floats, mean: Floats, uncertainty: Floats) -> None:
    """From sums to mean and uncertainty."""
    for i in range(mean.size):
        if kind == PRECISIONS:
            mean[i] = a[i] / b[i]
            uncertainty[i] = b[i]
        elif kind == MOMENTS:
            mean[i] = a[i] + np.float64(origin[i])
            uncertainty[i] = max(b[i] - a[i] * a[i], 1e-30)
        else:
            mean[i] = a[i]
            uncertainty[i] = b[i]


@compile_exactly
def _add_variances(rows: Ints, weights: Doubles, power: float, begin: int, b: Doubles) -> bool:
    """Add exp(power ρ) of all clients, four while a sum is in its register; so do all below for one."""
    n, last, far = b.size, rows.size - 1, 0
    for k in range(0, rows.size, 4):
        # what is missing to four is the last client again, with weight zero
        j, h, g = min(k + 1, last), min(k + 2, last), min(k + 3, last)
        r0, r1, r2, r3 = (
            point_at(rows[k], begin, n),
            point_at(rows[j], begin, n),
            point_at(rows[h], begin, n),
            point_at(rows[g], begin, n),
        )
        w0, w1, w2, w3 = weights[k], weights[j] * (j > k), weights[h] * (h > j), weights[g] * (g > h)
        for i in range(n):
            p, q, r, s = power * r0[i], power * r1[i], power * r2[i], power * r3[i]
            far |= (not (abs(p) <= _MOST)) | (not (abs(q) <= _MOST))
            far |= (not (abs(r) <= _MOST)) | (not (abs(s) <= _MOST))
            total = b[i] + w0 * np.float64(exp(p))
            total += w1 * np.float64(exp(q))
            total += w2 * np.float64(exp(r))
            b[i] = total + w3 * np.float64(exp(s))
    return far == 0


@compile_exactly
def _add_precisions(m: Floats, rho: Floats, w: float, v: float, a: Doubles, b: Doubles) -> bool:
    far = 0
    for i in range(a.size):
        far |= not (abs(rho[i]) <= _MOST)
        precision = exp(-rho[i])
        a[i] += w * np.float64(m[i] * precision)
        b[i] += v * np.float64(precision)
    return far == 0


@compile_exactly
def _add_moments(m: Floats, rho: Floats, origin: Floats, w: float, v: float, a: Doubles, b: Doubles) -> bool:
    far = 0
    for i in range(a.size):
        far |= not (abs(rho[i]) <= _MOST)
        apart = m[i] - origin[i]
        a[i] += w * np.float64(apart)
        b[i] += v * np.float64(exp(rho[i]) + apart * apart)
    return far == 0

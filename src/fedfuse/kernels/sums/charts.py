"""Means of Gaussians in a chart's coordinates, each mean and log-variance read once: see `server.aggregate.charts`.

Sums are in float64 and in the order of the clients, every rounding where IEEE 754 has it, so that neither blocks nor
threads nor the processor move a bit. Exponentials and logarithms are in float32 as torch's are, and like those
within two units of the last place; the two do not share their bits.
"""

from __future__ import annotations

import numpy as np

from fedfuse.kernels.exponential import REACH
from fedfuse.kernels.sums.chart_rows import WIDTH, make_chart_sums
from fedfuse.kernels.sums.mean import Doubles, weighted_sums
from fedfuse.kernels.target import Floats, Ints, compile_exactly

LOGS, VARIANCES, DEVIATIONS, PRECISIONS, MOMENTS = range(5)  # what the second coordinate is
LEAST = WIDTH  # numbers that are fused at a time: fewer are torch's
_NEAR = 2048  # sums that are held at once: rows are read in long runs, and both kinds of sums stay near
_TOGETHER = 10  # clients that are read side by side

_add_variances, _close_variances = make_chart_sums("variance", 1.0, 1.0)
_add_deviations, _close_deviations = make_chart_sums("variance", 0.5, 2.0)
_add_precisions, _close_precisions = make_chart_sums("precision", -1.0, -1.0)
_add_moments, _close_moments = make_chart_sums("moments", 1.0, 1.0)


@compile_exactly
def fuse(
    kind: int,
    rows: tuple[Ints, Ints],
    weights: tuple[Doubles, Doubles],
    totals: tuple[float, float],
    begin: int,
    mean: Floats,
    logs: Floats,
) -> bool:
    """Write the mean in a chart and its log-variance; whether every exponential and logarithm was in reach.

    Args:
        kind: what the second coordinate is: ρ (LOGS), exp ρ (VARIANCES), exp ½ρ (DEVIATIONS), exp −ρ and the first is
            m times it (PRECISIONS), or exp ρ + (m − m₁)² and the first is m − m₁ (MOMENTS).
        rows: where each client's means and log-variances lie, float32.
        weights: of the first coordinate and of the second; for PRECISIONS and MOMENTS the same.
        totals: what the sums of both are divided by.
        begin: the first number to fuse.
        mean: filled; it has `LEAST` numbers at least.
        logs: filled, as many.
    """
    if kind <= DEVIATIONS:
        weighted_sums(rows[0], weights[0], totals[0], begin, mean)
    if kind == LOGS:
        weighted_sums(rows[1], weights[1], totals[1], begin, logs)
        return True
    sums, share = (np.zeros(_NEAR), np.zeros(_NEAR)), 1.0 / totals[1]
    whole, fits = mean.size // WIDTH * WIDTH, True
    for start in range(0, whole, _NEAR):
        end = min(start + _NEAR, whole)
        fits &= _fuse_block(kind, rows, weights[1], share, begin + start, sums, mean[start:end], logs[start:end])
    if whole < mean.size:  # the last ones together with some before them, which come out as they were
        start = mean.size - WIDTH
        fits &= _fuse_block(kind, rows, weights[1], share, begin + start, sums, mean[start:], logs[start:])
    return fits


@compile_exactly
def _fuse_block(
    kind: int,
    rows: tuple[Ints, Ints],
    weights: Doubles,
    share: float,
    begin: int,
    sums: tuple[Doubles, Doubles],
    mean: Floats,
    logs: Floats,
) -> bool:
    """Sum a block over clients, some of them at a time, and come back from its coordinates with the last of them.

    Sums of few clients never leave the registers: those in memory, zeros, are where they begin.
    """
    a, b, seen, origin = sums[0][: mean.size], sums[1][: mean.size], 0, rows[0][0]
    last = (weights.size - 1) // _TOGETHER * _TOGETHER
    if last:
        a[:] = 0.0
        b[:] = 0.0
    for k in range(0, last, _TOGETHER):
        m, rho, w = rows[0][k : k + _TOGETHER], rows[1][k : k + _TOGETHER], weights[k : k + _TOGETHER]
        for i in range(0, mean.size, WIDTH):
            if kind == VARIANCES:
                seen |= _add_variances(m, rho, w, origin, begin, a, b, i)
            elif kind == DEVIATIONS:
                seen |= _add_deviations(m, rho, w, origin, begin, a, b, i)
            elif kind == PRECISIONS:
                seen |= _add_precisions(m, rho, w, origin, begin, a, b, i)
            else:
                seen |= _add_moments(m, rho, w, origin, begin, a, b, i)
    m, rho, w = rows[0][last:], rows[1][last:], weights[last:]
    for i in range(0, mean.size, WIDTH):
        if kind == VARIANCES:
            seen |= _close_variances(m, rho, w, origin, begin, a, b, i, mean, logs, share)
        elif kind == DEVIATIONS:
            seen |= _close_deviations(m, rho, w, origin, begin, a, b, i, mean, logs, share)
        elif kind == PRECISIONS:
            seen |= _close_precisions(m, rho, w, origin, begin, a, b, i, mean, logs, share)
        else:
            seen |= _close_moments(m, rho, w, origin, begin, a, b, i, mean, logs, share)
    return seen < REACH

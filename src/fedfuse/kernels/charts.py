"""Means of Gaussians in a chart's coordinates, each mean and log-variance read once: see `server.aggregate.charts`.

Sums are in float64 and in the order of the clients, every rounding where IEEE 754 has it, so that neither blocks nor
threads nor the processor move a bit. Exponentials and logarithms are in float32 as torch's are, and like those
within two units of the last place; the two do not share their bits. `fuse` is the way in; `make_chart_sums` builds its
inner loops in vector instructions.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from fedfuse.kernels.sums import Doubles, weighted_sums
from fedfuse.kernels.target import STEP, Floats, Ints, compile_exactly
from fedfuse.kernels.vectors import (
    AHEAD,
    DOUBLE,
    FLOAT,
    INT,
    REACH,
    add_product,
    all_seen,
    build_loop,
    element_at,
    exp_lanes,
    load_vector,
    log_lanes,
    nothing_seen,
    prefetch,
    spread,
)

LOGS, VARIANCES, DEVIATIONS, PRECISIONS, MOMENTS = range(5)  # what the second coordinate is
WIDTH = 2 * STEP  # Gaussians that are fused at a time
LEAST = WIDTH  # numbers that are fused at a time: fewer are torch's
_NEAR = 2048  # sums that are held at once: rows are read in long runs, and both kinds of sums stay near
_TOGETHER = 10  # clients that are read side by side


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


Kind = Literal["variance", "precision", "moments"]
_WIDE = ir.VectorType(DOUBLE, STEP // 2)
_FLOOR = 1e-30  # the least variance of a second moment


def make_chart_sums(kind: Kind, power: float, scale: float) -> tuple[Any, Any]:
    """Two ways to fuse `WIDTH` Gaussians of some clients: on top of sums, and on top of them and back to Gaussians.

    With e = exp(power ρ) the second coordinate is e ("variance", which leaves the first alone), e and the first m · e
    ("precision"), or e + (m − o)² and the first m − o ("moments"), where o are the numbers at `origin`. Coordinates
    are float32; a weight's product with one is rounded together with its sum, in float64. On the way back sums are
    times the last argument, one over the weights' own sum; it leads to a mean, and to scale times the logarithm of
    the second sum (of the variance, for "moments"). Both ways give what was seen by exponentials and logarithms.
    """

    @intrinsic
    def add(typing, means, logs, weights, origin, begin, first, second, at):  # type: ignore[no-untyped-def] # noqa: ARG001
        def generate(context: Any, build: Any, signature: Any, args: Any) -> Any:
            array: Any = lambda i: element_at(context, build, signature.args[i], args[i], args[7])
            *after, seen = _add_clients(context, build, kind, power, signature.args, args)
            targets = [_register(build, array(i), j) for i in _sums(kind) for j in range(4)]
            for total, target in zip(after, targets, strict=True):
                build.store(total, target, align=8)
            return all_seen(build, seen)

        given = (means, logs, weights, types.int64, types.int64, first, second, types.int64)
        return types.int64(*given), generate

    @intrinsic
    def close(typing, means, logs, weights, origin, begin, first, second, at, mean, log, share):  # type: ignore[no-untyped-def] # noqa: ARG001
        def generate(context: Any, build: Any, signature: Any, args: Any) -> Any:
            array: Any = lambda i: element_at(context, build, signature.args[i], args[i], args[7])
            *sums, seen = _add_clients(context, build, kind, power, signature.args, args)
            part = spread(build, args[10], _WIDE.count)
            for j in range(2):
                a, b = sums[: len(sums) - 4][2 * j : 2 * j + 2], sums[-4:][2 * j : 2 * j + 2]
                if kind == "precision":
                    _store_narrow(build, [build.fdiv(x, y) for x, y in zip(a, b, strict=True)], array(8), j)
                a, b = ([build.fmul(x, part) for x in side] for side in (a, b))
                if kind == "moments":
                    origin = _halves(build, _lanes(build, _row(build, args[3], build.add(args[4], args[7])), j))
                    _store_narrow(build, [build.fadd(x, o) for x, o in zip(a, origin, strict=True)], array(8), j)
                    b = [_above_floor(build, build.fsub(y, build.fmul(x, x))) for x, y in zip(a, b, strict=True)]
                value, seen = log_lanes(build, _narrow(build, b), seen)
                _store_lanes(build, build.fmul(value, spread(build, ir.Constant(FLOAT, scale), STEP)), array(9), j)
            return all_seen(build, seen)

        given = (means, logs, weights, types.int64, types.int64, first, second, types.int64, mean, log, types.float64)
        return types.int64(*given), generate

    return add, close


def _sums(kind: Kind) -> tuple[int, ...]:
    """Which arguments are the sums of the coordinates."""
    return (6,) if kind == "variance" else (5, 6)


def _add_clients(context: Any, build: Any, kind: Kind, power: float, kinds: Any, args: Any) -> list[Any]:
    """The sums so far and those of some clients on top, four registers of each coordinate, and what exp has seen."""
    array: Any = lambda i, offset: element_at(context, build, kinds[i], args[i], offset)
    place, one = build.add(args[4], args[7]), ir.Constant(INT, 1)
    lists = [array(i, ir.Constant(INT, 0)) for i in range(3)]
    clients = build.extract_value(context.make_array(kinds[0])(context, build, args[0]).shape, 0)
    before = [build.load(_register(build, array(i, args[7]), j), align=8) for i in _sums(kind) for j in range(4)]
    centers = [_lanes(build, _row(build, args[3], place), j) for j in range(2)] if kind == "moments" else []

    # Two vectors per client: an exponential is a chain of a dozen dependent operations, of which one can run while the
    # other waits. Rows of different clients lie in different pages, so each is fetched ahead (see `AHEAD`).
    def add_client(lists: list[Any], held: list[Any]) -> list[Any]:
        mean, log = (_row(build, build.load(pointer), place) for pointer in lists[:2])
        weight = spread(build, build.load(lists[2]), STEP // 2)
        *totals, seen = held
        pairs = []
        for j in range(2):
            for row in (log,) if kind == "variance" else (mean, log):
                prefetch(build, build.gep(row, [ir.Constant(INT, AHEAD + j * STEP)]))
            e, seen = exp_lanes(build, _lanes(build, log, j), power, seen)
            pairs.append(_coordinates(build, kind, mean, j, e, centers))
        terms = [half for side in zip(*pairs, strict=True) for lanes in side for half in _halves(build, lanes)]
        return [*(add_product(build, weight, t, s) for t, s in zip(terms, totals, strict=True)), seen]

    return list(build_loop(build, clients, (one, one, one), lists, [*before, nothing_seen()], add_client))


def _coordinates(build: Any, kind: Kind, mean: Any, j: int, e: Any, centers: list[Any]) -> tuple[Any, ...]:
    """The coordinates that are summed, of the j-th vector of a row."""
    if kind == "variance":
        return (e,)
    if kind == "precision":
        return build.fmul(_lanes(build, mean, j), e), e
    apart = build.fsub(_lanes(build, mean, j), centers[j])
    return apart, add_product(build, apart, apart, e)


def _row(build: Any, address: Any, place: Any) -> Any:
    return build.gep(build.inttoptr(address, FLOAT.as_pointer()), [place])


def _lanes(build: Any, row: Any, j: int) -> Any:
    """The j-th vector of a row."""
    return load_vector(build, build.gep(row, [ir.Constant(INT, j * STEP)]), STEP)


def _register(build: Any, sums: Any, j: int) -> Any:
    """Where the j-th register of sums is kept."""
    return build.bitcast(build.gep(sums, [ir.Constant(INT, j * _WIDE.count)]), _WIDE.as_pointer())


def _halves(build: Any, lanes: Any) -> list[Any]:
    """A vector of float32 as two of float64."""
    index = ir.VectorType(ir.IntType(32), _WIDE.count)
    places = [ir.Constant(index, [*range(first, first + _WIDE.count)]) for first in (0, _WIDE.count)]
    return [build.fpext(build.shuffle_vector(lanes, lanes, place), _WIDE) for place in places]


def _narrow(build: Any, halves: list[Any]) -> Any:
    """Two vectors of float64 as one of float32."""
    low, high = (build.fptrunc(half, ir.VectorType(FLOAT, _WIDE.count)) for half in halves)
    return build.shuffle_vector(low, high, ir.Constant(ir.VectorType(ir.IntType(32), STEP), [*range(STEP)]))


def _store_narrow(build: Any, halves: list[Any], row: Any, j: int) -> None:
    """Write two vectors of float64 as the j-th vector of a row of float32."""
    _store_lanes(build, _narrow(build, halves), row, j)


def _store_lanes(build: Any, lanes: Any, row: Any, j: int) -> None:
    place = build.gep(row, [ir.Constant(INT, j * STEP)])
    build.store(lanes, build.bitcast(place, lanes.type.as_pointer()), align=4)


def _above_floor(build: Any, variance: Any) -> Any:
    """A variance that rounding has not taken below zero; NaN stays NaN."""
    floor = ir.Constant(_WIDE, [_FLOOR] * _WIDE.count)
    return build.select(build.fcmp_ordered("<", variance, floor), floor, variance)


_add_variances, _close_variances = make_chart_sums("variance", 1.0, 1.0)
_add_deviations, _close_deviations = make_chart_sums("variance", 0.5, 2.0)
_add_precisions, _close_precisions = make_chart_sums("precision", -1.0, -1.0)
_add_moments, _close_moments = make_chart_sums("moments", 1.0, 1.0)

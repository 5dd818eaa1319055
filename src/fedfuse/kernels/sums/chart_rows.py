"""The inner loop of means in charts in vector instructions: coordinates of some Gaussians, summed in registers."""

from __future__ import annotations

from typing import Any, Literal

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from fedfuse.kernels.exponential import all_seen, exp_lanes, fuse_lanes, log_lanes, nothing_seen
from fedfuse.kernels.target import STEP
from fedfuse.kernels.vectors import AHEAD, add_product, build_loop, element_at, load_vector, prefetch, spread

Kind = Literal["variance", "precision", "moments"]
WIDTH = 2 * STEP  # Gaussians that are fused at a time
_INT, _FLOAT = ir.IntType(64), ir.FloatType()
_WIDE = ir.VectorType(ir.DoubleType(), STEP // 2)
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
                _store_lanes(build, build.fmul(value, spread(build, ir.Constant(_FLOAT, scale), STEP)), array(9), j)
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
    place, one = build.add(args[4], args[7]), ir.Constant(_INT, 1)
    lists = [array(i, ir.Constant(_INT, 0)) for i in range(3)]
    clients = build.extract_value(context.make_array(kinds[0])(context, build, args[0]).shape, 0)
    before = [build.load(_register(build, array(i, args[7]), j), align=8) for i in _sums(kind) for j in range(4)]
    centers = [_lanes(build, _row(build, args[3], place), j) for j in range(2)] if kind == "moments" else []

    def add_client(lists: list[Any], held: list[Any]) -> list[Any]:
        mean, log = (_row(build, build.load(pointer), place) for pointer in lists[:2])
        weight = spread(build, build.load(lists[2]), STEP // 2)
        *totals, seen = held
        pairs = []
        for j in range(2):
            for row in (log,) if kind == "variance" else (mean, log):
                prefetch(build, build.gep(row, [ir.Constant(_INT, AHEAD + j * STEP)]))
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
    return apart, fuse_lanes(build, apart, apart, e)


def _row(build: Any, address: Any, place: Any) -> Any:
    return build.gep(build.inttoptr(address, _FLOAT.as_pointer()), [place])


def _lanes(build: Any, row: Any, j: int) -> Any:
    """The j-th vector of a row."""
    return load_vector(build, build.gep(row, [ir.Constant(_INT, j * STEP)]), STEP)


def _register(build: Any, sums: Any, j: int) -> Any:
    """Where the j-th register of sums is kept."""
    return build.bitcast(build.gep(sums, [ir.Constant(_INT, j * _WIDE.count)]), _WIDE.as_pointer())


def _halves(build: Any, lanes: Any) -> list[Any]:
    """A vector of float32 as two of float64."""
    index = ir.VectorType(ir.IntType(32), _WIDE.count)
    places = [ir.Constant(index, [*range(first, first + _WIDE.count)]) for first in (0, _WIDE.count)]
    return [build.fpext(build.shuffle_vector(lanes, lanes, place), _WIDE) for place in places]


def _narrow(build: Any, halves: list[Any]) -> Any:
    """Two vectors of float64 as one of float32."""
    low, high = (build.fptrunc(half, ir.VectorType(_FLOAT, _WIDE.count)) for half in halves)
    return build.shuffle_vector(low, high, ir.Constant(ir.VectorType(ir.IntType(32), STEP), [*range(STEP)]))


def _store_narrow(build: Any, halves: list[Any], row: Any, j: int) -> None:
    """Write two vectors of float64 as the j-th vector of a row of float32."""
    _store_lanes(build, _narrow(build, halves), row, j)


def _store_lanes(build: Any, lanes: Any, row: Any, j: int) -> None:
    place = build.gep(row, [ir.Constant(_INT, j * STEP)])
    build.store(lanes, build.bitcast(place, lanes.type.as_pointer()), align=4)


def _above_floor(build: Any, variance: Any) -> Any:
    """A variance that rounding has not taken below zero; what is no number stays none."""
    floor = ir.Constant(_WIDE, [_FLOOR] * _WIDE.count)
    return build.select(build.fcmp_ordered("<", variance, floor), floor, variance)

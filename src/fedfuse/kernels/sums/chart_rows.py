"""The inner loop of means in charts in vector instructions: coordinates of some Gaussians, summed in registers."""

from __future__ import annotations

from typing import Any, Literal

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from fedfuse.kernels.exponential import all_seen, exp_lanes, fuse_lanes, nothing_seen
from fedfuse.kernels.target import STEP
from fedfuse.kernels.vectors import add_product, build_loop, element_at, load_vector, prefetch, spread

Kind = Literal["variance", "precision", "moments"]
WIDTH = 2 * STEP  # Gaussians that are fused at a time
_INT, _FLOAT = ir.IntType(64), ir.FloatType()
_WIDE = ir.VectorType(ir.DoubleType(), STEP // 2)
_AHEAD = 512  # numbers: twice as many rows are read as processors look ahead in


def make_chart_sums(kind: Kind, power: float) -> Any:
    """Add w · f(mₖ, ρₖ) of some clients to `first[at:]` and `second[at:]`, `WIDTH` of them, and give what exp has seen.

    With e = exp(power ρ) the second coordinate is e ("variance", which leaves the first alone), e and the first m · e
    ("precision"), or e + (m − o)² and the first m − o ("moments"), where o are the numbers at `origin`. Coordinates
    are float32; a weight's product with one is rounded together with its sum, in float64.
    """

    @intrinsic
    def add(typing, means, logs, weights, origin, begin, first, second, at):  # type: ignore[no-untyped-def] # noqa: ARG001
        def generate(context: Any, build: Any, signature: Any, args: Any) -> Any:
            array: Any = lambda i, offset: element_at(context, build, signature.args[i], args[i], offset)
            place, one = build.add(args[4], args[7]), ir.Constant(_INT, 1)
            lists = [array(i, ir.Constant(_INT, 0)) for i in range(3)]
            clients = build.extract_value(context.make_array(signature.args[0])(context, build, args[0]).shape, 0)
            sums = [array(i, args[7]) for i in ((6,) if kind == "variance" else (5, 6))]
            targets = [_register(build, pointer, j) for pointer in sums for j in range(4)]
            centers = [_lanes(build, _row(build, args[3], place), j) for j in range(2)] if kind == "moments" else []

            def add_client(lists: list[Any], held: list[Any]) -> list[Any]:
                mean, log = (_row(build, build.load(pointer), place) for pointer in lists[:2])
                weight = spread(build, build.load(lists[2]), STEP // 2)
                *totals, seen = held
                pairs = []
                for j in range(2):
                    if kind != "variance":
                        for row in (mean, log):
                            prefetch(build, build.gep(row, [ir.Constant(_INT, _AHEAD + j * STEP)]))
                    e, seen = exp_lanes(build, _lanes(build, log, j), power, seen)
                    pairs.append(_coordinates(build, kind, mean, j, e, centers))
                terms = [half for side in zip(*pairs, strict=True) for lanes in side for half in _halves(build, lanes)]
                return [*(add_product(build, weight, t, s) for t, s in zip(terms, totals, strict=True)), seen]

            before = [build.load(target, align=8) for target in targets]
            *after, seen = build_loop(build, clients, (one, one, one), lists, [*before, nothing_seen()], add_client)
            for total, target in zip(after, targets, strict=True):
                build.store(total, target, align=8)
            return all_seen(build, seen)

        given = (means, logs, weights, types.int64, types.int64, first, second, types.int64)
        return types.int64(*given), generate

    return add


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

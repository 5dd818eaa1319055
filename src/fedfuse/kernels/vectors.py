"""Three inner loops in vector instructions: a register tile of broadcasts, one of inner products, and weighted sums.

Loops in plain numba reach a third of what these do, for the compiler keeps sums in memory. Vectors here are as long as
the arithmetic wants; LLVM cuts them into the registers that the machine has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from fedfuse.kernels.target import LANES, STEP

_FLOAT, _DOUBLE, _INT, _INDEX = ir.FloatType(), ir.DoubleType(), ir.IntType(64), ir.IntType(32)
_FAST = ("contract", "reassoc", "nsz")  # one rounding for a product and its sum; NaN and infinity stay what they are
_I = types.int64
_DOUBLES = STEP // 2  # numbers of float64 in a register
_CACHE_LINE = 64
AHEAD = 512  # numbers a row is fetched before it is read: processors by themselves do not look beyond a page of memory


def _vector(width: int) -> ir.VectorType:
    return ir.VectorType(_FLOAT, width)


def element_at(context: Any, build: Any, kind: Any, array: Any, offset: Any) -> Any:
    """A pointer to an element of an array."""
    return build.gep(context.make_array(kind)(context, build, array).data, [offset])


def load_vector(build: Any, pointer: Any, width: int) -> Any:
    """So many numbers that stand at a pointer."""
    return build.load(build.bitcast(pointer, _vector(width).as_pointer()), align=4)


def _store(build: Any, value: Any, pointer: Any) -> None:
    build.store(value, build.bitcast(pointer, value.type.as_pointer()), align=4)


def spread(build: Any, value: Any, width: int) -> Any:
    """One number in every lane."""
    nothing = ir.Constant(ir.VectorType(value.type, width), ir.Undefined)
    first = build.insert_element(nothing, value, ir.Constant(_INDEX, 0))
    return build.shuffle_vector(first, nothing, ir.Constant(ir.VectorType(_INDEX, width), [0] * width))


def _multiply_add(build: Any, a: Any, b: Any, total: Any) -> Any:
    return build.fadd(total, build.fmul(a, b, flags=_FAST), flags=_FAST)


def add_product(build: Any, a: Any, b: Any, total: Any) -> Any:
    """Give total + a · b of vectors of float64, rounded once: IEEE 754 defines it, the same on every machine."""
    kind = ir.FunctionType(a.type, [a.type] * 3)
    return build.call(build.module.declare_intrinsic(f"llvm.fma.v{a.type.count}f64", fnty=kind), [a, b, total])


Body = Callable[[list[Any], list[Any]], list[Any]]


def build_loop(
    build: Any, count: Any, steps: Sequence[Any], starts: Sequence[Any], sums: Sequence[Any], body: Body
) -> Any:
    """Run `body(pointers, sums)` `count` times, moving each pointer by its step; gives the sums back."""
    before, head = build.block, build.append_basic_block()
    inside, after = build.append_basic_block(), build.append_basic_block()
    build.branch(head)
    build.position_at_end(head)
    turn = build.phi(_INT)
    carried = [build.phi(value.type) for value in (*starts, *sums)]
    build.cbranch(build.icmp_signed("<", turn, count), inside, after)
    build.position_at_end(inside)
    pointers, held = carried[: len(starts)], carried[len(starts) :]
    news = body(pointers, held)
    moved = [build.gep(pointer, [step]) for pointer, step in zip(pointers, steps, strict=True)]
    turn.add_incoming(ir.Constant(_INT, 0), before)
    turn.add_incoming(build.add(turn, ir.Constant(_INT, 1)), build.block)
    for phi, first, following in zip(carried, (*starts, *sums), (*moved, *news), strict=True):
        phi.add_incoming(first, before)
        phi.add_incoming(following, build.block)
    build.branch(head)
    build.position_at_end(after)
    return held


def _numbers(build: Any, pack: Any, count: int) -> list[Any]:
    """The numbers of a tuple."""
    return [build.extract_value(pack, i) for i in range(count)]


def _signature(*parts: Any) -> Any:
    """Nothing comes back; tuples are of whole numbers."""
    return types.void(*(types.UniTuple(_I, len(part)) if isinstance(part, types.BaseTuple) else part for part in parts))


def make_tile(outputs: int, width: int = LANES) -> Any:
    """The inner loop of `tiles.tile` for so many rows: a number of w serves a whole vector of x."""

    @intrinsic
    def tile(typing, counts, x, xs, w, ws, b, bs, z, zs):  # type: ignore[no-untyped-def] # noqa: ARG001
        def generate(context: Any, build: Any, signature: Any, args: Any) -> Any:
            array: Any = lambda index, offset: element_at(context, build, signature.args[index], args[index], offset)
            ahead: Any = lambda pointer, stride, j: build.gep(pointer, [build.mul(stride, ir.Constant(_INT, j))])
            n1, n2, n3 = _numbers(build, args[0], 3)
            xo, x1, x2, x3 = _numbers(build, args[2], 4)
            wo, w1, w2, w3, wj = _numbers(build, args[4], 5)
            (bo, bj), (zo, zj) = _numbers(build, args[6], 2), _numbers(build, args[8], 2)
            bias, out, starts = array(5, bo), array(7, zo), [array(1, xo), array(3, wo)]
            sums = [spread(build, build.load(ahead(bias, bj, j)), width) for j in range(outputs)]

            def innermost(at: list[Any], sums: list[Any]) -> list[Any]:
                row = load_vector(build, at[0], width)
                weights = [spread(build, build.load(ahead(at[1], wj, j)), width) for j in range(outputs)]
                return [_multiply_add(build, weights[j], row, sums[j]) for j in range(outputs)]

            inner: Any = lambda at, sums: build_loop(build, n3, (x3, w3), at, sums, innermost)
            middle: Any = lambda at, sums: build_loop(build, n2, (x2, w2), at, sums, inner)
            for j, total in enumerate(build_loop(build, n1, (x1, w1), starts, sums, middle)):
                _store(build, total, ahead(out, zj, j))
            return context.get_dummy_value()

        return _signature(counts, x, xs, w, ws, b, bs, z, zs), generate

    return tile


def make_products(lefts: int, rights: int) -> Any:
    """The inner loop of `tiles.products` for so many pairs."""

    @intrinsic
    def products(typing, counts, x, xs, d, ds, g, gs):  # type: ignore[no-untyped-def] # noqa: ARG001
        def generate(context: Any, build: Any, signature: Any, args: Any) -> Any:
            array: Any = lambda index, offset: element_at(context, build, signature.args[index], args[index], offset)
            ahead: Any = lambda pointer, stride, j: build.gep(pointer, [build.mul(stride, ir.Constant(_INT, j))])
            n1, n2 = _numbers(build, args[0], 2)
            (xo, x1, x2, xj), (do, d1, d2, di) = _numbers(build, args[2], 4), _numbers(build, args[4], 4)
            go, gi, gj = _numbers(build, args[6], 3)
            starts, out = [array(1, xo), array(3, do)], array(5, go)
            sums = [ir.Constant(_vector(STEP), [0.0] * STEP)] * (lefts * rights)

            def pixel(at: list[Any], sums: list[Any]) -> list[Any]:
                for lane in range(0, LANES, STEP):
                    here = [build.gep(pointer, [ir.Constant(_INT, lane)]) for pointer in at]
                    right = [load_vector(build, ahead(here[0], xj, j), STEP) for j in range(rights)]
                    news = []
                    for i in range(lefts):  # one at a time: with all of them, registers would run out
                        left, own = load_vector(build, ahead(here[1], di, i), STEP), sums[i * rights : (i + 1) * rights]
                        news += [_multiply_add(build, left, b, s) for b, s in zip(right, own, strict=True)]
                    sums = news
                return sums

            row: Any = lambda at, sums: build_loop(build, n2, (x2, d2), at, sums, pixel)
            for index, total in enumerate(build_loop(build, n1, (x1, d1), starts, sums, row)):
                target = ahead(ahead(out, gi, index // rights), gj, index % rights)
                build.store(build.fadd(build.load(target), _add_up(build, total)), target)
            return context.get_dummy_value()

        return _signature(counts, x, xs, d, ds, g, gs), generate

    return products


def _add_up(build: Any, vector: Any) -> Any:
    """The sum of a vector's lanes."""
    kind = ir.FunctionType(_FLOAT, [_FLOAT, _vector(STEP)])
    add = build.module.declare_intrinsic(f"llvm.vector.reduce.fadd.v{STEP}f32", fnty=kind)
    return build.call(add, [ir.Constant(_FLOAT, 0.0), vector], fastmath=_FAST)


def _sum_rows(context: Any, build: Any, kinds: Any, args: Any, place: Any, starts: Sequence[Any], further: int) -> Any:
    """Sums of rows times weights at a place, from these starts on; `args` begins with rows, weights and rows ahead.

    Rows ahead are fetched meanwhile, so many numbers further than the place.
    """
    wide, one = ir.VectorType(_DOUBLE, _DOUBLES), ir.Constant(_INT, 1)
    pointers = [element_at(context, build, kinds[i], args[i], ir.Constant(_INT, 0)) for i in range(3)]
    clients = build.extract_value(context.make_array(kinds[0])(context, build, args[0]).shape, 0)
    row_at: Any = lambda pointer: build.gep(build.inttoptr(build.load(pointer), _FLOAT.as_pointer()), [place])

    def add_row(at: list[Any], sums: list[Any]) -> list[Any]:
        row, weight = row_at(at[0]), spread(build, build.load(at[1]), _DOUBLES)
        for line in range(0, 4 * _DOUBLES * len(sums), _CACHE_LINE):
            prefetch(build, build.gep(row_at(at[2]), [ir.Constant(_INT, further + line // 4)]))
        numbers = [build.fpext(load_vector(build, _part(build, row, j), _DOUBLES), wide) for j in range(len(sums))]
        # rounded one by one: a fused step would depend on the processor
        return [build.fadd(s, build.fmul(weight, x)) for s, x in zip(sums, numbers, strict=True)]

    return build_loop(build, clients, (one, one, one), pointers, starts, add_row)


def _part(build: Any, pointer: Any, j: int) -> Any:
    """Where the j-th register of float64 begins."""
    return build.gep(pointer, [ir.Constant(_INT, j * _DOUBLES)])


def prefetch(build: Any, pointer: Any) -> None:
    """Have a cache line fetched that will be read soon."""
    byte = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [byte, _INDEX, _INDEX, _INDEX])
    fetch = build.module.declare_intrinsic("llvm.prefetch", [byte], fnty=kind)
    build.call(fetch, [build.bitcast(pointer, byte), *(ir.Constant(_INDEX, word) for word in (0, 2, 1))])


def make_row_sums(count: int) -> tuple[Any, Any]:
    """Two ways to take so many sums over rows at once: divided into `out[at:]`, or on top of `sums[at:]`."""
    wide, whole = ir.VectorType(_DOUBLE, _DOUBLES), count // _DOUBLES

    @intrinsic
    def divide(typing, rows, weights, begin, divisor, out, at):  # type: ignore[no-untyped-def] # noqa: ARG001
        def generate(context: Any, build: Any, signature: Any, args: Any) -> Any:
            zeros, place = [ir.Constant(wide, [0.0] * _DOUBLES)] * whole, build.add(args[2], args[5])
            kinds, given = (*signature.args[:2], signature.args[0]), (*args[:2], args[0])
            totals = _sum_rows(context, build, kinds, given, place, zeros, AHEAD)
            divisor = spread(build, args[3], _DOUBLES)
            target = element_at(context, build, signature.args[4], *args[4:6])
            for j, total in enumerate(totals):
                _store(build, build.fptrunc(build.fdiv(total, divisor), _vector(_DOUBLES)), _part(build, target, j))
            return context.get_dummy_value()

        return types.void(rows, weights, _I, types.float64, out, _I), generate

    @intrinsic
    def add(typing, rows, weights, ahead, begin, sums, at):  # type: ignore[no-untyped-def] # noqa: ARG001
        def generate(context: Any, build: Any, signature: Any, args: Any) -> Any:
            target = element_at(context, build, signature.args[4], *args[4:6])
            parts = [build.bitcast(_part(build, target, j), wide.as_pointer()) for j in range(whole)]
            before, place = [build.load(part, align=8) for part in parts], build.add(args[3], args[5])
            totals = _sum_rows(context, build, signature.args, args, place, before, 0)
            for part, total in zip(parts, totals, strict=True):
                build.store(total, part, align=8)
            return context.get_dummy_value()

        return types.void(rows, weights, ahead, _I, sums, _I), generate

    return divide, add

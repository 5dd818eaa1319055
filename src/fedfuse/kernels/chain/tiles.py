"""Register tiles of every size, and how a side is cut into them: the inner loops of convolutions and linear layers.

`tile` computes rows of vectors, each a sum of broadcast numbers times vectors; `products` computes inner products. All
of a tile's sums stay in registers until it is done.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from fedfuse.kernels.target import LANES, STEP, Floats, compile_kernel
from fedfuse.kernels.vectors import FAST, FLOAT, INT, build_loop, element_at, load_vector, multiply_add, spread, store

ROWS, LEFTS, RIGHTS = 6, 4, 3  # the largest tiles: ROWS vectors, or LEFTS × RIGHTS inner products

Two = tuple[int, int]
Three = tuple[int, int, int]
Four = tuple[int, int, int, int]
Five = tuple[int, int, int, int, int]


@compile_kernel
def share(left: int, parts: int) -> int:
    """The next of `parts` shares that differ by one at most."""
    # Even shares, 13 rows as 5 + 4 + 4 and not 6 + 6 + 1: a tile of one row has too few sums to hide the latency of an
    # addition and takes two thirds of the time of a tile of six.
    return (left + parts - 1) // parts


@compile_kernel
def fill(array: Floats, begin: int, end: int, value: float) -> None:
    """array[begin:end] = value; numba's own assignment takes seconds to compile."""
    number = np.float32(value)
    for i in range(begin, end):
        array[i] = number


@compile_kernel
def total(array: Floats, begin: int, end: int) -> Any:
    """The sum of array[begin:end]; numba's own takes seconds to compile."""
    value = np.float32(0)
    for i in range(begin, end):
        value += array[i]
    return value


@compile_kernel
def tile(
    n: int, counts: Three, x: Floats, xs: Four, w: Floats, ws: Five, b: Floats, bs: Two, z: Floats, zs: Two
) -> None:
    """z[row j, lane] = b[j] + Σ over three nested loops of w[j] · x[lane], for n rows j.

    Args:
        n: rows of the tile, at most ROWS.
        counts: turns of the three loops, the innermost last.
        x: what is read a vector at a time.
        xs: where x begins, and how far each loop steps in it.
        w: what is read a number at a time.
        ws: where w begins, how far each loop steps in it, and how far it is from row to row.
        b: what the sums begin with.
        bs: where that begins, and how far it is from row to row.
        z: what is written.
        zs: where that begins, and how far it is from row to row.
    """
    # an if-chain: numba cannot index a tuple of intrinsics by a number known at run time, and every size needs its
    # own allocation of registers
    if n == 6:
        _T6(counts, x, xs, w, ws, b, bs, z, zs)
    elif n == 5:
        _T5(counts, x, xs, w, ws, b, bs, z, zs)
    elif n == 4:
        _T4(counts, x, xs, w, ws, b, bs, z, zs)
    elif n == 3:
        _T3(counts, x, xs, w, ws, b, bs, z, zs)
    elif n == 2:
        _T2(counts, x, xs, w, ws, b, bs, z, zs)
    else:
        _T1(counts, x, xs, w, ws, b, bs, z, zs)


@compile_kernel
def products(n: int, m: int, counts: Two, x: Floats, xs: Four, d: Floats, ds: Four, g: Floats, gs: Three) -> None:
    """g[i, j] += Σ over two nested loops of ⟨d_i, x_j⟩, inner products of LANES numbers, for n × m pairs.

    Args:
        n: how many d_i, at most LEFTS.
        m: how many x_j, at most RIGHTS.
        counts: turns of the two loops, the inner one last.
        x: the right-hand vectors.
        xs: where they begin, how far each loop steps in them, and how far it is from one to the next.
        d: the left-hand vectors.
        ds: likewise.
        g: what is added to.
        gs: where that begins, and how far it is from i to i and from j to j.
    """
    if n == 4:
        if m == 3:
            _P43(counts, x, xs, d, ds, g, gs)
        elif m == 2:
            _P42(counts, x, xs, d, ds, g, gs)
        else:
            _P41(counts, x, xs, d, ds, g, gs)
    elif n == 3:
        if m == 3:
            _P33(counts, x, xs, d, ds, g, gs)
        elif m == 2:
            _P32(counts, x, xs, d, ds, g, gs)
        else:
            _P31(counts, x, xs, d, ds, g, gs)
    elif n == 2:
        if m == 3:
            _P23(counts, x, xs, d, ds, g, gs)
        elif m == 2:
            _P22(counts, x, xs, d, ds, g, gs)
        else:
            _P21(counts, x, xs, d, ds, g, gs)
    elif m == 3:
        _P13(counts, x, xs, d, ds, g, gs)
    elif m == 2:
        _P12(counts, x, xs, d, ds, g, gs)
    else:
        _P11(counts, x, xs, d, ds, g, gs)


def make_tile(outputs: int) -> Any:
    """The inner loop of `tile` for this many rows: a number of w serves a whole vector of x."""

    @intrinsic
    def tile(typing, counts, x, xs, w, ws, b, bs, z, zs):  # type: ignore[no-untyped-def] # noqa: ARG001
        def generate(context: Any, build: Any, signature: Any, args: Any) -> Any:
            array: Any = lambda index, offset: element_at(context, build, signature.args[index], args[index], offset)
            ahead: Any = lambda pointer, stride, j: build.gep(pointer, [build.mul(stride, ir.Constant(INT, j))])
            n1, n2, n3 = _numbers(build, args[0], 3)
            xo, x1, x2, x3 = _numbers(build, args[2], 4)
            wo, w1, w2, w3, wj = _numbers(build, args[4], 5)
            (bo, bj), (zo, zj) = _numbers(build, args[6], 2), _numbers(build, args[8], 2)
            bias, out, starts = array(5, bo), array(7, zo), [array(1, xo), array(3, wo)]
            sums = [spread(build, build.load(ahead(bias, bj, j)), LANES) for j in range(outputs)]

            def innermost(at: list[Any], sums: list[Any]) -> list[Any]:
                row = load_vector(build, at[0], LANES)
                weights = [spread(build, build.load(ahead(at[1], wj, j)), LANES) for j in range(outputs)]
                return [multiply_add(build, weights[j], row, sums[j]) for j in range(outputs)]

            inner: Any = lambda at, sums: build_loop(build, n3, (x3, w3), at, sums, innermost)
            middle: Any = lambda at, sums: build_loop(build, n2, (x2, w2), at, sums, inner)
            for j, total in enumerate(build_loop(build, n1, (x1, w1), starts, sums, middle)):
                store(build, total, ahead(out, zj, j))
            return context.get_dummy_value()

        return _signature(counts, x, xs, w, ws, b, bs, z, zs), generate

    return tile


def make_products(lefts: int, rights: int) -> Any:
    """The inner loop of `products` for `lefts` × `rights` pairs."""

    @intrinsic
    def products(typing, counts, x, xs, d, ds, g, gs):  # type: ignore[no-untyped-def] # noqa: ARG001
        def generate(context: Any, build: Any, signature: Any, args: Any) -> Any:
            array: Any = lambda index, offset: element_at(context, build, signature.args[index], args[index], offset)
            ahead: Any = lambda pointer, stride, j: build.gep(pointer, [build.mul(stride, ir.Constant(INT, j))])
            n1, n2 = _numbers(build, args[0], 2)
            (xo, x1, x2, xj), (do, d1, d2, di) = _numbers(build, args[2], 4), _numbers(build, args[4], 4)
            go, gi, gj = _numbers(build, args[6], 3)
            starts, out = [array(1, xo), array(3, do)], array(5, go)
            sums = [ir.Constant(ir.VectorType(FLOAT, STEP), [0.0] * STEP)] * (lefts * rights)

            def pixel(at: list[Any], sums: list[Any]) -> list[Any]:
                for lane in range(0, LANES, STEP):
                    here = [build.gep(pointer, [ir.Constant(INT, lane)]) for pointer in at]
                    right = [load_vector(build, ahead(here[0], xj, j), STEP) for j in range(rights)]
                    news = []
                    for i in range(lefts):  # one at a time: with all of them, registers would run out
                        left, own = load_vector(build, ahead(here[1], di, i), STEP), sums[i * rights : (i + 1) * rights]
                        news += [multiply_add(build, left, b, s) for b, s in zip(right, own, strict=True)]
                    sums = news
                return sums

            row: Any = lambda at, sums: build_loop(build, n2, (x2, d2), at, sums, pixel)
            for index, total in enumerate(build_loop(build, n1, (x1, d1), starts, sums, row)):
                target = ahead(ahead(out, gi, index // rights), gj, index % rights)
                build.store(build.fadd(build.load(target), _add_up(build, total)), target)
            return context.get_dummy_value()

        return _signature(counts, x, xs, d, ds, g, gs), generate

    return products


def _numbers(build: Any, pack: Any, count: int) -> list[Any]:
    """The numbers of a tuple."""
    return [build.extract_value(pack, i) for i in range(count)]


def _signature(*parts: Any) -> Any:
    """Nothing comes back; tuples are of whole numbers."""
    return types.void(
        *(types.UniTuple(types.int64, len(part)) if isinstance(part, types.BaseTuple) else part for part in parts)
    )


def _add_up(build: Any, vector: Any) -> Any:
    """The sum of a vector's lanes."""
    kind = ir.FunctionType(FLOAT, [FLOAT, ir.VectorType(FLOAT, STEP)])
    add = build.module.declare_intrinsic(f"llvm.vector.reduce.fadd.v{STEP}f32", fnty=kind)
    return build.call(add, [ir.Constant(FLOAT, 0.0), vector], fastmath=FAST)


_T1, _T2, _T3, _T4, _T5, _T6 = (make_tile(n) for n in range(1, ROWS + 1))
_P11, _P12, _P13 = (make_products(1, n) for n in range(1, RIGHTS + 1))
_P21, _P22, _P23 = (make_products(2, n) for n in range(1, RIGHTS + 1))
_P31, _P32, _P33 = (make_products(3, n) for n in range(1, RIGHTS + 1))
_P41, _P42, _P43 = (make_products(4, n) for n in range(1, RIGHTS + 1))

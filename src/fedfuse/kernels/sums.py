"""Weighted sums of many long rows of float32, and sums of powers, in float64, each number read once.

A number's weighted sum is taken in the order of the rows, each product and each sum rounded by itself, so that neither
blocks nor threads nor the processor move a bit; torch's own operations give the same. Powers are summed by lanes, added
up in the end in one order: they do not depend on threads or the processor either, but torch groups its sums in another
way and may differ in the last place. `weighted_sums`, `add_rows` and `power_sums` are the ways in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from fedfuse.kernels.target import STEP, SUMS, Floats, Ints, compile_exactly
from fedfuse.kernels.vectors import (
    AHEAD,
    DOUBLE,
    FLOAT,
    INT,
    add_product,
    build_loop,
    element_at,
    load_vector,
    prefetch,
    spread,
    store,
)

Doubles = npt.NDArray[np.float64]
# Numbers whose sums are held at once: long enough for memory to be read in long runs, short enough to stay near and to
# take little memory compared with a small model.
_MOST, _LEAST = 1 << 14, 1 << 11
# Rows that are read side by side, their sums in registers, if those are all, and if more follow: processors look
# ahead in a limited number of streams at a time.
_SIDE_BY_SIDE, _TOGETHER = 12, 10


@compile_exactly
def weighted_sums(rows: Ints, weights: Doubles, divisor: float, begin: int, out: Floats) -> None:
    """Write out[i] = Σ_k weights[k] · row_k[begin + i] / divisor, for rows at the given addresses.

    Args:
        rows: where each row of float32 lies; it must be as long as what is asked of it.
        weights: of each.
        divisor: what the sums are divided by, once.
        begin: the first number to sum.
        out: as many as are wanted.
    """
    whole = out.size // SUMS * SUMS if rows.size <= _SIDE_BY_SIDE else 0
    for first in range(0, whole, SUMS):
        _divide_sums(rows, weights, begin, divisor, out, first)
    if whole < out.size:
        _sum_in_blocks(rows, weights, divisor, begin + whole, out[whole:])


@compile_exactly
def _sum_in_blocks(rows: Ints, weights: Doubles, divisor: float, begin: int, out: Floats) -> None:
    """The same for many rows: a few at a time are read in long runs, and sums wait in the cache."""
    near, last = min(_MOST, max(_LEAST, out.size // 64)), rows.size - 1
    sums = np.empty(near, np.float64)
    for first in range(0, out.size, near):
        count = min(near, out.size - first)
        for i in range(count):
            sums[i] = 0.0
        add_rows(rows[:last], weights[:last], begin + first, sums[:count])
        row, part = point_at(rows[last], begin + first, count), out[first : first + count]
        _finish(row, weights[last], sums[:count], divisor, part)


@compile_exactly
def _finish(row: Floats, weight: float, sums: Doubles, divisor: float, out: Floats) -> None:
    """Add the last row and divide: the division is done while memory is waited for."""
    for i in range(out.size):
        out[i] = (sums[i] + weight * np.float64(row[i])) / divisor


@compile_exactly
def add_rows(rows: Ints, weights: Doubles, begin: int, sums: Doubles) -> None:
    """Add sums[i] += Σ_k weights[k] · row_k[begin + i], for rows at the given addresses."""
    whole = sums.size // SUMS * SUMS
    for k in range(0, rows.size, _TOGETHER):
        some, their = rows[k : k + _TOGETHER], weights[k : k + _TOGETHER]
        # those that come next are on their way meanwhile; after the last, its own again
        ahead = rows[k + some.size :] if rows.size - k >= 2 * some.size else some
        for i in range(0, whole, SUMS):
            _add_to_sums(some, their, ahead, begin, sums, i)
    for k in range(rows.size):
        row, weight = point_at(rows[k], begin, sums.size), weights[k]
        for i in range(whole, sums.size):
            sums[i] += weight * np.float64(row[i])


@compile_exactly
def point_at(address: int, begin: int, count: int) -> Floats:
    """`count` numbers of a row that lies at an address, from `begin` on."""
    return numba.carray(_pointer(address + 4 * begin), count, np.float32)  # type: ignore[no-any-return]


@intrinsic
def _pointer(typing, address):  # type: ignore[no-untyped-def] # noqa: ARG001
    """An address as a pointer."""

    def generate(context: Any, build: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
        return build.inttoptr(args[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), generate


_LANES = STEP // 2  # numbers of float64 in a register
_WIDE, _REGISTERS = ir.VectorType(DOUBLE, _LANES), SUMS // _LANES
_CACHE_LINE = 64


@intrinsic
def _divide_sums(typing, rows, weights, begin, divisor, out, at):  # type: ignore[no-untyped-def] # noqa: ARG001
    def generate(context: Any, build: Any, signature: Any, args: Any) -> Any:
        zeros, place = [ir.Constant(_WIDE, [0.0] * _LANES)] * _REGISTERS, build.add(args[2], args[5])
        kinds, given = (*signature.args[:2], signature.args[0]), (*args[:2], args[0])
        totals = _sum_rows(context, build, kinds, given, place, zeros, AHEAD)
        divisor = spread(build, args[3], _LANES)
        target = element_at(context, build, signature.args[4], *args[4:6])
        for j, total in enumerate(totals):
            store(
                build, build.fptrunc(build.fdiv(total, divisor), ir.VectorType(FLOAT, _LANES)), _part(build, target, j)
            )
        return context.get_dummy_value()

    return types.void(rows, weights, types.int64, types.float64, out, types.int64), generate


@intrinsic
def _add_to_sums(typing, rows, weights, ahead, begin, sums, at):  # type: ignore[no-untyped-def] # noqa: ARG001
    def generate(context: Any, build: Any, signature: Any, args: Any) -> Any:
        target = element_at(context, build, signature.args[4], *args[4:6])
        parts = [build.bitcast(_part(build, target, j), _WIDE.as_pointer()) for j in range(_REGISTERS)]
        before, place = [build.load(part, align=8) for part in parts], build.add(args[3], args[5])
        totals = _sum_rows(context, build, signature.args, args, place, before, 0)
        for part, total in zip(parts, totals, strict=True):
            build.store(total, part, align=8)
        return context.get_dummy_value()

    return types.void(rows, weights, ahead, types.int64, sums, types.int64), generate


def _sum_rows(context: Any, build: Any, kinds: Any, args: Any, place: Any, starts: Sequence[Any], further: int) -> Any:
    """Sums of rows times weights at a place, from these starts on; `args` begins with rows, weights and rows ahead.

    Rows ahead are fetched meanwhile, `further` numbers beyond the place.
    """
    one = ir.Constant(INT, 1)
    pointers = [element_at(context, build, kinds[i], args[i], ir.Constant(INT, 0)) for i in range(3)]
    clients = build.extract_value(context.make_array(kinds[0])(context, build, args[0]).shape, 0)
    row_at: Any = lambda pointer: build.gep(build.inttoptr(build.load(pointer), FLOAT.as_pointer()), [place])

    def add_row(at: list[Any], sums: list[Any]) -> list[Any]:
        row, weight = row_at(at[0]), spread(build, build.load(at[1]), _LANES)
        for line in range(0, 4 * _LANES * len(sums), _CACHE_LINE):
            prefetch(build, build.gep(row_at(at[2]), [ir.Constant(INT, further + line // 4)]))
        numbers = [build.fpext(load_vector(build, _part(build, row, j), _LANES), _WIDE) for j in range(len(sums))]
        # rounded one by one: a fused step would depend on the processor
        return [build.fadd(s, build.fmul(weight, x)) for s, x in zip(sums, numbers, strict=True)]

    return build_loop(build, clients, (one, one, one), pointers, starts, add_row)


def _part(build: Any, pointer: Any, j: int) -> Any:
    """Where the j-th register of float64 begins."""
    return build.gep(pointer, [ir.Constant(INT, j * _LANES)])


_POWER_LANES, _TURNS = 8, 2  # numbers in a vector; vectors whose sums are apart, so that additions need not wait
_POWER_STEP = _POWER_LANES * _TURNS
_EIGHT = ir.VectorType(DOUBLE, _POWER_LANES)


@compile_exactly
def power_sums(numbers: Floats, begin: float) -> Doubles:
    """Sums of the 1st to 4th powers of some numbers about a point, in float64."""
    lanes = np.zeros((4, _POWER_STEP))
    _add_powers(numbers, begin, lanes)
    for i in range(numbers.size // _POWER_STEP * _POWER_STEP, numbers.size):
        x = np.float64(numbers[i]) - begin
        square, lane = x * x, i % _POWER_STEP
        lanes[0, lane] += x
        lanes[1, lane] += square
        lanes[2, lane] += square * x
        lanes[3, lane] += square * square
    sums = np.zeros(4)
    for lane in range(_POWER_STEP):
        sums += lanes[:, lane]
    return sums


@intrinsic
def _add_powers(typing, numbers, begin, lanes):  # type: ignore[no-untyped-def] # noqa: ARG001
    """Add the powers of all whole steps of numbers to lanes[power, :]; products and sums are rounded together."""

    def generate(context: Any, build: Any, signature: Any, args: Any) -> Any:
        zero = ir.Constant(INT, 0)
        size = build.extract_value(context.make_array(signature.args[0])(context, build, args[0]).shape, 0)
        turns = build.sdiv(size, ir.Constant(INT, _POWER_STEP))
        start = element_at(context, build, signature.args[0], args[0], zero)
        begin, target = (
            spread(build, args[1], _POWER_LANES),
            element_at(context, build, signature.args[2], args[2], zero),
        )
        parts = [build.gep(target, [ir.Constant(INT, j * _POWER_LANES)]) for j in range(4 * _TURNS)]
        places = [build.bitcast(part, _EIGHT.as_pointer()) for part in parts]

        def add_step(at: list[Any], sums: list[Any]) -> list[Any]:
            news = list(sums)
            for turn in range(_TURNS):
                place = build.gep(at[0], [ir.Constant(INT, turn * _POWER_LANES)])
                x = build.fsub(build.fpext(load_vector(build, place, _POWER_LANES), _EIGHT), begin)
                square = build.fmul(x, x)
                news[turn] = build.fadd(sums[turn], x)
                news[_TURNS + turn] = add_product(build, x, x, sums[_TURNS + turn])
                news[2 * _TURNS + turn] = add_product(build, square, x, sums[2 * _TURNS + turn])
                news[3 * _TURNS + turn] = add_product(build, square, square, sums[3 * _TURNS + turn])
            return news

        starts = [build.load(place, align=8) for place in places]
        sums = build_loop(build, turns, [ir.Constant(INT, _POWER_STEP)], [start], starts, add_step)
        for place, total in zip(places, sums, strict=True):
            build.store(total, place, align=8)
        return context.get_dummy_value()

    return types.void(numbers, types.float64, lanes), generate

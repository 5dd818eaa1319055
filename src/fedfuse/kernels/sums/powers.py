"""Sums of powers of many numbers of float32, each read once.

Every lane has sums of its own, added up in the end in one order: the bits depend neither on threads nor on the
processor. Torch's sums are grouped in another way and may differ in the last place.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from fedfuse.kernels.sums.mean import Doubles
from fedfuse.kernels.target import Floats, compile_exactly
from fedfuse.kernels.vectors import add_product, build_loop, element_at, spread

_LANES, _TURNS = 8, 2  # numbers in a vector, and vectors whose sums are apart: additions need not wait for each other
_STEP = _LANES * _TURNS
_WIDE = ir.VectorType(ir.DoubleType(), _LANES)


@intrinsic
def _add_powers(typing, numbers, begin, lanes):  # type: ignore[no-untyped-def] # noqa: ARG001
    """Add the powers of all whole steps of numbers to lanes[power, :]; products and sums are rounded together."""

    def generate(context: Any, build: Any, signature: Any, args: Any) -> Any:
        zero, index = ir.Constant(ir.IntType(64), 0), ir.IntType(64)
        size = build.extract_value(context.make_array(signature.args[0])(context, build, args[0]).shape, 0)
        turns = build.sdiv(size, ir.Constant(index, _STEP))
        start = element_at(context, build, signature.args[0], args[0], zero)
        begin, target = spread(build, args[1], _LANES), element_at(context, build, signature.args[2], args[2], zero)
        parts = [build.gep(target, [ir.Constant(index, j * _LANES)]) for j in range(4 * _TURNS)]
        places = [build.bitcast(part, _WIDE.as_pointer()) for part in parts]

        def add_step(at: list[Any], sums: list[Any]) -> list[Any]:
            news = list(sums)
            for turn in range(_TURNS):
                x = build.fsub(_read(build, at[0], turn), begin)
                square = build.fmul(x, x)
                news[turn] = build.fadd(sums[turn], x)
                news[_TURNS + turn] = add_product(build, x, x, sums[_TURNS + turn])
                news[2 * _TURNS + turn] = add_product(build, square, x, sums[2 * _TURNS + turn])
                news[3 * _TURNS + turn] = add_product(build, square, square, sums[3 * _TURNS + turn])
            return news

        starts = [build.load(place, align=8) for place in places]
        sums = build_loop(build, turns, [ir.Constant(index, _STEP)], [start], starts, add_step)
        for place, total in zip(places, sums, strict=True):
            build.store(total, place, align=8)
        return context.get_dummy_value()

    return types.void(numbers, types.float64, lanes), generate


def _read(build: Any, pointer: Any, turn: int) -> Any:
    """The vector of a turn, in float64."""
    place = build.gep(pointer, [ir.Constant(ir.IntType(64), turn * _LANES)])
    narrow = ir.VectorType(ir.FloatType(), _LANES).as_pointer()
    return build.fpext(build.load(build.bitcast(place, narrow), align=4), _WIDE)


@compile_exactly
def power_sums(numbers: Floats, begin: float) -> Doubles:
    """Sums of the 1st to 4th powers of some numbers about a point, in float64."""
    lanes = np.zeros((4, _STEP))
    _add_powers(numbers, begin, lanes)
    for i in range(numbers.size // _STEP * _STEP, numbers.size):
        x = np.float64(numbers[i]) - begin
        square, lane = x * x, i % _STEP
        lanes[0, lane] += x
        lanes[1, lane] += square
        lanes[2, lane] += square * x
        lanes[3, lane] += square * square
    sums = np.zeros(4)
    for lane in range(_STEP):
        sums += lanes[:, lane]
    return sums

"""Weighted sums of many long rows of float32, in float64, each number read once: as fast as memory is read.

Every number's sum is taken in the order of the rows, each product and each sum rounded by itself, so that neither
blocks nor threads nor the processor move a bit; torch's own operations give the same.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from fedfuse.kernels.target import SUMS, Floats, Ints, compile_exactly
from fedfuse.kernels.vectors import make_row_sums

Doubles = npt.NDArray[np.float64]
# Numbers whose sums are held at once: long enough for memory to be read in long runs, short enough to stay near and to
# weigh little beside a small model.
_MOST, _LEAST = 1 << 14, 1 << 11
# Rows that are read side by side, their sums in registers, if those are all, and if more follow: processors look
# ahead in only so many streams at a time.
_SIDE_BY_SIDE, _TOGETHER = 12, 10

_divide_sums, _add_to_sums = make_row_sums(SUMS)


@intrinsic
def _pointer(typing, address):  # type: ignore[no-untyped-def] # noqa: ARG001
    """An address as a pointer."""

    def generate(context: Any, build: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
        return build.inttoptr(args[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), generate


@compile_exactly
def point_at(address: int, begin: int, count: int) -> Floats:
    """So many numbers of a row that lies at an address."""
    return numba.carray(_pointer(address + 4 * begin), count, np.float32)  # type: ignore[no-any-return]


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

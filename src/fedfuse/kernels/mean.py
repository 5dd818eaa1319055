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

from fedfuse.kernels.target import Floats, Ints, compile_exactly

Doubles = npt.NDArray[np.float64]
_NEAR = 1 << 13  # numbers whose sums stay near (64 KiB): long enough for memory to be read in long runs


@intrinsic
def _pointer(typing, address):  # type: ignore[no-untyped-def] # noqa: ARG001
    """An address as a pointer."""

    def generate(context: Any, build: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
        return build.inttoptr(args[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), generate


@compile_exactly
def _row(address: int, begin: int, count: int) -> Floats:
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
    sums = np.empty(_NEAR, np.float64)
    for first in range(0, out.size, _NEAR):
        count = min(_NEAR, out.size - first)
        for i in range(count):
            sums[i] = 0.0
        k = 0
        while k + 4 <= rows.size:
            _add_four(rows[k : k + 4], weights[k : k + 4], begin + first, sums[:count])
            k += 4
        while k < rows.size:
            add_row(_row(rows[k], begin + first, count), weights[k], sums[:count])
            k += 1
        divide(sums[:count], divisor, out[first : first + count])


@compile_exactly
def _add_four(rows: Ints, weights: Doubles, begin: int, sums: Doubles) -> None:
    """Four rows in their order, while a sum is in its register."""
    a, b = _row(rows[0], begin, sums.size), _row(rows[1], begin, sums.size)
    c, d = _row(rows[2], begin, sums.size), _row(rows[3], begin, sums.size)
    p, q, r, s = weights[0], weights[1], weights[2], weights[3]
    for i in range(sums.size):
        total = sums[i] + p * np.float64(a[i])
        total += q * np.float64(b[i])
        total += r * np.float64(c[i])
        sums[i] = total + s * np.float64(d[i])


@compile_exactly
def add_row(row: Floats, weight: float, sums: Doubles) -> None:
    """Add sums += weight · row."""
    for i in range(sums.size):
        sums[i] += weight * np.float64(row[i])


@compile_exactly
def divide(sums: Doubles, divisor: float, out: Floats) -> None:
    """Write out = sums / divisor."""
    for i in range(sums.size):
        out[i] = sums[i] / divisor

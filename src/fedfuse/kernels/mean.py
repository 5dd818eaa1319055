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
# Numbers whose sums are held at once: long enough for memory to be read in long runs, short enough to stay near and to
# weigh little beside a small model.
_MOST, _LEAST = 1 << 14, 1 << 11


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
    k = 0
    while k + 8 <= rows.size:
        _add_eight(rows[k : k + 8], weights[k : k + 8], begin, sums)
        k += 8
    while k + 4 <= rows.size:
        _add_four(rows[k : k + 4], weights[k : k + 4], begin, sums)
        k += 4
    while k < rows.size:
        row, weight = point_at(rows[k], begin, sums.size), weights[k]
        for i in range(sums.size):
            sums[i] += weight * np.float64(row[i])
        k += 1


@compile_exactly
def _add_four(rows: Ints, weights: Doubles, begin: int, sums: Doubles) -> None:
    """Four rows in their order, while a sum is in its register."""
    n = sums.size
    a, b, c, d = (
        point_at(rows[0], begin, n),
        point_at(rows[1], begin, n),
        point_at(rows[2], begin, n),
        point_at(rows[3], begin, n),
    )
    p, q, r, s = weights[0], weights[1], weights[2], weights[3]
    for i in range(n):
        total = sums[i] + p * np.float64(a[i])
        total += q * np.float64(b[i])
        total += r * np.float64(c[i])
        sums[i] = total + s * np.float64(d[i])


@compile_exactly
def _add_eight(rows: Ints, weights: Doubles, begin: int, sums: Doubles) -> None:
    """Eight rows likewise."""
    n = sums.size
    a, b, c, d = (
        point_at(rows[0], begin, n),
        point_at(rows[1], begin, n),
        point_at(rows[2], begin, n),
        point_at(rows[3], begin, n),
    )
    e, f, g, h = (
        point_at(rows[4], begin, n),
        point_at(rows[5], begin, n),
        point_at(rows[6], begin, n),
        point_at(rows[7], begin, n),
    )
    p, q, r, s = weights[0], weights[1], weights[2], weights[3]
    t, u, v, w = weights[4], weights[5], weights[6], weights[7]
    for i in range(n):
        total = sums[i] + p * np.float64(a[i])
        total += q * np.float64(b[i])
        total += r * np.float64(c[i])
        total += s * np.float64(d[i])
        total += t * np.float64(e[i])
        total += u * np.float64(f[i])
        total += v * np.float64(g[i])
        sums[i] = total + w * np.float64(h[i])

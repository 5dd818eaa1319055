"""Register tiles of every size, and how a side is cut into them."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedfuse.kernels.target import Floats, compile_kernel
from fedfuse.kernels.vectors import make_products, make_tile

ROWS, LEFTS, RIGHTS = 6, 4, 3  # the largest tiles: ROWS vectors, or LEFTS × RIGHTS inner products

Two = tuple[int, int]
Three = tuple[int, int, int]
Four = tuple[int, int, int, int]
Five = tuple[int, int, int, int, int]

_T1, _T2, _T3, _T4, _T5, _T6 = (make_tile(n) for n in range(1, ROWS + 1))
_P11, _P12, _P13 = (make_products(1, n) for n in range(1, RIGHTS + 1))
_P21, _P22, _P23 = (make_products(2, n) for n in range(1, RIGHTS + 1))
_P31, _P32, _P33 = (make_products(3, n) for n in range(1, RIGHTS + 1))
_P41, _P42, _P43 = (make_products(4, n) for n in range(1, RIGHTS + 1))


@compile_kernel
def share(left: int, parts: int) -> int:
    """The next of `parts` shares that differ by one at most."""
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

"""Exponential and logarithm in float32 that vector lanes can take together: no call, no branch, no table."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from fedfuse.kernels.target import STEP, compile_exactly

_LN2, _LN2_REST = 0.693359375, -2.12194440e-4  # log 2 in two parts, the first times a small whole number exact
_FLOATS, _INTS = ir.VectorType(ir.FloatType(), STEP), ir.VectorType(ir.IntType(32), STEP)
# of eʳ = 1 + r + c₂ r² + …, |r| ≤ ½ log 2, from the highest power down: the least largest relative error, 3e-9
_POWERS = (1.3814602280035615e-3, 8.368715643882751e-3, 4.166838899254799e-2, 0.1666652113199234, 0.4999999403953552)
# What 2ⁿ is taken from: n + 64 in the last bits of a float32 whose other bits are these.
_SHIFT, _ROUND, _ROUND_BITS = 64, float(3 << 22), 0x4B400000
REACH = 2 * _SHIFT  # what `exp_lanes` has seen is below it if all exponents were within ±44


@compile_exactly
def exp(x: float) -> float:
    """Give eˣ of a float32 between −87 and 88, within two units of its last place: 2ⁿ times a polynomial of the rest.

    The polynomial and the two parts of log 2 are those of Cephes' `expf`.
    """
    n = np.floor(x * np.float32(1.4426950408889634) + np.float32(0.5))
    r = x - n * np.float32(_LN2)
    r = r - n * np.float32(_LN2_REST)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * (r * r) + r + np.float32(1.0)
    return p * np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)  # type: ignore[no-any-return]


def exp_lanes(build: Any, x: Any, power: float, seen: Any) -> tuple[Any, Any]:
    """Give eᵖˣ of a vector of float32 within one unit of its last place, for p = 1, ½ or −1, and what was seen so far.

    Products and their sums are rounded together, which IEEE 754 defines: the bits are the same on every machine. It
    is what `exp` computes in half of its steps, for the range is checked once, when all is seen (`REACH`), and a power
    of two is an addition to the exponent.
    """
    round_ = _all(_ROUND + _SHIFT)
    turned = fuse_lanes(build, x, _all(power / np.log(2.0)), round_)
    bits = build.bitcast(turned, _INTS)
    seen = build.or_(seen, build.xor(bits, _all_ints(_ROUND_BITS)))
    n = build.fsub(turned, round_)
    # r / p: what p multiplies is moved into the polynomial's numbers, which stays exact
    r = fuse_lanes(build, n, _all(-_LN2 / power), x)
    r = fuse_lanes(build, n, _all(-_LN2_REST / power), r)
    numbers = [float(np.float32(c)) * power ** (6 - i) for i, c in enumerate((*_POWERS, 1.0, 1.0))]
    value, *others = [_all(number * 2.0**-_SHIFT) for number in numbers]
    for number in others:
        value = fuse_lanes(build, value, r, number)
    scaled = build.add(build.bitcast(value, _INTS), build.shl(bits, _all_ints(23)))
    return build.bitcast(scaled, _FLOATS), seen


def nothing_seen() -> Any:
    """Where the seeing begins."""
    return _all_ints(0)


def all_seen(build: Any, seen: Any) -> Any:
    """What all lanes have seen, as one number to compare with `REACH`."""
    kind = ir.FunctionType(ir.IntType(32), [_INTS])
    join = build.module.declare_intrinsic(f"llvm.vector.reduce.or.v{STEP}i32", fnty=kind)
    return build.zext(build.call(join, [seen]), ir.IntType(64))


def fuse_lanes(build: Any, a: Any, b: Any, c: Any) -> Any:
    """Give a · b + c of vectors of float32, rounded once."""
    kind = ir.FunctionType(_FLOATS, [_FLOATS] * 3)
    return build.call(build.module.declare_intrinsic(f"llvm.fma.v{STEP}f32", fnty=kind), [a, b, c])


def _all(number: float) -> Any:
    return ir.Constant(_FLOATS, [float(np.float32(number))] * STEP)


def _all_ints(number: int) -> Any:
    return ir.Constant(_INTS, [number] * STEP)


@intrinsic
def _fuse(typing, a, b, c):  # type: ignore[no-untyped-def] # noqa: ARG001
    """One a · b + c of float32, rounded once."""

    def generate(context: Any, build: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
        return build.fma(*args)

    return types.float32(types.float32, types.float32, types.float32), generate


@compile_exactly
def log(x: float) -> float:
    """Give the logarithm of a float32 above 2⁻¹²⁶, finite, within two units of its last place.

    The polynomial and the two parts of log 2 are those of Cephes' `logf`.
    """
    bits = np.float32(x).view(np.int32)
    n = np.int32((bits - np.int32(0x3F3504F3)) >> np.int32(23))  # so that the rest is between √½ and √2
    f = np.int32(bits - np.int32(n << np.int32(23))).view(np.float32) - np.float32(1.0)
    p = np.float32(7.0376836292e-2)
    p = _fuse(p, f, np.float32(-1.1514610310e-1))
    p = _fuse(p, f, np.float32(1.1676998740e-1))
    p = _fuse(p, f, np.float32(-1.2420140846e-1))
    p = _fuse(p, f, np.float32(1.4249322787e-1))
    p = _fuse(p, f, np.float32(-1.6668057665e-1))
    p = _fuse(p, f, np.float32(2.0000714765e-1))
    p = _fuse(p, f, np.float32(-2.4999993993e-1))
    p = _fuse(p, f, np.float32(3.3333331174e-1))
    square, whole = f * f, np.float32(n)
    rest = _fuse(whole, np.float32(_LN2_REST), p * (square * f))
    rest = _fuse(square, np.float32(-0.5), rest)
    return _fuse(whole, np.float32(_LN2), f + rest)  # type: ignore[no-any-return]

"""Exponential and logarithm in float32 that vector lanes can take together: no call, no branch, no table."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir

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


# of log(1 + f) = f − ½ f² + f³ (c₀ + c₁ f + …), √½ ≤ 1 + f ≤ √2, from the highest power down, as in Cephes' `logf`
_LOG_POWERS = (
    7.0376836292e-2,
    -1.1514610310e-1,
    1.1676998740e-1,
    -1.2420140846e-1,
    1.4249322787e-1,
    -1.6668057665e-1,
    2.0000714765e-1,
    -2.4999993993e-1,
    3.3333331174e-1,
)
_ROOT_HALF_BITS = 0x3F3504F3
_SMALL, _LARGE = (int(np.float32(x).view(np.int32)) for x in (1e-37, 1e37))  # bits of what has a logarithm here
_FAR = -(1 << 31)  # the sign's bit: beyond `REACH` in what was seen


def log_lanes(build: Any, x: Any, seen: Any) -> tuple[Any, Any]:
    """Give the logarithms of a vector of float32 within two units of their last place, and what was seen so far.

    A number that is not between 1e-37 and 1e37 is seen beyond `REACH`. The two parts of log 2 are those of Cephes.
    """
    bits = build.bitcast(x, _INTS)
    outside = build.or_(build.sub(bits, _all_ints(_SMALL)), build.sub(_all_ints(_LARGE), bits))  # below zero if it is
    seen = build.or_(seen, build.and_(outside, _all_ints(_FAR)))
    n = build.ashr(build.sub(bits, _all_ints(_ROOT_HALF_BITS)), _all_ints(23))  # so that the rest is between √½ and √2
    f = build.fsub(build.bitcast(build.sub(bits, build.shl(n, _all_ints(23))), _FLOATS), _all(1.0))
    value, *others = map(_all, _LOG_POWERS)
    for number in others:
        value = fuse_lanes(build, value, f, number)
    square, whole = build.fmul(f, f), build.sitofp(n, _FLOATS)
    rest = fuse_lanes(build, whole, _all(_LN2_REST), build.fmul(value, build.fmul(square, f)))
    rest = fuse_lanes(build, square, _all(-0.5), rest)
    return fuse_lanes(build, whole, _all(_LN2), build.fadd(f, rest)), seen

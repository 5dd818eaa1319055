"""Building blocks of inner loops in vector instructions: loops, loads, products, exponentials and logarithms.

Plain numba loops reach a third of the speed of loops built here, because the compiler keeps their sums in memory. A
vector is as long as the arithmetic wants; LLVM cuts it into the registers that the machine has. `tiles`, `sums` and
`charts` put these together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llvmlite import ir

from fedfuse.kernels.target import STEP

INT, FLOAT, DOUBLE = ir.IntType(64), ir.FloatType(), ir.DoubleType()
_INDEX = ir.IntType(32)
FAST = ("contract", "reassoc", "nsz")  # as in `target`, without `arcp`: nothing is divided here
AHEAD = 512  # numbers a row is fetched before it is read: processors by themselves do not look beyond a page of memory


def element_at(context: Any, build: Any, kind: Any, array: Any, offset: Any) -> Any:
    """A pointer to an element of an array."""
    return build.gep(context.make_array(kind)(context, build, array).data, [offset])


def load_vector(build: Any, pointer: Any, width: int) -> Any:
    """The `width` numbers of float32 at a pointer."""
    return build.load(build.bitcast(pointer, ir.VectorType(FLOAT, width).as_pointer()), align=4)


def store(build: Any, value: Any, pointer: Any) -> None:
    """Write a vector at a pointer."""
    build.store(value, build.bitcast(pointer, value.type.as_pointer()), align=4)


def spread(build: Any, value: Any, width: int) -> Any:
    """One number in every lane."""
    nothing = ir.Constant(ir.VectorType(value.type, width), ir.Undefined)
    first = build.insert_element(nothing, value, ir.Constant(_INDEX, 0))
    return build.shuffle_vector(first, nothing, ir.Constant(ir.VectorType(_INDEX, width), [0] * width))


def multiply_add(build: Any, a: Any, b: Any, total: Any) -> Any:
    """Give total + a · b, rounded once or twice as the processor has it: for training, whose bits may differ."""
    return build.fadd(total, build.fmul(a, b, flags=FAST), flags=FAST)


def add_product(build: Any, a: Any, b: Any, total: Any) -> Any:
    """Give total + a · b of vectors, rounded once: IEEE 754 defines it, the same on every machine."""
    kind = ir.FunctionType(a.type, [a.type] * 3)
    bits = 32 if a.type.element == FLOAT else 64
    return build.call(build.module.declare_intrinsic(f"llvm.fma.v{a.type.count}f{bits}", fnty=kind), [a, b, total])


def prefetch(build: Any, pointer: Any) -> None:
    """Have a cache line fetched that will be read soon."""
    byte = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [byte, _INDEX, _INDEX, _INDEX])
    fetch = build.module.declare_intrinsic("llvm.prefetch", [byte], fnty=kind)
    how = [ir.Constant(_INDEX, word) for word in (0, 2, 1)]  # to be read, and soon; it is data
    build.call(fetch, [build.bitcast(pointer, byte), *how])


Body = Callable[[list[Any], list[Any]], list[Any]]


def build_loop(
    build: Any, count: Any, steps: Sequence[Any], starts: Sequence[Any], sums: Sequence[Any], body: Body
) -> Any:
    """Run `body(pointers, sums)` `count` times, moving each pointer by its step; gives the sums back."""
    before, head = build.block, build.append_basic_block()
    inside, after = build.append_basic_block(), build.append_basic_block()
    build.branch(head)
    build.position_at_end(head)
    turn = build.phi(INT)
    carried = [build.phi(value.type) for value in (*starts, *sums)]
    build.cbranch(build.icmp_signed("<", turn, count), inside, after)
    build.position_at_end(inside)
    pointers, held = carried[: len(starts)], carried[len(starts) :]
    news = body(pointers, held)
    moved = [build.gep(pointer, [step]) for pointer, step in zip(pointers, steps, strict=True)]
    turn.add_incoming(ir.Constant(INT, 0), before)
    turn.add_incoming(build.add(turn, ir.Constant(INT, 1)), build.block)
    for phi, first, following in zip(carried, (*starts, *sums), (*moved, *news), strict=True):
        phi.add_incoming(first, before)
        phi.add_incoming(following, build.block)
    build.branch(head)
    build.position_at_end(after)
    return held


_FLOATS, _INTS = ir.VectorType(FLOAT, STEP), ir.VectorType(_INDEX, STEP)
_LN2, _LN2_REST = 0.693359375, -2.12194440e-4  # log 2 in two parts, the first times a small whole number exact
# of eʳ = 1 + r + c₂ r² + …, |r| ≤ ½ log 2, from the highest power down: the least largest relative error, 3e-9
_POWERS = (1.3814602280035615e-3, 8.368715643882751e-3, 4.166838899254799e-2, 0.1666652113199234, 0.4999999403953552)
# What 2ⁿ is taken from: n + 64 in the last bits of a float32 whose other bits are these.
_SHIFT, _ROUND, _ROUND_BITS = 64, float(3 << 22), 0x4B400000
REACH = 2 * _SHIFT  # what `exp_lanes` has seen is below it if all exponents were within ±44


def exp_lanes(build: Any, x: Any, power: float, seen: Any) -> tuple[Any, Any]:
    """Give eᵖˣ of a vector of float32 within one unit of its last place, for p = 1, ½ or −1, and what was seen so far.

    Products and their sums are rounded together, which IEEE 754 defines: the bits are the same on every machine. The
    range is not checked here but once, when all is seen (`REACH`), so that there is no branch.
    """
    # adding 1.5 · 2²³ rounds to a whole number n, which then stands in the last bits of the sum
    round_ = _all(_ROUND + _SHIFT)
    turned = add_product(build, x, _all(power / np.log(2.0)), round_)
    bits = build.bitcast(turned, _INTS)
    seen = build.or_(seen, build.xor(bits, _all_ints(_ROUND_BITS)))
    n = build.fsub(turned, round_)
    # r / p: what p multiplies is moved into the polynomial's numbers, which stays exact
    r = add_product(build, n, _all(-_LN2 / power), x)
    r = add_product(build, n, _all(-_LN2_REST / power), r)
    numbers = [float(np.float32(c)) * power ** (6 - i) for i, c in enumerate((*_POWERS, 1.0, 1.0))]
    value, *others = [_all(number * 2.0**-_SHIFT) for number in numbers]
    for number in others:
        value = add_product(build, value, r, number)
    # times 2ⁿ⁺⁶⁴, by an addition to the exponent's bits; the polynomial's numbers are divided by 2⁶⁴
    scaled = build.add(build.bitcast(value, _INTS), build.shl(bits, _all_ints(23)))
    return build.bitcast(scaled, _FLOATS), seen


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
        value = add_product(build, value, f, number)
    square, whole = build.fmul(f, f), build.sitofp(n, _FLOATS)
    rest = add_product(build, whole, _all(_LN2_REST), build.fmul(value, build.fmul(square, f)))
    rest = add_product(build, square, _all(-0.5), rest)
    return add_product(build, whole, _all(_LN2), build.fadd(f, rest)), seen


def nothing_seen() -> Any:
    """What exponentials and logarithms have seen before the first of them."""
    return _all_ints(0)


def all_seen(build: Any, seen: Any) -> Any:
    """What all lanes have seen, as one number to compare with `REACH`."""
    kind = ir.FunctionType(ir.IntType(32), [_INTS])
    join = build.module.declare_intrinsic(f"llvm.vector.reduce.or.v{STEP}i32", fnty=kind)
    return build.zext(build.call(join, [seen]), ir.IntType(64))


def _all(number: float) -> Any:
    return ir.Constant(_FLOATS, [float(np.float32(number))] * STEP)


def _all_ints(number: int) -> Any:
    return ir.Constant(_INTS, [number] * STEP)

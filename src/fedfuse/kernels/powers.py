"""Sums of powers of many numbers of float32, each read once.

Every lane has sums of its own, added up in the end in one order: the bits depend neither on threads nor on the
processor. Torch's sums are grouped in another way and may differ in the last place.
"""

from __future__ import annotations

import numpy as np

from fedfuse.kernels.mean import Doubles
from fedfuse.kernels.target import Floats, compile_exactly

_LANES = 64


@compile_exactly
def power_sums(numbers: Floats, begin: float) -> Doubles:
    """Sums of the 1st to 4th powers of some numbers about a point, in float64."""
    lanes = np.zeros(4 * _LANES)
    whole = numbers.size // _LANES * _LANES
    for start in range(0, whole, _LANES):
        for i in range(_LANES):
            x = np.float64(numbers[start + i]) - begin
            square = x * x
            lanes[i] += x
            lanes[_LANES + i] += square
            lanes[2 * _LANES + i] += square * x
            lanes[3 * _LANES + i] += square * square
    for i in range(numbers.size - whole):
        x = np.float64(numbers[whole + i]) - begin
        lanes[i] += x
        lanes[_LANES + i] += x * x
        lanes[2 * _LANES + i] += x * x * x
        lanes[3 * _LANES + i] += (x * x) * (x * x)
    sums = np.zeros(4)
    for power in range(4):
        for i in range(_LANES):
            sums[power] += lanes[power * _LANES + i]
    return sums

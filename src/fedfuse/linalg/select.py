"""The k-th largest of very many numbers, without sorting them."""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Numbers: TypeAlias = npt.NDArray[Any]

_SAMPLE = 1 << 14  # numbers that tell about where the wanted one is
_BLOCK = 1 << 17  # numbers looked at together, which stay in cache
_DEVIATIONS = 6.0  # how far the sample's word is believed, in its own standard deviations


def kth_largest(values: Tensor, k: int) -> Tensor:
    """The k-th largest of a flat tensor, exactly; k counts from 1.

    A sample says between which two numbers it lies almost certainly. One pass counts what is above them and takes out
    what is between, a few per cent of all; where the sample was wrong, or there is little to choose from, all numbers
    are partitioned.

    Example:
        >>> kth_largest(torch.tensor([3.0, 1.0, 2.0]), 2)
        tensor(2.)
    """
    numbers: Numbers = values.numpy()  # it compares several times as fast as torch does
    if len(numbers) > 4 * _SAMPLE:
        low, high = _bracket(numbers, k)
        above, between = 0, []
        for block in (numbers[begin : begin + _BLOCK] for begin in range(0, len(numbers), _BLOCK)):
            above += int(np.count_nonzero(block > high))
            between.append(block[(block >= low) & (block <= high)])
        left, rank = np.concatenate(between), k - above
        if 1 <= rank <= len(left):
            return torch.tensor(low if low == high else _partition(left, rank))
    return torch.tensor(_partition(numbers.copy(), k))


def _bracket(numbers: Numbers, k: int) -> tuple[Any, Any]:
    """Two numbers between which the k-th largest lies, as far as a sample can tell."""
    stride = (len(numbers) // _SAMPLE) | 1  # odd, so that it shares no factor with the usual widths of layers
    drawn = np.sort(numbers[::stride])[::-1]
    share, count = k / len(numbers), len(drawn)
    room = math.ceil(_DEVIATIONS * math.sqrt(count * share * (1 - share))) + 2
    place = round(share * count)
    return drawn[min(place + room, count - 1)], drawn[max(place - room, 0)]


def _partition(numbers: Numbers, k: int) -> Any:
    """The k-th largest by putting it where it would stand if all were sorted; in place."""
    place = len(numbers) - k
    numbers.partition(place)
    return numbers[place]

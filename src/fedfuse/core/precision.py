"""Numbers narrower than float32: networks may be made of them, what is summed up may not."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

_NARROW = (torch.float16, torch.bfloat16)


def in_full(t: Tensor) -> Tensor:
    """The tensor in float32 if it is narrower, else as it is: losses, squares and sums need the digits.

    Example:
        >>> in_full(torch.ones(1, dtype=torch.bfloat16)).dtype, in_full(torch.ones(1).double()).dtype
        (torch.float32, torch.float64)
    """
    return t.float() if t.dtype in _NARROW else t


def full_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype `in_full` gives.

    Example:
        >>> full_dtype(torch.float16)
        torch.float32
    """
    return torch.float32 if dtype in _NARROW else dtype


def answer_in_full(module: nn.Module, x: Tensor) -> Tensor:
    """A module's answer in float32 at least, to inputs in its own dtype.

    Example:
        >>> answer_in_full(nn.Linear(2, 1).half(), torch.ones(3, 2)).dtype
        torch.float32
    """
    return in_full(module(as_floats_of(module.parameters(), x)))


def as_floats_of(params: Iterable[Tensor], x: Tensor) -> Tensor:
    """Inputs in the dtype of a network's first floating parameter; whole numbers, such as tokens, stay as they are.

    Example:
        >>> as_floats_of([torch.ones(1, dtype=torch.bfloat16)], torch.ones(2)).dtype
        torch.bfloat16
    """
    first = next((t for t in params if t.is_floating_point()), x)
    return x.to(first.dtype) if x.is_floating_point() else x

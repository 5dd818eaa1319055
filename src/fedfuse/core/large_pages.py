"""Memory in large pages: a new tensor's first use costs as much as a fifth of a mean in small ones."""

from __future__ import annotations

import ctypes
import mmap
from functools import cache
from typing import Any

from torch import Tensor

_LEAST = 1 << 21  # bytes: a large page of the usual size
_ADVICE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux's


def use_large_pages(tensor: Tensor) -> Tensor:
    """Ask the system for large pages behind a new tensor, and give it back; where there are none, nothing happens.

    Example:
        >>> import torch
        >>> use_large_pages(torch.zeros(1 << 21)).sum()
        tensor(0.)
    """
    if _ADVICE is not None and tensor.nbytes >= _LEAST and tensor.device.type == "cpu" and (advise := _madvise()):
        page = mmap.PAGESIZE
        begin = -(-tensor.data_ptr() // page) * page
        length = (tensor.data_ptr() + tensor.nbytes - begin) // page * page
        advise(begin, length, _ADVICE)  # advice: a refusal changes nothing
    return tensor


@cache
def _madvise() -> Any:
    """The system's own call, or None; python's `mmap` advises only about its own maps."""
    try:
        advise = ctypes.CDLL(None).madvise
    except (AttributeError, OSError, TypeError):
        return None
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return advise

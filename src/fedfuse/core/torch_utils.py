"""What this project asks of torch beyond its plain interface: threads, hooks, widths of numbers, large pages."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch use one thread: with more, sums are taken in another order and idle threads spin.

    Example:
        >>> with one_thread():
        ...     torch.get_num_threads()
        1
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


Hook: TypeAlias = Callable[..., Any]


@contextmanager
def forward_hooks(
    hooks: Iterable[tuple[nn.Module, Hook]], *, before: bool = False, with_kwargs: bool = False
) -> Iterator[None]:
    """Call each hook when its module has run, or `before` it runs; they are removed at the end, whatever happens.

    A hook left behind would see, and might change, what every later user of the module computes.

    Args:
        hooks: modules, each with what torch is to call.
        before: call `hook(module, args)` before the module runs instead of `hook(module, args, output)` after it.
        with_kwargs: hand over keyword arguments too, behind the positional ones.

    Example:
        >>> import torch
        >>> seen, layer = [], nn.Linear(2, 3)
        >>> with forward_hooks([(layer, lambda _, args, out: seen.append(tuple(out.shape)))]):
        ...     _ = layer(torch.ones(1, 2))
        >>> _ = layer(torch.ones(1, 2))
        >>> seen
        [(1, 3)]
    """
    with ExitStack() as stack:
        for module, hook in hooks:
            register = module.register_forward_pre_hook if before else module.register_forward_hook
            stack.callback(register(hook, with_kwargs=with_kwargs).remove)
        yield


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
        page = (
            mmap.PAGESIZE
        )  # rounded inwards: pages at the ends may hold neighbours' numbers, of which nothing is known
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

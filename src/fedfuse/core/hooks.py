"""Hooks that watch a network while it runs, and are gone afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias

from torch import nn

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

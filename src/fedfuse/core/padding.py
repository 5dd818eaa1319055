"""Padding: which positions of a batch of texts hold something."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class HidePadding:
    """A hook that tells a network of `transformers` which tokens are padding, and remembers it until the next batch.

    Attributes:
        padding: the token that pads.
        known: where the last batch had other tokens, (rows, positions); None before the first.

    Example:
        >>> import torch
        >>> hide = HidePadding(0)
        >>> hide(nn.Identity(), (torch.tensor([[5, 0]]),), {})[1]["attention_mask"]
        tensor([[1, 0]])
    """

    def __init__(self, padding: int) -> None:
        self.padding = padding
        self.known: Tensor | None = None

    def __call__(
        self,
        module: nn.Module,  # noqa: ARG002 - torch's signature
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The same call with a mask."""
        self.known = args[0] != self.padding
        return args, {**kwargs, "attention_mask": self.known.long()}


def hide_padding(module: nn.Module, padding: int) -> nn.Module:
    """The module, told where its texts end."""
    module.register_forward_pre_hook(HidePadding(padding), with_kwargs=True)
    return module


def padding_of(module: nn.Module) -> HidePadding | None:
    """The hook that a module was given, if it was."""
    return next((hook for hook in module._forward_pre_hooks.values() if isinstance(hook, HidePadding)), None)

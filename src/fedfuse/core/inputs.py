"""What an input looks like, known without seeing one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class InputForm:
    """The shape of one input and the range of its numbers, per channel or feature.

    Example:
        >>> form = InputForm((1, 2, 2), low=(-1.0,), high=(3.0,))
        >>> form.squashed(torch.zeros(1, 1, 2, 2)).flatten()
        tensor([1., 1., 1., 1.])
    """

    shape: tuple[int, ...]
    low: tuple[float, ...] = (0.0,)
    high: tuple[float, ...] = (1.0,)

    def squashed(self, free: Tensor) -> Tensor:
        """Any numbers brought into the range, smoothly: low + (high − low) · sigmoid(u)."""
        view = (1, -1) + (1,) * (len(self.shape) - 1)
        low, high = (free.new_tensor(bound).view(view) for bound in (self.low, self.high))
        return low + (high - low) * free.sigmoid()

    def noise(self, count: int, generator: torch.Generator) -> Tensor:
        """Inputs of uniform noise over the range."""
        return self.squashed(torch.rand(count, *self.shape, generator=generator).logit(1e-6))

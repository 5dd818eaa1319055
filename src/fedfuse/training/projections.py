"""Where weights may be after each step."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedfuse.core.messages import Brief
from fedfuse.nets.cost import MASK


@dataclass(frozen=True, slots=True)
class Masked:
    """Weights that the server's mask leaves out stay zero; without a mask they are free.

    Example:
        >>> import torch
        >>> brief = Brief(0, None, {}, {"mask/w": torch.tensor([True, False])})
        >>> Masked()("w", torch.ones(2), brief), Masked()("b", torch.ones(2), brief)
        (tensor([1., 0.]), tensor([1., 1.]))
    """

    def __call__(self, name: str, value: Tensor, brief: Brief) -> Tensor:
        """The value, zero where the mask is."""
        mask = brief.memory.get(f"{MASK}/{name}")
        return value if mask is None else value * mask.to(value)

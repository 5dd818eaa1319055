"""Rows: inputs and labels in memory, the only form in which data meets a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rows:
    """Inputs with their labels.

    Attributes:
        x: float32 inputs, one per row: (n, channels, height, width) or (n, features).
        y: int64 labels.

    Example:
        >>> rows = Rows(torch.zeros(3, 2), torch.tensor([0, 1, 1]))
        >>> len(rows), rows.take([2, 0]).y.tolist(), rows.counts(2).tolist()
        (3, [1, 0], [1, 2])
    """

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return len(self.y)

    def take(self, index: Tensor | Sequence[int]) -> Rows:
        """The rows at these positions, in this order."""
        where = torch.as_tensor(index, dtype=torch.int64)
        return Rows(self.x[where], self.y[where])

    def counts(self, classes: int) -> Tensor:
        """How many rows each class has."""
        return torch.bincount(self.y, minlength=classes)

"""Rows: inputs and targets in memory, the only form in which data meets a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedfuse.errors import ConfigError


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Inputs with their targets.

    Attributes:
        x: inputs, one per row, as the network reads them: (n, channels, height, width), (n, features), …
        y: int64 labels, one per row; floating numbers, one or several per row; or int64 tokens, several per row. What
            they mean is the task's to say.

    Example:
        >>> rows = Rows(torch.zeros(3, 2), torch.tensor([0, 1, 1]))
        >>> len(rows), rows.take([2, 0]).y.tolist(), rows.counts(2).tolist()
        (3, [1, 0], [1, 2])
    """

    x: Tensor
    y: Tensor

    def __post_init__(self) -> None:
        known = self.y.is_floating_point() or self.y.dtype == torch.int64
        if not known or self.y.ndim not in (1, 2) or len(self.y) != len(self.x):
            raise ConfigError(
                f"rows: y is {describe(self.y)}, expected int64 of shape ({len(self.x)},); "
                "give one whole number per row, float32 numbers for regression and several labels, or a row of tokens"
            )

    def __len__(self) -> int:
        return len(self.y)

    def take(self, index: Tensor | Sequence[int]) -> Rows:
        """The rows at these positions, in this order."""
        where = torch.as_tensor(index, dtype=torch.int64)
        return Rows(self.x.index_select(0, where), self.y.index_select(0, where))  # thrice as fast as x[where]

    def counts(self, classes: int) -> Tensor:
        """How many rows each class has."""
        return torch.bincount(self.y, minlength=classes)


def is_channels_last(shape: Sequence[int]) -> bool:
    """Whether a row of this shape looks like a picture with its 1, 3 or 4 channels last; networks read them first.

    Example:
        >>> [is_channels_last(shape) for shape in ((28, 28, 1), (1, 28, 28), (32, 48, 4), (64, 4, 4), (9, 128, 1))]
        [True, False, True, False, False]
    """
    if len(shape) != 3 or shape[2] not in (1, 3, 4) or shape[0] in (1, 3, 4):
        return False
    low, high = sorted(shape[:2])
    return low > shape[2] and high <= 4 * low  # no picture is wider than that; signals over time may be


def describe(tensor: Tensor) -> str:
    """A tensor's dtype and shape in words.

    Example:
        >>> describe(torch.zeros(2, 3))
        'float32 of shape (2, 3)'
    """
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"

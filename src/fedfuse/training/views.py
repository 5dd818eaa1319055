"""Which rows a client trains on, beside its own."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from fedfuse.core.messages import Brief
from fedfuse.core.rows import Rows
from fedfuse.core.seams import OwnRows, View


@dataclass(frozen=True, slots=True)
class WithShared:
    """A client's own rows and some that everybody was given.

    Attributes:
        shared: the rows everybody has.
        base: what the client would see without them.

    Example:
        >>> given = Rows(torch.ones(2, 1), torch.tensor([1, 1]))
        >>> own = Rows(torch.zeros(1, 1), torch.tensor([0]))
        >>> WithShared(given)(own, Brief(0, None, {})).y.tolist()
        [0, 1, 1]
    """

    shared: Rows
    base: View = field(default_factory=OwnRows)

    def __call__(self, rows: Rows, brief: Brief) -> Rows:
        """Own rows first, then the shared ones."""
        own = self.base(rows, brief)
        return Rows(torch.cat([own.x, self.shared.x.to(own.x)]), torch.cat([own.y, self.shared.y.to(own.y)]))

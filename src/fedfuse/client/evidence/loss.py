"""The loss of the model a client was given, on the client's own rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from fedfuse.core.effort import Effort
from fedfuse.core.messages import Brief, Flaw, Form
from fedfuse.core.params import Params
from fedfuse.core.seams import PlainEvidence
from fedfuse.core.state import Local


@dataclass(frozen=True, slots=True)
class StartLoss(PlainEvidence):
    """Mean loss of the global model over the client's rows, before training."""

    batch: int = 1000
    name: ClassVar[str] = "start_loss"
    reveals: ClassVar[str] = "the global model's loss on the client's rows"
    weighs: ClassVar[bool] = True

    def __call__(self, local: Local) -> Params:
        """One number."""
        model = local.frozen("global", local.brief.params)
        total = torch.zeros((), dtype=torch.float64)
        with torch.no_grad():
            for begin in range(0, len(local.rows), self.batch):
                x, y = local.rows.x[begin : begin + self.batch], local.rows.y[begin : begin + self.batch]
                total += local.task.loss(model(x).double(), y, "sum").cpu()
        return {"start_loss/mean": total / len(local.rows)}

    def passes(self, effort: Effort) -> float:  # noqa: ARG002 - the seam's signature
        """One pass forward."""
        return 1.0

    def expects(self, brief: Brief) -> Mapping[str, Form]:  # noqa: ARG002 - the seam's signature
        """One number."""
        return {"start_loss/mean": Form((), torch.float64)}

    def check(self, notes: Params, num_examples: float) -> Flaw | None:  # noqa: ARG002 - the seam's signature
        """A loss is not negative."""
        loss = float(notes["start_loss/mean"])
        return None if 0 <= loss < 1e6 else Flaw("start_loss", loss, "a number in [0, 1e6)")

    def influence(self, notes: Params) -> Mapping[str, float]:
        """The loss, of which a client's weight is a power."""
        return {"start_loss": float(notes["start_loss/mean"])}

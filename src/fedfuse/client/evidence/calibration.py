"""How a client's logits should be shifted and scaled to be comparable with those of others."""

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
from fedfuse.nets.calibrate import Calibration, calibration


@dataclass(frozen=True, slots=True)
class LogitScale(PlainEvidence):
    """Shift and scale of the trained network's logits, found on the client's own rows (see `calibration`)."""

    kind: Calibration = "zscore"
    batch: int = 1000
    name: ClassVar[str] = "logit_scale"
    needs_classes: ClassVar[bool] = True
    reveals: ClassVar[str] = "how confident the client's network is on the client's rows, as two numbers"

    def __call__(self, local: Local) -> Params:
        """Two numbers."""
        with torch.no_grad():
            logits = torch.cat([local.predict(x).cpu() for x in local.rows.x.split(self.batch)])
        found = calibration(self.kind, logits, local.rows.y.cpu())
        return {f"{self.name}/{n}": torch.tensor(v, dtype=torch.float64) for n, v in found._asdict().items()}

    def passes(self, effort: Effort) -> float:  # noqa: ARG002 - the seam's signature
        """One pass forward."""
        return 1.0

    def expects(self, brief: Brief) -> Mapping[str, Form]:  # noqa: ARG002 - the seam's signature
        """Two numbers."""
        return {f"{self.name}/{n}": Form((), torch.float64) for n in ("shift", "scale")}

    def check(self, notes: Params, num_examples: float) -> Flaw | None:  # noqa: ARG002 - the seam's signature
        """A scale is above zero, and neither number is beyond what logits can be."""
        shift, scale = (float(notes[f"{self.name}/{n}"]) for n in ("shift", "scale"))
        if not 1e-6 <= scale <= 1e6:
            return Flaw(f"{self.name}/scale", scale, "a number from 1e-6 to 1e6")
        return None if abs(shift) <= 1e6 else Flaw(f"{self.name}/shift", shift, "a number from -1e6 to 1e6")

"""The spectrum of a client's curvature: how many directions of its loss are flat."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from fedfuse.core.messages import Brief, Flaw, Form
from fedfuse.core.params import Params
from fedfuse.core.posterior import Geometry
from fedfuse.core.state import Local, live_names
from fedfuse.nets.curvature import Look
from fedfuse.wire.codec import forms_of


@dataclass(frozen=True, slots=True)
class CurvatureSpectrum:
    """The spectrum of the client's Hessian at its trained weights, in one round only: it costs some dozen gradients.

    Attributes:
        round: the round, counted from 0, whose replies bring it.
        look: how closely the Hessian is looked at.
    """

    round: int = 0
    look: Look = field(default_factory=Look)
    name: ClassVar[str] = "spectrum"
    reveals: ClassVar[str] = "the eigenvalues of the curvature of its loss, once"

    def __call__(self, local: Local) -> Params:
        """Ritz values, their weights, and the Lipschitz estimate."""
        if local.brief.round != self.round:
            return {}
        seen = self.look(local.module, local.anchor, local.rows, local.stream(self.name))
        return {
            "spectrum/values": seen.spectrum.values.double(),
            "spectrum/weights": seen.spectrum.weights.double(),
            "spectrum/lipschitz": torch.tensor(seen.lipschitz, dtype=torch.float64),
        }

    def expects(self, brief: Brief) -> Mapping[str, Form]:
        """A row of numbers per probe, and one number; nothing in other rounds."""
        if brief.round != self.round:
            return {}
        forms = forms_of(brief.params)
        size = sum(math.prod(forms[n].shape) for n in live_names(brief))
        row = Form((self.look.probes, self.look.found(size)), torch.float64)
        return {"spectrum/values": row, "spectrum/weights": row, "spectrum/lipschitz": Form((), torch.float64)}

    def check(self, notes: Params, num_examples: float) -> Flaw | None:  # noqa: ARG002 - the seam's signature
        """Values ascend, weights are a distribution, and a Lipschitz constant is not negative."""
        if "spectrum/values" not in notes:
            return None
        values, weights = notes["spectrum/values"], notes["spectrum/weights"]
        if (values.diff() < 0).any():
            return Flaw("spectrum/values", "out of order", "eigenvalues in ascending order")
        if (weights < 0).any() or ((weights.sum(1) - 1).abs() > 1e-6).any():
            return Flaw("spectrum/weights", weights.sum(1).tolist(), "weights ≥ 0 that sum to 1")
        if notes["spectrum/lipschitz"] < 0:
            return Flaw("spectrum/lipschitz", float(notes["spectrum/lipschitz"]), "a number ≥ 0")
        return None

    def geometry(self, notes: Params) -> Geometry | None:  # noqa: ARG002 - the seam's signature
        """Says nothing about the posterior."""
        return None

"""SCAFFOLD's control variates, client half; and MOON's memory of the last model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from fedfuse.core.messages import Brief, Flaw, Form
from fedfuse.core.params import Params
from fedfuse.core.posterior import Geometry
from fedfuse.core.precision import in_full
from fedfuse.core.state import Local, filed, live_names, part
from fedfuse.wire.codec import forms_of


def carried(local: Local) -> float:
    """How far a constant unit gradient would have carried the weights: Σ_t η_t (1 − ρ^t)/(1 − ρ).

    At a constant rate this is η · `effective_steps`(τ, ρ); here the rate may change from epoch to epoch.
    """
    settings, rho = local.settings, local.settings.optimizer.own_momentum
    batches = len(local.rows) / settings.batch_size
    per_epoch = math.floor(batches) if settings.drop_last else math.ceil(batches)
    rates = torch.tensor([settings.rate(local.brief.round, e) for e in range(settings.epochs)], dtype=torch.float64)
    step = torch.arange(1, local.steps + 1, dtype=torch.float64)
    return float((rates.repeat_interleave(per_epoch)[: local.steps] * (1 - rho**step) / (1 - rho)).sum())


@dataclass(frozen=True, slots=True)
class ControlDelta:
    """SCAFFOLD's client half, option II: c_k⁺ = c_k − c + (w₀ − w_k)/(η τ), and Δc = c_k⁺ − c_k is sent.

    For η τ stands what was really `carried`, with momentum and changing rates; both variates start at zero. It touches
    the trainable weights only: buffers have no gradient to control.
    """

    name: ClassVar[str] = "control"
    reveals: ClassVar[str] = "mean gradient of the client's rows"

    def __call__(self, local: Local) -> Params:
        """The change of this client's control variate, which it also remembers."""
        scale = carried(local)
        theirs, mine = part(local.brief.memory, self.name), local.recall(self.name)
        delta = {}
        for name, weight in local.live.items():
            zero = torch.zeros_like(weight, device="cpu")
            common, before = (in_full(told.get(name, zero)) for told in (theirs, mine))
            walk = in_full(local.anchor[name]) - in_full(weight.detach())
            moved = (walk.cpu() / scale if scale else common) - common
            delta[name], mine[name] = moved.to(zero.dtype), (before + moved).to(zero.dtype)
        local.memory.update(filed(self.name, mine))
        return filed(self.name, delta)

    def expects(self, brief: Brief) -> Mapping[str, Form]:
        """One tensor per trainable weight, of its form."""
        forms = forms_of(brief.params)
        return {f"{self.name}/{n}": forms[n] for n in live_names(brief)}

    def check(self, notes: Params, num_examples: float) -> Flaw | None:  # noqa: ARG002 - the seam's signature
        """Any finite value will do."""
        return None

    def geometry(self, notes: Params) -> Geometry | None:  # noqa: ARG002 - the seam's signature
        """Says nothing about the posterior."""
        return None


@dataclass(frozen=True, slots=True)
class Remember:
    """MOON: keep this round's model for the next; send nothing."""

    name: ClassVar[str] = "last"
    reveals: ClassVar[str] = ""

    def __call__(self, local: Local) -> Params:
        """Nothing for the server; the model goes into the client's memory."""
        state = {n: t.detach() for n, t in local.module.state_dict().items()}
        local.memory.update(filed(self.name, state))
        return {}

    def expects(self, brief: Brief) -> Mapping[str, Form]:  # noqa: ARG002 - the seam's signature
        """No notes."""
        return {}

    def check(self, notes: Params, num_examples: float) -> Flaw | None:  # noqa: ARG002 - the seam's signature
        """Nothing to check."""
        return None

    def geometry(self, notes: Params) -> Geometry | None:  # noqa: ARG002 - the seam's signature
        """Says nothing about the posterior."""
        return None

"""SCAFFOLD's control variates, client half."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from fedfuse.core.messages import Brief, Form
from fedfuse.core.params import Params
from fedfuse.core.precision import in_full
from fedfuse.core.seams import PlainEvidence
from fedfuse.core.state import Local, entries_of, live_names, with_kind
from fedfuse.wire.codec import forms_of


def total_step_size(local: Local) -> float:
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
class ControlDelta(PlainEvidence):
    """SCAFFOLD's client half, option II: c_k⁺ = c_k − c + (w₀ − w_k)/(η τ), and Δc = c_k⁺ − c_k is sent.

    For η τ stands `total_step_size`, which knows momentum and changing rates; both variates start at zero. It touches
    the trainable weights only: buffers have no gradient to control.
    """

    name: ClassVar[str] = "control"
    reveals: ClassVar[str] = "mean gradient of the client's rows"
    room: ClassVar[float] = 3.0  # a client with few rows takes few steps, and each counts for more

    def __call__(self, local: Local) -> Params:
        """The change of this client's control variate."""
        scale = total_step_size(local)
        theirs = entries_of(local.brief.memory, self.name)
        delta = {}
        for name, weight in local.live.items():
            zero = torch.zeros_like(weight, device="cpu")
            common = in_full(theirs.get(name, zero))
            walk = in_full(local.anchor[name]) - in_full(weight.detach())
            moved = (walk.cpu() / scale if scale else common) - common
            delta[name] = moved.to(zero.dtype)
        return with_kind(self.name, delta)

    def expects(self, brief: Brief) -> Mapping[str, Form]:
        """One tensor per trainable weight, of its form."""
        forms = forms_of(brief.params)
        return {f"{self.name}/{n}": forms[n] for n in live_names(brief)}

    def influence(self, notes: Params) -> Mapping[str, float]:
        """The control's length: everybody's correction is a mean of these."""
        squares = sum(float(t.double().square().sum()) for t in entries_of(notes, self.name).values())
        return {self.name: math.sqrt(squares)}

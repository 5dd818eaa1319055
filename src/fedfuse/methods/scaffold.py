"""Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, ICML 2020."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedfuse.client.memory import KeepControl
from fedfuse.client.objectives import Controlled
from fedfuse.core.messages import Brief, Cohort, Form
from fedfuse.core.params import Params
from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import method
from fedfuse.core.seams import PlainEvidence, ServerPart
from fedfuse.core.state import Bench, Local, ServerState, entries_of, live_names, with_kind
from fedfuse.core.torch_utils import in_full
from fedfuse.nets.channels import carry_over
from fedfuse.server.aggregate.mean import Mean, weighted_mean
from fedfuse.server.inputs import input_form
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


@dataclass(frozen=True, slots=True)
class ControlStep(ServerPart):
    """c ← c + (1/N) Σ_{k in cohort} Δc_k, N being all clients, asked or not.

    Where a step before this one has pruned the network, the changes are carried over to its present channels; where
    that cannot be told, everything starts again at zero, and the facts say so.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"control"})

    def __call__(self, state: ServerState, cohort: Cohort, bench: Bench) -> ServerState:
        """Move the server's control variate."""
        population = max(bench.population, len(cohort))
        old = entries_of(state.memory, "control")
        notes = [u.notes for u in cohort]
        names = [n for n in cohort.updates[0].notes if n.startswith("control/")]
        shares = [1 / population] * len(cohort)
        steps: Mapping[str, Tensor] = {n.removeprefix("control/"): weighted_mean(notes, shares, n) for n in names}
        now = state.single
        mean = now.posterior.mean
        if any(n in mean and step.shape != mean[n].shape for n, step in steps.items()):
            shape = input_form(bench, now.spec).shape
            steps = carry_over(steps, cohort.updates[0].spec.kept, now.spec, shape) or {}
        if not steps:
            rest = {n: t for n, t in state.memory.items() if not n.startswith("control/")}
            return replace(state, memory=rest).noting(forgot=["control"])
        new = {n: old[n] + step if n in old else step for n, step in steps.items()}
        return replace(state, memory={**state.memory, **with_kind("control", new)})


@method("scaffold", paper="arXiv:1910.06378")
def scaffold() -> Recipe:
    """FedAvg whose clients correct their drift by control variates (option II, zero start).

    The correction c − c_k is the gradient of a linear term of the local loss. In the first round both variates are
    zero and the round is FedAvg's.
    """
    return Recipe(
        objective=Controlled(),
        evidence=(ControlDelta(),),
        memory=(KeepControl(),),
        aggregate=Mean(),
        steps=(ControlStep(),),
        publishes=("control",),
    )

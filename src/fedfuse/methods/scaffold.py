"""Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, ICML 2020, arXiv:1910.06378.

Every client k keeps a control variate c_k, an estimate of the gradient of its own loss, and the server keeps their
mean c over all N clients. A round of Algorithm 1, with option II and a global step size of 1, is

    client   w_k ← w_k − η (g_k(w_k) − c_k + c), τ times, from w₀                          line 10   `Controlled`
             c_k⁺ = c_k − c + (w₀ − w_k) / (η τ);  send w_k and Δc_k = c_k⁺ − c_k          12, 13    `ControlDelta`
             c_k ← c_k⁺                                                                    line 14   `KeepControl`
    server   w ← Σ f_k w_k                                                                 16, 17    `Mean`
             c ← c + (1/N) Σ Δc_k                                                          16, 17    `ControlStep`

All variates start at zero, so the first round is FedAvg's. The paper weighs clients alike; here f_k is a client's share
of the examples, as in FedAvg.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedfuse.core.messages import Brief, Cohort, Form
from fedfuse.core.params import Params
from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import method
from fedfuse.core.seams import Batch, Objective, PlainEvidence, ServerPart, TaskLoss
from fedfuse.core.state import Bench, Local, ServerState, entries_of, live_names, with_kind
from fedfuse.core.torch_utils import in_full
from fedfuse.nets.channels import carry_over
from fedfuse.server.aggregate.mean import Mean, weighted_mean
from fedfuse.server.inputs import input_form
from fedfuse.training.pulls import Pull, pull_of
from fedfuse.wire.codec import forms_of

CONTROL = "control"  # what the variates are called in the brief, in replies and in both memories


@dataclass(frozen=True, slots=True)
class Controlled:
    """The correction of line 10 as a linear term of the loss: base + ⟨c − c_k, w⟩.

    Its gradient is c − c_k, so the training loop needs no special case, and the term composes with other objectives.
    """

    base: Objective = field(default_factory=TaskLoss)

    def __call__(self, local: Local, batch: Batch) -> Tensor:
        """The base loss and the linear term; nothing is added while both variates are zero."""
        gap = local.once(CONTROL, _control_gap)
        return self.base(local, batch) + sum((gap[n] * in_full(w)).sum() for n, w in local.live.items() if n in gap)

    def pull(self, local: Local) -> Pull | None:
        """The same term for compiled training."""
        base, gap = pull_of(self.base, local), local.once(CONTROL, _control_gap)
        return None if base is None else replace(base, linear={n: base.linear.get(n, 0) + gap[n] for n in gap})


def _control_gap(local: Local) -> dict[str, Tensor]:
    """C − c_k of every weight that has either."""
    common, own, zero = entries_of(local.brief.memory, CONTROL), local.recall(CONTROL), torch.zeros(())
    gaps = {n: in_full(common.get(n, zero)) - in_full(own.get(n, zero)) for n in local.live if n in common or n in own}
    return {n: gap.to(local.settings.device) for n, gap in gaps.items()}


@dataclass(frozen=True, slots=True)
class ControlDelta(PlainEvidence):
    """Δc_k = (w₀ − w_k) / (η τ) − c, lines 12 and 13 put together, of the trainable weights.

    For η τ stands `total_step_size`, which knows momentum and changing rates. Buffers have no gradient to control.
    """

    name: ClassVar[str] = CONTROL
    reveals: ClassVar[str] = "mean gradient of the client's rows"
    room: ClassVar[float] = 3.0  # a client with few rows takes few steps, and each counts for more

    def __call__(self, local: Local) -> Params:
        """The change of this client's control variate; zero if it took no step."""
        scale, variates = total_step_size(local), entries_of(local.brief.memory, CONTROL)
        delta = {}
        for name, weight in local.live.items():
            common = in_full(variates.get(name, torch.zeros_like(weight, device="cpu")))
            walk = (in_full(local.anchor[name]) - in_full(weight.detach())).cpu()
            delta[name] = ((walk / scale if scale else common) - common).to(weight.dtype)
        return with_kind(CONTROL, delta)

    def expects(self, brief: Brief) -> Mapping[str, Form]:
        """One tensor per trainable weight, of its form."""
        forms = forms_of(brief.params)
        return {f"{CONTROL}/{n}": forms[n] for n in live_names(brief)}

    def influence(self, notes: Params) -> Mapping[str, float]:
        """The length of Δc_k: the correction of every client is a mean of these."""
        squares = sum(float(t.double().square().sum()) for t in entries_of(notes, CONTROL).values())
        return {CONTROL: math.sqrt(squares)}


def total_step_size(local: Local) -> float:
    """How far a constant unit gradient would have carried the weights: Σ_t η_t (1 − ρ^t)/(1 − ρ).

    At a constant rate this is η · `effective_steps`(τ, ρ), and η τ without momentum.
    """
    settings, rho = local.settings, local.settings.optimizer.own_momentum
    batches = len(local.rows) / settings.batch_size
    per_epoch = math.floor(batches) if settings.drop_last else math.ceil(batches)
    rates = torch.tensor([settings.rate(local.brief.round, e) for e in range(settings.epochs)], dtype=torch.float64)
    step = torch.arange(1, local.steps + 1, dtype=torch.float64)
    return float((rates.repeat_interleave(per_epoch)[: local.steps] * (1 - rho**step) / (1 - rho)).sum())


@dataclass(frozen=True, slots=True)
class KeepControl:
    """c_k ← c_k + Δc_k, line 14: what the client remembers for its next round and sends nowhere."""

    def __call__(self, local: Local, notes: Params) -> Params:
        """The variate of every trained weight."""
        own, zero = local.recall(CONTROL), torch.zeros(())
        moved = {n: (in_full(own.get(n, zero)) + in_full(t)).to(t.dtype) for n, t in entries_of(notes, CONTROL).items()}
        return with_kind(CONTROL, {**own, **moved})


@dataclass(frozen=True, slots=True)
class ControlStep(ServerPart):
    """c ← c + (1/N) Σ_{k in cohort} Δc_k, lines 16 and 17, N being all clients, asked or not.

    Where a step before this one has pruned the network, the changes are carried over to its present channels; where
    that cannot be told, everything starts again at zero, and the facts say so.
    """

    needs: ClassVar[frozenset[str]] = frozenset({CONTROL})

    def __call__(self, state: ServerState, cohort: Cohort, bench: Bench) -> ServerState:
        """Move the server's control variate."""
        population = max(bench.population, len(cohort))
        notes, shares = [u.notes for u in cohort], [1 / population] * len(cohort)
        names = [n for n in notes[0] if n.startswith(f"{CONTROL}/")]
        steps: Mapping[str, Tensor] = {n.removeprefix(f"{CONTROL}/"): weighted_mean(notes, shares, n) for n in names}
        now = state.single
        mean = now.posterior.mean
        if any(n in mean and step.shape != mean[n].shape for n, step in steps.items()):
            shape = input_form(bench, now.spec).shape
            steps = carry_over(steps, cohort.updates[0].spec.kept, now.spec, shape) or {}
        if not steps:
            rest = {n: t for n, t in state.memory.items() if not n.startswith(f"{CONTROL}/")}
            return replace(state, memory=rest).noting(forgot=[CONTROL])
        old = entries_of(state.memory, CONTROL)
        new = {n: old[n] + step if n in old else step for n, step in steps.items()}
        return replace(state, memory={**state.memory, **with_kind(CONTROL, new)})


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
        publishes=(CONTROL,),
    )

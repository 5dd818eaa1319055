"""SCAFFOLD's server half."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from fedfuse.core.messages import Cohort
from fedfuse.core.seams import ServerPart
from fedfuse.core.state import Bench, ServerState, entries_of, with_kind
from fedfuse.nets.carry import carry_over
from fedfuse.nets.inputs import input_form
from fedfuse.server.aggregate.mean import weighted_mean


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

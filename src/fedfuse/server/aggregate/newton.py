"""Federated Newton steps: the sums of all sites give the step that the pooled rows would."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from fedfuse.core.messages import Cohort
from fedfuse.core.params import Params
from fedfuse.core.seams import ServerPart
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench, ServerState
from fedfuse.nets.glm import Family, NewtonSums, family_of, newton_direction, penalized_loss, penalties, solve_symmetric
from fedfuse.nets.glm_layer import WEIGHTS, layer_matrix, sums_in, with_layer
from fedfuse.nets.head import linear_layer
from fedfuse.server.inference import coefficient_table, heterogeneity, one_step_moves

_FALLEN = 1e-3  # of the information in some direction since the first exchange: classes are then told apart completely


@dataclass(frozen=True, slots=True)
class NewtonStep(ServerPart):
    """w ← w − (ΣH_k + ρ)⁻¹ (Σg_k + ρw); a step that raised the summed loss is halved instead.

    The weights are kept in float64 in the server's memory and published, so that steps converge beyond the network's
    own precision. Where clients bring fits of their own, w = (ΣH_k)⁻¹ ΣH_k w_k, the inverse-variance estimate.

    Attributes:
        ridge: ρ, of all weights but the constant's; 0 leaves estimates unpenalized, as inference needs.
        family: "auto" takes the task's, "poisson" counts.
    """

    ridge: float = 0.0
    family: Literal["auto", "poisson"] = "auto"
    needs: ClassVar[frozenset[str]] = frozenset({"newton", "start"})
    laws: ClassVar[frozenset[str]] = frozenset({"order", "pure", "dtype", "finite", "repeat"})

    def check_network(self, networks: Mapping[str, Spec], bench: Bench, rounds: int) -> None:  # noqa: ARG002
        """There must be a linear layer at the end, and the family must suit the task."""
        family_of(bench.task, self.family)
        for spec in networks.values():
            linear_layer(spec.layout)

    def __call__(self, cohort: Cohort, state: ServerState, bench: Bench) -> ServerState:
        """One step, and what can be told of the fit so far."""
        spec, params, family = state.single.spec, state.single.posterior.mean, family_of(bench.task, self.family)
        weights = layer_matrix(spec, params, state.memory)
        each = [sums_in({n: t.clone() for n, t in u.notes.items()}) for u in cohort]
        total = sum(each[1:], each[0])
        ridge, free = penalties(weights, self.ridge, family, linear_layer(spec.layout).bias is not None)
        fits = [u.notes["newton/fit"].clone() for u in cohort if "newton/fit" in u.notes]
        if fits:
            moved = _inverse_variance(each, fits, free)
            memory: dict[str, Tensor] = {WEIGHTS: moved}
            facts: dict[str, Any] = {"exchange": "local fits"}
            moves = [fit - moved for fit in fits]
        else:
            moved, memory, facts = self._step(total, weights, ridge, free, state.memory)
            moves = one_step_moves(each, free)
        count = sum(float(u.notes["newton/count"]) for u in cohort)  # what the door bounds is a say, not the rows
        facts |= {"heterogeneity": heterogeneity(each, moves, free)}
        facts |= _separation(total, free, state.memory, memory, family)
        facts["coefficients"] = coefficient_table(moved, total, free, family, count, bench.features)
        after = state.fused(with_layer(spec, params, moved))
        kept = {n: t for n, t in state.memory.items() if not n.startswith("newton/")}
        return replace(after, memory={**kept, **memory}).noting(newton=facts)

    def _step(
        self, sums: NewtonSums, weights: Tensor, ridge: Tensor, free: Tensor, before: Params
    ) -> tuple[Tensor, dict[str, Tensor], dict[str, Any]]:
        """The next weights, what to remember, and what to tell."""
        loss = penalized_loss(sums.loss, weights, ridge)
        gradient = float((sums.gradient + ridge * weights)[free].abs().max())
        facts: dict[str, Any] = {"loss": loss, "gradient": gradient}
        last = before.get("newton/loss")
        if last is not None and loss > float(last) + 1e-12 * abs(float(last)):
            step, origin = before["newton/step"] / 2, before["newton/origin"].clone()
            kept, halved = last.clone(), True
        else:
            step, origin = newton_direction(sums, weights, ridge, free), weights
            kept, halved = torch.tensor(loss, dtype=torch.float64), False
        moved = origin + step
        memory = {WEIGHTS: moved, "newton/origin": origin, "newton/step": step, "newton/loss": kept}
        return moved, memory, facts | {"step": float(step.abs().max()), "halved": halved}


def _inverse_variance(each: list[NewtonSums], fits: list[Tensor], free: Tensor) -> Tensor:
    """(ΣH_k)⁻¹ ΣH_k w_k, over the free weights."""
    chosen = free.flatten()
    hessians = [s.hessian[chosen][:, chosen] for s in each]
    right = sum(h @ w.flatten()[chosen] for h, w in zip(hessians, fits, strict=True))
    assert isinstance(right, Tensor)
    found = torch.zeros(free.numel(), dtype=right.dtype)
    found[chosen] = solve_symmetric(sum(hessians[1:], hessians[0]), right)
    return found.view_as(free)


def _separation(
    sums: NewtonSums, free: Tensor, before: Params, memory: dict[str, Tensor], family: Family
) -> dict[str, Any]:
    """Whether classes are told apart completely, so that a coefficient runs away and has no finite estimate."""
    chosen = free.flatten()
    least = torch.linalg.eigvalsh(sums.hessian[chosen][:, chosen])[0].clamp(min=0)
    first = before.get("newton/information", least)
    memory["newton/information"] = first.clone()
    apart = family in ("bernoulli", "multinomial") and float(first) > 0 and float(least) < _FALLEN * float(first)
    return {"separation": bool(apart)}

"""RegMean++: layers fused one after another, each by regression behind the layers already fused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedfuse.core.factor import LowRank, as_stack
from fedfuse.core.messages import Cohort
from fedfuse.core.seams import ServerPart
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench, ServerState
from fedfuse.errors import ConfigError
from fedfuse.linalg.ridge import solve_moments
from fedfuse.linalg.subspace import times, written
from fedfuse.nets.blocks import Block
from fedfuse.nets.factors import read_factor
from fedfuse.nets.turns import TURN, block_in_turn, turns_done
from fedfuse.server.aggregate.closed_form import FitHead


@dataclass(frozen=True, slots=True)
class RefitLayers(ServerPart):
    """M = (Σ f_k M_k Ã_k)(Σ f_k Ã_k)⁻¹ for the layer whose turn it is, from `LayerAnswers`; the last one by `FitHead`.

    The moments Ã_k are of what the layer reads behind the layers already fused, so each layer is fitted to what it will
    really see. Inputs that nobody has seen keep the layer as it is.

    Attributes:
        head: how the last layer is fitted.
    """

    head: FitHead
    needs: ClassVar[frozenset[str]] = FitHead.needs
    only_sums: ClassVar[bool] = True
    laws: ClassVar[frozenset[str]] = FitHead.laws

    def __call__(self, cohort: Cohort, state: ServerState, bench: Bench) -> ServerState:
        """Fit one layer, and pass the turn to the next."""
        update = cohort.updates[0]
        block = block_in_turn(update.spec, state.memory, self.head.layer)
        if block is None:
            return self.head(cohort, state, bench)
        params = {n: t.clone() for n, t in update.posterior.mean.items()}
        params |= block.split(self._fit(cohort, block), params)
        done = {f"{TURN}/done": torch.tensor(turns_done(state.memory) + 1)}
        fused = state.fused(params, spec=update.spec).noting(layer=block.name)
        return replace(fused, memory={**fused.memory, **done})

    def _fit(self, cohort: Cohort, block: Block) -> Tensor:
        """The layer's matrices, one per group."""
        now = block.matrices(cohort.updates[0].posterior.mean).double()
        moments: list[Tensor] = [torch.zeros((), dtype=torch.float64)] * block.groups
        answers = torch.zeros_like(now)
        for share, update in zip(cohort.weights.tolist(), cohort, strict=True):
            factor = read_factor(update.notes, "layer/in")
            if factor is None:
                raise ConfigError(f"{update.client} brings no moments of layer {block.name}; let it answer this round")
            stack = LowRank.diagonal(factor.rest) if isinstance(factor, LowRank) else as_stack(factor)
            moments = [total + share * written(stack[group]) for group, total in enumerate(moments)]
            answers += share * update.notes["layer/answers"].double()
        steps = [solve_moments(A, P - times(M, A)) for A, P, M in zip(moments, answers, now, strict=True)]
        return now + torch.stack(steps)

    @property
    def needs_classes(self) -> bool:
        """As the head does."""
        return self.head.needs_classes

    def check_network(self, networks: Mapping[str, Spec], bench: Bench, rounds: int) -> None:
        """The head must be there, with one output per target."""
        self.head.check_network(networks, bench, rounds)

"""Wang et al., Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization, NeurIPS 2020.

A client that takes more local steps pulls the mean further, and so changes which objective is minimized. FedNova
averages the clients' walks per gradient, and then goes as far as they went on average:

    a_k = ‖a_k‖₁, the weight of all gradients in client k's walk: τ_k steps with momentum ρ_k      `effective_steps`
    d_k = (w₀ − w_k) / a_k
    w = w₀ − τ_eff Σ_k f_k d_k   with   τ_eff = Σ_k f_k a_k                                        `NormalizedMean`

Clients train as in FedAvg. With equal a_k this is FedAvg.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from fedfuse.core.messages import Cohort
from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import method
from fedfuse.core.seams import ServerPart
from fedfuse.core.settings import effective_steps
from fedfuse.core.state import Bench, ServerState
from fedfuse.errors import ConfigError
from fedfuse.server.aggregate.mean import mean_by_examples, weighted_mean
from fedfuse.server.training import training_of


@dataclass(frozen=True, slots=True)
class NormalizedMean(ServerPart):
    """w = w₀ − τ_eff Σ_k f_k (w₀ − w_k)/a_k with a_k = `effective_steps`(τ_k, ρ_k) and τ_eff = Σ_k f_k a_k.

    A client's reply names the momentum ρ_k and the rate it trained with: where rates differ, a_k is measured in steps
    of the first client's rate.

    Attributes:
        momentum: ρ of the clients' SGD, to be taken instead of what they say; their rates are then taken to agree.
    """

    counts_steps: ClassVar[bool] = True
    momentum: float | None = None
    only_sums: ClassVar[bool] = True
    tensorwise: ClassVar[bool] = True
    laws: ClassVar[frozenset[str]] = frozenset({"order", "one", "scale", "pure", "dtype", "finite", "repeat"})

    def __call__(self, cohort: Cohort, state: ServerState, bench: Bench) -> ServerState:  # noqa: ARG002
        """Mean of normalized walks, as one weighted mean of the start and the clients."""
        steps = torch.tensor(self._effective_steps(cohort, state.round), dtype=torch.float64)
        reach = float((cohort.weights * steps).sum())
        shares = cohort.weights * reach / steps
        roles = state.single.spec.layout.roles
        start, sources = state.single.posterior.mean, [u.posterior.mean for u in cohort]
        # w₀ − Σ s_k (w₀ − w_k) = (1 − Σ s_k) w₀ + Σ s_k w_k: one pass over the clients, no copy of their differences
        shares_with_start = torch.cat([1 - shares.sum().reshape(1), shares])
        mean = {
            # statistics are no walk: they are averaged as they are
            n: mean_by_examples(cohort, n)
            if roles.get(n) in ("statistic", "counter")
            else weighted_mean([start, *sources], shares_with_start, n)
            for n in cohort.names
        }
        return state.fused(mean, spec=cohort.updates[0].spec).noting(effective_steps=reach)

    @property
    def needs(self) -> frozenset[str]:
        """The start, and how clients trained unless that was given."""
        return frozenset({"start"} if self.momentum is not None else {"start", "training"})

    def _effective_steps(self, cohort: Cohort, round_: int) -> list[float]:
        """a_k of every client, none of them 0."""
        if idle := [u.client for u in cohort if not u.steps]:
            raise ConfigError(
                f"{idle[0]} took no local step and FedNova divides by them; leave it out, or fuse by another method"
            )
        if self.momentum is not None:
            return [effective_steps(u.steps, self.momentum) for u in cohort]
        settings = [training_of(u, "FedNova") for u in cohort]
        first = settings[0].rate(round_, 0)
        return [
            effective_steps(u.steps, t.optimizer.own_momentum)
            * (t.rate(round_, 0) / first)  # exactly 1 where rates agree
            for u, t in zip(cohort, settings, strict=True)
        ]


@method("fednova", paper="arXiv:2007.07481")
def fednova(momentum: float | None = None) -> Recipe:
    """Average the clients' walks per local step, so that those who step more do not pull harder.

    Args:
        momentum: the clients' SGD momentum; by default the run's own.
    """
    return Recipe(aggregate=NormalizedMean(momentum))

"""q-FedAvg: clients that fare worse weigh more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from fedfuse.core.messages import Cohort
from fedfuse.core.params import squared_distance
from fedfuse.core.seams import ServerPart
from fedfuse.core.state import Bench, ServerState
from fedfuse.server.aggregate.mean import mean_by_examples, weighted_mean
from fedfuse.server.training import common_rate


@dataclass(frozen=True, slots=True)
class FairMean(ServerPart):
    """w = w₀ − Σ F_k^q Δ_k / Σ h_k with Δ_k = L (w₀ − w_k), h_k = q F_k^{q−1} ‖Δ_k‖² + L F_k^q, L = 1/η.

    F_k is the global model's loss at client k before training (Li et al. 2020, Algorithm 2). It is one weighted mean
    of the start and the clients; q = 0 is the plain mean with equal weights.
    """

    q: float
    needs: ClassVar[frozenset[str]] = frozenset({"start", "start_loss", "training"})
    laws: ClassVar[frozenset[str]] = frozenset({"order", "pure", "dtype", "finite", "repeat"})

    def __call__(self, cohort: Cohort, state: ServerState, bench: Bench) -> ServerState:  # noqa: ARG002
        """Weigh the clients' moves by the q-th power of their losses."""
        start, smooth = state.single.posterior.mean, 1 / common_rate(cohort, state.round, "q-FedAvg")
        loss = torch.tensor([float(u.notes["start_loss/mean"]) for u in cohort], dtype=torch.float64) + 1e-10
        square = (
            torch.tensor([squared_distance(u.posterior.mean, start) for u in cohort], dtype=torch.float64) * smooth**2
        )
        step = self.q * loss ** (self.q - 1) * square + smooth * loss**self.q
        shares = loss**self.q * smooth / step.sum()
        sources = [u.posterior.mean for u in cohort]
        stays = torch.cat([1 - shares.sum().reshape(1), shares])
        buffers = state.single.spec.layout.with_role("statistic", "counter")
        mean = {
            n: mean_by_examples(cohort, n) if n in buffers else weighted_mean([start, *sources], stays, n)
            for n in cohort.names
        }
        return state.fused(mean).noting(client_shares=dict(zip(cohort.clients, shares.tolist(), strict=True)))

"""Li et al., Fair Resource Allocation in Federated Learning, ICLR 2020.

The objective is Σ_k p_k F_k^{q+1} / (q + 1), so clients with a larger loss weigh more. A round of Algorithm 2, with
L = 1/η in place of the Lipschitz constant, is

    client   F_k = F_k(w₀), the loss before training; then w_k as in FedAvg                              `StartLoss`
    server   Δ_k = L (w₀ − w_k),   h_k = q F_k^{q−1} ‖Δ_k‖² + L F_k^q
             w = w₀ − Σ F_k^q Δ_k / Σ h_k                                                                `FairMean`
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from pydantic import NonNegativeFloat

from fedfuse.core.messages import Brief, Cohort, Flaw, Form
from fedfuse.core.params import Params, squared_distance
from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import method
from fedfuse.core.seams import Effort, PlainEvidence, ServerPart
from fedfuse.core.state import Bench, Local, ServerState
from fedfuse.server.aggregate.mean import mean_by_examples, weighted_mean
from fedfuse.server.training import common_rate


@dataclass(frozen=True, slots=True)
class StartLoss(PlainEvidence):
    """Mean loss of the global model over the client's rows, before training."""

    batch: int = 1000
    name: ClassVar[str] = "start_loss"
    reveals: ClassVar[str] = "the global model's loss on the client's rows"
    weighs: ClassVar[bool] = True

    def __call__(self, local: Local) -> Params:
        """One number."""
        model = local.frozen("global", local.brief.params)
        total = torch.zeros((), dtype=torch.float64)
        with torch.no_grad():
            for begin in range(0, len(local.rows), self.batch):
                x, y = local.rows.x[begin : begin + self.batch], local.rows.y[begin : begin + self.batch]
                total += local.task.loss(model(x).double(), y, "sum").cpu()
        return {"start_loss/mean": total / len(local.rows)}

    def passes(self, effort: Effort) -> float:  # noqa: ARG002 - the seam's signature
        """One pass forward."""
        return 1.0

    def expects(self, brief: Brief) -> Mapping[str, Form]:  # noqa: ARG002 - the seam's signature
        """One number."""
        return {"start_loss/mean": Form((), torch.float64)}

    def check(self, notes: Params, num_examples: float) -> Flaw | None:  # noqa: ARG002 - the seam's signature
        """A loss is not negative."""
        loss = float(notes["start_loss/mean"])
        return None if 0 <= loss < 1e6 else Flaw("start_loss", loss, "a number in [0, 1e6)")

    def influence(self, notes: Params) -> Mapping[str, float]:
        """The loss, of which a client's weight is a power."""
        return {"start_loss": float(notes["start_loss/mean"])}


@dataclass(frozen=True, slots=True)
class FairMean(ServerPart):
    """w = w₀ − Σ F_k^q Δ_k / Σ h_k, as one weighted mean of the start and the clients.

    With s_k = L F_k^q / Σ h_j it is (1 − Σ s_k) w₀ + Σ s_k w_k; q = 0 is the plain mean with equal weights.
    """

    q: float
    needs: ClassVar[frozenset[str]] = frozenset({"start", "start_loss", "training"})
    laws: ClassVar[frozenset[str]] = frozenset({"order", "pure", "dtype", "finite", "repeat"})

    def __call__(self, cohort: Cohort, state: ServerState, bench: Bench) -> ServerState:  # noqa: ARG002
        """Weigh the clients' moves by the q-th power of their losses."""
        start, smooth = state.single.posterior.mean, 1 / common_rate(cohort, state.round, "q-FedAvg")
        loss = torch.tensor([float(u.notes["start_loss/mean"]) for u in cohort], dtype=torch.float64)
        loss += 1e-10  # for q < 1 the power q − 1 of a loss of zero is infinite; the released code has the same number
        distance = torch.tensor([squared_distance(u.posterior.mean, start) for u in cohort], dtype=torch.float64)
        h = self.q * loss ** (self.q - 1) * (distance * smooth**2) + smooth * loss**self.q
        shares = loss**self.q * smooth / h.sum()
        sources = [u.posterior.mean for u in cohort]
        shares_with_start = torch.cat([1 - shares.sum().reshape(1), shares])
        buffers = state.single.spec.layout.with_role("statistic", "counter")
        mean = {
            n: mean_by_examples(cohort, n) if n in buffers else weighted_mean([start, *sources], shares_with_start, n)
            for n in cohort.names
        }
        return state.fused(mean).noting(client_shares=dict(zip(cohort.clients, shares.tolist(), strict=True)))


@method("qfedavg", paper="arXiv:1905.10497")
def qfedavg(q: NonNegativeFloat = 0.2) -> Recipe:
    """Clients on which the global model does worse weigh more, by the q-th power of their loss.

    Args:
        q: 0 is the plain mean with equal weights; large values serve the worst client.
    """
    return Recipe(evidence=(StartLoss(),), aggregate=FairMean(q))

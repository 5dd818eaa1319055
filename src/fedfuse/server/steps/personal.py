"""Personal models: a posterior of its own for every client, between the common one and the client's."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from fedfuse.core.messages import ClientUpdate, Cohort, Start
from fedfuse.core.model import Apart
from fedfuse.core.seams import Result, ServerPart
from fedfuse.core.state import Bench, ServerState
from fedfuse.server.aggregate.charts import FusionRule, MeanIn


@dataclass(frozen=True, slots=True)
class Personalize(ServerPart):
    """Give each client the barycenter of the fused posterior and its own; all train on from the fused one.

    Attributes:
        chart: where the mean of the two is taken.
        share: what the client's own posterior weighs, from 0 (the fused one) to 1 (its own).
    """

    chart: FusionRule
    share: float
    result: ClassVar[Result] = "apart"

    def __call__(self, state: ServerState, cohort: Cohort, bench: Bench) -> ServerState:
        """The clients' models in client order; the next round begins with the fused one."""
        common = state.single
        fused = ClientUpdate("", common.posterior, 1 - self.share, 0, common.spec)
        mix = MeanIn(self.chart)
        pairs = (Cohort((fused, replace(own, num_examples=self.share))) for own in cohort)
        members = tuple(mix(pair, state, bench).single for pair in pairs)
        return replace(state, model=Apart(members), starts={"": Start(common.spec, common.posterior.mean)})

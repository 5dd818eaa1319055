"""No federation at all."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from fedfuse.core.messages import Cohort, Start
from fedfuse.core.model import Apart, Single
from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import method
from fedfuse.core.seams import Result, ServerPart
from fedfuse.core.state import Bench, ServerState


@dataclass(frozen=True, slots=True)
class KeepApart(ServerPart):
    """Local training: the result is all the clients' models, each judged alone."""

    needs: ClassVar[frozenset[str]] = frozenset()
    laws: ClassVar[frozenset[str]] = frozenset({"pure", "dtype", "finite", "repeat"})
    result: ClassVar[Result] = "apart"

    def __call__(self, cohort: Cohort, state: ServerState, bench: Bench) -> ServerState:  # noqa: ARG002
        """Hand each client its own model back; clients not asked yet still begin at the common start."""
        mine = {u.client: {n: t.clone() for n, t in u.posterior.mean.items()} for u in cohort}
        starts = {"": state.start, **state.starts, **{u.client: Start(u.spec, mine[u.client]) for u in cohort}}
        members = tuple(Single(u.spec, replace(u.posterior, mean=mine[u.client])) for u in cohort)
        return replace(state, model=Apart(members), starts=starts)


@method("local")
def local() -> Recipe:
    """Every client trains alone; its scores are the mean of the clients' own models' scores."""
    return Recipe(aggregate=KeepApart())

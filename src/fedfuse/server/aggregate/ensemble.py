"""Fusing predictions: the result is the clients' networks, and a rule by which they answer together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from fedfuse.core.messages import ClientUpdate, Cohort
from fedfuse.core.model import Answering, Single
from fedfuse.core.seams import Result, ServerPart
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench, ServerState
from fedfuse.errors import ConfigError, RecipeError
from fedfuse.nets.calibrate import Affine, Calibration, calibration
from fedfuse.nets.combine import Combine, FirstLayer, MeanProbability, OpenSetVote, TopLogit
from fedfuse.nets.mixture import Mixture
from fedfuse.nets.stack import cost_of
from fedfuse.server.aggregate.cover import Cover
from fedfuse.server.aggregate.mean import ALL_LAWS
from fedfuse.server.steps.lessons import input_form

_NOTHING: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class KeepAll(ServerPart):
    """Keep the clients' networks, of whatever architecture, and let them answer together by a rule.

    Attributes:
        combine: the rule.
        weights: whether a member counts alike or by its number of examples, where the rule weighs members.
        cover: whom to leave out because others cover them; None keeps everybody.
        calibrate: how logits are made comparable, for AMS; None leaves them as they are.
        fitted: who finds the calibration: each client on its own rows, or the server on its own.
    """

    combine: Combine = field(default_factory=MeanProbability)
    weights: Literal["uniform", "examples"] = "uniform"
    cover: Cover | None = None
    calibrate: Calibration | None = None
    fitted: Literal["clients", "server"] = "clients"
    result: ClassVar[Result] = "mixture"
    mixes_networks: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.calibrate is not None and not isinstance(self.combine, TopLogit):
            raise RecipeError(
                f"calibration is of logits that are compared, and {type(self.combine).__name__} compares none; "
                "leave it out or choose by the largest logit"
            )

    @property
    def laws(self) -> frozenset[str]:
        """All but what the rule takes away: a sum of equal answers is not that answer, nor is a calibrated one."""
        rule, several = self.combine, isinstance(self.combine, TopLogit | FirstLayer) and self.combine.k != 1
        changed = self.calibrate is not None or isinstance(rule, OpenSetVote)
        return ALL_LAWS - ({"one", "agree"} if changed else {"agree"} if several else set())

    @property
    def needs(self) -> frozenset[str]:
        """What choosing and calibrating need, and networks that can answer."""
        chosen = (self.cover.needs if self.cover is not None else _NOTHING) | {"network"}
        if self.calibrate is None:
            return chosen
        return chosen | {"logit_scale" if self.fitted == "clients" else "server_rows"}

    def __call__(self, cohort: Cohort, state: ServerState, bench: Bench) -> ServerState:
        """The mixture of the cohort's networks, in client order; clients would still begin where they began."""
        everybody = Mixture(members_of(cohort), self._shares(cohort), self._rule(cohort, bench))
        mixture, facts = everybody, dict[str, Any]()
        if self.cover is not None:
            kept = self.cover(cohort, everybody, bench)
            fewer = Cohort(tuple(cohort.updates[i] for i in kept.places))
            mixture = Mixture(members_of(fewer), self._shares(fewer), self._rule(fewer, bench))
            facts = {"kept": list(fewer.clients), "covered": kept.covered}
        facts |= costs(mixture, [u.spec for u in cohort], bench)
        return replace(state, model=mixture, starts={"": state.start}).noting(**facts)

    def _shares(self, cohort: Cohort) -> Tensor:
        alike = torch.full((len(cohort),), 1 / len(cohort), dtype=torch.float64)
        return cohort.weights if self.weights == "examples" else alike

    def _rule(self, cohort: Cohort, bench: Bench) -> Combine:
        if self.calibrate is None or not isinstance(self.combine, TopLogit):
            return self.combine
        maps = _brought(cohort) if self.fitted == "clients" else self._fit(cohort, bench)
        return replace(self.combine, shift=tuple(m.shift for m in maps), scale=tuple(m.scale for m in maps))

    def _fit(self, cohort: Cohort, bench: Bench) -> list[Affine]:
        assert self.calibrate is not None
        rows = bench.need_rows("calibration on the server")
        found = []
        for update in cohort:
            with torch.no_grad():
                parts = [Single(update.spec, update.posterior).logits(x) for x in rows.x.split(1000)]
            found.append(calibration(self.calibrate, torch.cat(parts), rows.y))
        return found


def members_of(updates: Iterable[ClientUpdate]) -> tuple[Single, ...]:
    """The updates' networks with tensors of their own: an update's may live in a file that goes away."""
    return tuple(
        Single(u.spec, replace(u.posterior, mean={n: t.clone() for n, t in u.posterior.mean.items()})) for u in updates
    )


def _brought(cohort: Cohort) -> list[Affine]:
    return [Affine(*(float(u.notes[f"logit_scale/{n}"]) for n in Affine._fields)) for u in cohort]


def costs(model: Answering, everybody: Sequence[Spec], bench: Bench) -> dict[str, Any]:
    """How many networks answer, and what share of everybody's multiplications an answer takes."""
    kept = model.members
    facts: dict[str, Any] = {"members": len(kept), "clients": len(everybody)}
    try:
        shapes = {spec: input_form(bench, spec).shape for spec in everybody}  # each reads inputs of its own form
        full, mine = (
            [cost_of(s, shapes.get(s) or input_form(bench, s).shape) for s in specs]
            for specs in (everybody, [m.spec for m in kept])
        )
    except (RecipeError, ConfigError):  # what inputs look like is not known here, so neither is what they cost
        return facts
    products: float = sum(c.products for c in mine)
    rule = model.combine if isinstance(model, Mixture) else None
    if isinstance(rule, FirstLayer) and rule.k != "all":
        run = min(1.0, rule.k / len(mine))  # the others stop after their first layer
        products = sum(c.first for c in mine) + run * sum(c.products for c in mine)
    return facts | {"cost": products / max(1, sum(c.products for c in full))}

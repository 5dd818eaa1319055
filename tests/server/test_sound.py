"""Whoever breaks a fusion is found, refused by name, and the round goes on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import pytest
import torch

from fedfuse.core.messages import ClientUpdate, Cohort
from fedfuse.core.model import Single
from fedfuse.core.posterior import Posterior
from fedfuse.core.recipe import Recipe
from fedfuse.core.seams import ServerPart
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench, ServerState
from fedfuse.errors import FuseError, NotConverged
from fedfuse.server.admission.admit import Admission, Spool
from fedfuse.server.aggregate.mean import ALL_LAWS, Mean
from fedfuse.server.round import fuse_admitted

SPEC = Spec("mlp", {"inputs": 2, "hidden": [], "classes": 2})
START = ServerState(0, Single.of(SPEC.build(), SPEC))


def admission(count: int, bad: set[int], value: float = float("inf")) -> Admission:
    def update(place: int) -> ClientUpdate:
        mean = {n: t.clone() for n, t in START.single.posterior.mean.items()}
        if place in bad:
            mean["classifier.bias"][0] = value
        return ClientUpdate(f"c{place}", Posterior(mean), 1.0, 1, SPEC)

    return Admission(Cohort.of([update(i) for i in range(count)]), Spool(2**20))


@dataclass(frozen=True, slots=True)
class Fragile(ServerPart):
    """A mean that fails in some way when it meets a large number, and counts how often it was asked."""

    error: type[Exception]
    calls: list[int] = field(default_factory=list)
    laws: ClassVar[frozenset[str]] = ALL_LAWS

    def __call__(self, cohort: Cohort, state: ServerState, bench: Bench) -> ServerState:
        self.calls.append(len(cohort))
        if any(float(u.posterior.mean["classifier.bias"].abs().max()) > 10 for u in cohort):
            raise self.error("no good")
        return Mean()(cohort, state, bench)


@pytest.mark.parametrize("bad", [{0}, {3}, {9}, {2, 7}, {0, 1, 2}])
def test_the_clients_without_whom_the_model_is_finite_are_refused(bad: set[int]) -> None:
    seen = admission(10, bad)
    after = fuse_admitted(Recipe(name="mean", aggregate=Mean()), seen, START, Bench())
    assert {r["client"] for r in seen.refused} == {f"c{i}" for i in bad}
    assert len(seen.cohort) == 10 - len(bad)
    assert all(torch.isfinite(t).all() for t in after.single.posterior.mean.values())
    assert seen.refused[0]["got"] == "the fused classifier.bias is not finite"


@pytest.mark.parametrize("error", [NotConverged, IndexError, RuntimeError, torch.linalg.LinAlgError, ZeroDivisionError])
def test_whatever_a_method_ends_in_the_culprit_is_found_by_halving(error: type[Exception]) -> None:
    rule, seen = Fragile(error), admission(64, {37}, 100.0)
    fuse_admitted(Recipe(name="fragile", aggregate=rule), seen, START, Bench())
    assert [r["client"] for r in seen.refused] == ["c37"]
    assert len(rule.calls) <= 2 + 2 * 6, "the whole, two halves at most for each of six levels, and what is left"


def test_what_no_absence_mends_ends_in_an_error_of_ours() -> None:
    seen = admission(4, {0, 1, 2, 3}, 100.0)
    with pytest.raises(FuseError, match="method 'fragile' could not fuse these updates: IndexError: no good"):
        fuse_admitted(Recipe(name="fragile", aggregate=Fragile(IndexError)), seen, START, Bench())
    with pytest.raises(NotConverged, match="no good"):
        fuse_admitted(Recipe(name="fragile", aggregate=Fragile(NotConverged)), seen, START, Bench())
    assert (len(seen.cohort), seen.refused) == (4, [])


def test_a_sound_fusion_is_done_once() -> None:
    rule = Fragile(RuntimeError)
    fuse_admitted(Recipe(name="fragile", aggregate=rule), admission(5, set()), START, Bench())
    assert rule.calls == [5]

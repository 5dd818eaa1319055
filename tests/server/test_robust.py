"""Robust filters against brute force, and against a client that lies."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn

import fedfuse
from builders import cohort_of, start_of
from fedfuse.core.messages import Cohort
from fedfuse.core.posterior import Diag, Posterior
from fedfuse.core.recipe import Recipe
from fedfuse.core.seams import Guard, ServerPart
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench, ServerState
from fedfuse.errors import ConfigError, RecipeError
from fedfuse.server.aggregate.charts import RKLB, MeanIn
from fedfuse.server.aggregate.mean import Mean
from fedfuse.server.filters import find_guard
from fedfuse.server.guards import GUARDS, CoordinateMedian, Krum, NormClip, TrimmedMean
from fedfuse.server.round import fuse_round
from fedfuse.wire.codec import decode, encode

NET = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
SPEC = Spec.of(NET)


def drawn(seed: int, scale: float = 1.0) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {
        n: scale * torch.randn(t.shape, generator=draw) if t.is_floating_point() else torch.tensor(seed)
        for n, t in NET.state_dict().items()
    }


def vector(state: Any) -> np.ndarray[Any, Any]:
    return np.concatenate([t.double().numpy().ravel() for t in state.values() if t.is_floating_point()])


def cohort(states: list[dict[str, Tensor]], in_bytes: bool = True) -> Cohort:
    held = [decode(encode(s, {})).tensors if in_bytes else s for s in states]
    return cohort_of(held, SPEC, [1.0 + k for k in range(len(held))])


STATES = [drawn(k) for k in range(6)]
START = start_of(SPEC, drawn(99))


def mean_after(by: Guard, states: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return dict(fuse_round(Recipe(aggregate=Mean(), guard=by), cohort(states), START, Bench()).single.posterior.mean)


def test_the_median_is_scipys() -> None:
    for count in (5, 6):
        got = mean_after(CoordinateMedian(), STATES[:count])
        assert np.allclose(vector(got), np.median([vector(s) for s in STATES[:count]], axis=0), atol=1e-6)
        assert got["1.num_batches_tracked"].item() == count - 1


@pytest.mark.parametrize("trim", [0.0, 0.17, 0.34])
def test_the_trimmed_mean_is_scipys(trim: float) -> None:
    got = vector(mean_after(TrimmedMean(trim), STATES))
    assert np.allclose(got, stats.trim_mean([vector(s) for s in STATES], trim, axis=0), atol=1e-6)


def test_krum_keeps_whom_brute_force_keeps() -> None:
    """Score of i: the least sum of squared distances to any n − f − 2 others."""
    points, f = [vector(s) for s in STATES], 2
    scores = [
        min(sum(((p - q) ** 2).sum() for q in group) for group in combinations(points[:i] + points[i + 1 :], 6 - f - 2))
        for i, p in enumerate(points)
    ]
    best = sorted(np.argsort(scores)[:3])
    kept = Krum(byzantine=f, keep=3)(cohort(STATES), START)
    assert kept.clients == tuple(f"c{i}" for i in best)


def test_clipping_shortens_long_moves_along_themselves() -> None:
    start = START.single.posterior.mean
    moves = [np.linalg.norm(vector(s) - vector(start)) for s in STATES]
    limit = float(np.median(moves)) * 0.9
    clipped = NormClip(limit=limit)(cohort(STATES), START)
    for u, state, move in zip(clipped, STATES, moves, strict=True):
        expected = vector(start) + min(1.0, limit / move) * (vector(state) - vector(start))
        assert np.allclose(vector({n: u.posterior.mean[n] for n in state}), expected, atol=1e-5)
    assert np.linalg.norm(vector(mean_after(NormClip(limit=limit), STATES)) - vector(start)) <= limit + 1e-4


def test_with_a_ratio_the_median_move_is_the_limit() -> None:
    start, far = vector(START.single.posterior.mean), [*STATES[:4], drawn(7, scale=1e4)]
    moves = sorted(np.linalg.norm(vector(s) - start) for s in far)
    clipped = NormClip()(cohort(far), START)
    most = max(np.linalg.norm(vector({n: u.posterior.mean[n] for n in far[0]}) - start) for u in clipped)
    assert most == pytest.approx(moves[2], rel=1e-4)


@pytest.mark.parametrize("name", [name for name in GUARDS if name != "private"])  # which is noise, and no judge
def test_one_liar_cannot_carry_the_mean_away(name: str) -> None:
    """Five alike and one far away: behind a guard the mean stays with the five."""
    honest = [
        {n: t + 0.01 * drawn(k)[n] if t.is_floating_point() else t for n, t in drawn(99).items()} for k in range(5)
    ]
    liar = drawn(50, scale=1e6)
    got = vector(
        mean_after(find_guard({"name": name, **({"trim": 0.2} if name == "trimmed" else {})})[1], [*honest, liar])
    )
    assert np.abs(got - vector(drawn(99))).max() < 0.2


def test_a_guard_keeps_geometry_and_evidence() -> None:
    updates = [
        replace(u, notes={"counts/x": torch.ones(1)}, posterior=replace(u.posterior, geometry=Diag({})))
        for u in cohort(STATES)
    ]
    for name in GUARDS:
        for u in GUARDS[name]()(Cohort(tuple(updates)), START):
            assert isinstance(u.posterior.geometry, Diag)
            assert list(u.notes) == ["counts/x"]


@pytest.mark.parametrize("guard", ["krum", "median", "trimmed", "clip"])
def test_a_guard_stands_before_weights_without_dimensions(guard: str) -> None:
    """A learned temperature is a scalar; it once ended the round."""
    near = [{"w": torch.full((3,), 0.1 * k), "scale": torch.tensor(0.1 * k)} for k in range(5)]
    liar = {"w": torch.full((3,), 1e6), "scale": torch.tensor(1e6)}
    way = {"name": guard, **({"trim": 0.2} if guard == "trimmed" else {})}
    base = near[2] if guard == "clip" else None
    fused = fedfuse.fuse([*near, liar], guard=way, start=base, bounds={"over": "off"}).state_dict()
    assert 0 <= float(fused["scale"]) < 1


def test_the_record_says_who_was_dropped() -> None:
    far = [*STATES[:5], drawn(7, scale=100.0)]
    facts = fuse_round(Recipe(aggregate=Mean(), guard=Krum()), cohort(far), START, Bench()).facts
    assert facts["guard_dropped"] == ["c5"]
    assert "Krum" in facts["guard"]


def test_impossible_guards_say_so() -> None:
    with pytest.raises(ConfigError, match="no guard 'krumm'; did you mean 'krum'"):
        find_guard("krumm")
    with pytest.raises(ConfigError, match="no option 'bizantine'; did you mean 'byzantine'"):
        find_guard({"name": "krum", "bizantine": 1})
    with pytest.raises(ConfigError, match="guard krum.byzantine is 'two'"):
        find_guard({"name": "krum", "byzantine": "two"})
    with pytest.raises(RecipeError, match="needs at least 4 updates, got 3"):
        Krum()(cohort(STATES[:3]), START)
    with pytest.raises(RecipeError, match=r"\[0, 0.5\)"):
        TrimmedMean(0.5)(cohort(STATES), START)


def with_fisher(states: list[dict[str, Tensor]], *scales: float) -> Cohort:
    """Clients whose weights are alike and whose evidence is not."""
    fisher = torch.rand(2, 3, generator=torch.Generator().manual_seed(5))
    seen = zip(cohort(states), scales, strict=True)
    return Cohort(
        tuple(replace(u, notes={"fisher/0.weight": s * (1 + 0.1 * k) * fisher}) for k, (u, s) in enumerate(seen))
    )


@pytest.mark.parametrize("scale", [30.0, 1e6, 1e30, 1e200])
def test_krum_sees_evidence_that_claims_to_be_very_sure(scale: float) -> None:
    """It looked at weights alone: whoever sent an honest move with a Fisher of a thousand times took the model over."""
    near = [{n: t + 0.01 * k if t.is_floating_point() else t for n, t in drawn(0).items()} for k in range(6)]
    scales = [1.0, 1.0, 1.0, scale, 1.0, 1.0]
    assert Krum()(cohort(near), START).clients != ("c0", "c1", "c2", "c4", "c5")
    assert Krum()(with_fisher(near, *scales), START).clients == ("c0", "c1", "c2", "c4", "c5")


def test_evidence_of_another_rank_or_of_few_is_not_compared() -> None:
    seen = with_fisher(STATES, *[1.0] * 6).updates
    odd = replace(seen[2], notes={"fisher/0.weight": torch.ones(2, 1)})
    assert Krum()(Cohort((*seen[:2], odd, *seen[3:])), START).clients == Krum()(cohort(STATES), START).clients
    bare = replace(seen[2], notes={})
    assert Krum()(Cohort((*seen[:2], bare, *seen[3:])), START).clients == Krum()(cohort(STATES), START).clients


@dataclass(frozen=True, slots=True)
class WhoIsThere(ServerPart):
    """A step that writes down whose updates it was given."""

    seen: list[tuple[str, ...]] = field(default_factory=list)

    def __call__(self, state: ServerState, cohort: Cohort, bench: Bench) -> ServerState:
        self.seen.append(cohort.clients)
        return state


def test_whom_a_guard_drops_no_step_sees() -> None:
    far = [*STATES[:5], drawn(7, 1e3)]
    step = WhoIsThere()
    fuse_round(Recipe(aggregate=Mean(), guard=Krum(), steps=(step,)), cohort(far), START, Bench())
    assert step.seen == [("c0", "c1", "c2", "c3", "c4")]


def test_krum_compares_evidence_that_is_a_single_number() -> None:
    """A loss has no dimensions; it once ended the round."""
    seen = cohort([drawn(k, 0.01) for k in range(5)])
    losses = (1.0, 1.1, 0.9, 1.0, 1e4)
    told = (replace(u, notes={"start_loss/mean": torch.tensor(x)}) for u, x in zip(seen, losses, strict=True))
    assert "c4" not in Krum()(Cohort(tuple(told)), START).clients


@pytest.mark.parametrize("sure", [1e-30, 1e-3, 1e3])
def test_evidence_cannot_undo_the_median(sure: float) -> None:
    """All have the common centre, so that whoever claims to be sure of his own weights is sure of everybody's."""
    variances = [{n: torch.full_like(t, sure if k == 5 else 1.0) for n, t in s.items()} for k, s in enumerate(STATES)]
    updates = [
        replace(u, posterior=Posterior(u.posterior.mean, Diag({n: t for n, t in v.items() if t.is_floating_point()})))
        for u, v in zip(cohort(STATES), variances, strict=True)
    ]
    recipe = Recipe(aggregate=MeanIn(RKLB), guard=CoordinateMedian())
    got = fuse_round(recipe, Cohort(tuple(updates)), START, Bench()).single.posterior.mean
    assert np.allclose(vector(got), np.median([vector(s) for s in STATES], axis=0), atol=1e-6)


@dataclass(frozen=True, slots=True)
class CountsWhoWasAsked(ServerPart):
    """A guard of somebody else's that must know how clients are drawn, and remembers something of every round."""

    asked: float = 1.0
    laws: ClassVar[frozenset[str]] = frozenset()

    def __call__(self, cohort: Cohort, state: ServerState) -> Cohort:
        return cohort

    def drawn_by(self, bench: Bench) -> CountsWhoWasAsked:
        return replace(self, asked=bench.participation)

    def account(self, cohort: Cohort, state: ServerState) -> ServerState:
        return state.noting(asked=self.asked, seen=len(cohort))


def test_any_guard_is_told_how_clients_were_drawn_and_may_keep_accounts() -> None:
    """Nobody asks which guard it is: the round tells all of them."""
    recipe = Recipe(aggregate=Mean(), guard=CountsWhoWasAsked())
    facts = fuse_round(recipe, cohort(STATES), START, Bench(participation=0.25)).facts
    assert (facts["asked"], facts["seen"]) == (0.25, 6)
    plain = fuse_round(Recipe(aggregate=Mean(), guard=Krum()), cohort(STATES), START, Bench(participation=0.25))
    assert not plain.memory

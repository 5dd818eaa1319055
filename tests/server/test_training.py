"""A server that trains honours the masks everybody is told of."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import fedfuse
from fedfuse.core.inputs import InputForm
from fedfuse.core.messages import Brief
from fedfuse.core.model import Single
from fedfuse.core.recipe import Recipe
from fedfuse.core.rows import Rows
from fedfuse.core.seams import Work
from fedfuse.core.settings import LocalSettings
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench, ServerState, entries_of
from fedfuse.engines.local import InProcess, Population
from fedfuse.methods.fedduap import DynamicUpdate
from fedfuse.server.aggregate.adaptive import ServerOptimizer
from fedfuse.server.loop import RunPlan, run
from fedfuse.server.steps.distill import Distill
from fedfuse.server.steps.synthesize import ServerInputs
from fedfuse.server.training import train_on
from fedfuse.training.round import train_on_rows

MLP = Spec("mlp", {"inputs": 6, "hidden": [8], "classes": 3})
LOCAL = LocalSettings(batch_size=4, optimizer={"lr": 0.2, "momentum": 0.5})


def rows(n: int, seed: int) -> Rows:
    return Rows(torch.randn(n, 6, generator=torch.Generator().manual_seed(seed)), torch.arange(n) % 3)


def rounds_of(recipe: Recipe, rounds: int = 3) -> list[ServerState]:
    torch.manual_seed(0)
    people = Population.of({client: rows(12, seed) for seed, client in enumerate("abc")})
    server = rows(30, 9)
    bench = Bench(server, population=3, classes=3, local=LOCAL, inputs=InputForm((6,)))
    start = ServerState(0, Single.of(MLP.build(), MLP))
    return [r.state for r in run(recipe, InProcess(people), bench, None, start, RunPlan(rounds=rounds))]


def stray(state: ServerState) -> int:
    """How many weights are not zero though a mask leaves them out."""
    mean = state.single.posterior.mean
    return sum(int(mean[n][~m].count_nonzero()) for n, m in entries_of(state.memory, "mask").items())


def masking(method: str) -> Recipe:
    options: dict[str, dict[str, Any]] = {
        "imc": {"at": 1, "every": 1, "times": 2, "rule": "fixed", "rate": 0.6},
        "prunefl": {"every": 2, "most": 3, "steps": 4},
    }
    return fedfuse.recipe(method, **options[method])


@pytest.mark.parametrize("method", ["imc", "prunefl"])
@pytest.mark.parametrize("first", [True, False])
def test_no_weight_under_the_mask_comes_back(method: str, first: bool) -> None:
    recipe, du = masking(method), fedfuse.recipe("feddu")
    walk = DynamicUpdate(C=5.0, explode=1e9)
    steps = (walk, *recipe.steps) if first else (*recipe.steps, walk)
    states = rounds_of(replace(recipe, steps=steps, evidence=(*recipe.evidence, *du.evidence)))
    assert any(s.facts["server_step"]["taken"] for s in states)
    assert sum(int((~m).sum()) for m in entries_of(states[-1].memory, "mask").values()) > 10
    assert [stray(s) for s in states] == [0, 0, 0]


@pytest.mark.parametrize("method", ["imc", "prunefl"])
def test_a_student_is_masked_too(method: str) -> None:
    recipe = masking(method)
    teach = Distill(ServerInputs(), epochs=2, begin="mean")
    states = rounds_of(replace(recipe, steps=(*recipe.steps, teach)))
    assert all("distilled" in s.facts for s in states)
    assert [stray(s) for s in states] == [0, 0, 0]


def test_an_aggregators_momentum_brings_nothing_back() -> None:
    recipe = replace(masking("imc"), aggregate=ServerOptimizer("momentum", lr=1.0))
    assert [stray(s) for s in rounds_of(recipe, 4)] == [0, 0, 0, 0]


def test_without_masks_it_is_a_clients_training() -> None:
    torch.manual_seed(0)
    state, bench = ServerState(2, Single.of(MLP.build(), MLP)), Bench(classes=3, local=LOCAL, seed=4)
    brief = Brief(2, MLP, state.single.posterior.mean, classes=3)
    plain = train_on_rows(Work(LOCAL), brief, "server", rows(9, 1), seed=4)
    mine = train_on(rows(9, 1), state, LOCAL, bench)
    assert all(mine.params[n].equal(t) for n, t in plain.params.items())

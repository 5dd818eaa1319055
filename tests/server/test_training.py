"""What a server knows of labels, and that it trains under the masks that clients are told of."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from scipy.spatial.distance import jensenshannon

import fedfuse
from builders import start_of, update_of
from fedfuse.core.inputs import InputForm
from fedfuse.core.messages import Brief, Cohort
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
from fedfuse.server.training import (
    cohort_histogram,
    divergence,
    population_histogram,
    record_label_counts,
    train_on,
)
from fedfuse.training.round import train_on_rows

MLP = Spec("mlp", {"inputs": 6, "hidden": [8], "classes": 3})
LOCAL = LocalSettings(batch_size=4, optimizer={"lr": 0.2, "momentum": 0.5})


def balanced(n: int, seed: int) -> Rows:
    return Rows(torch.randn(n, 6, generator=torch.Generator().manual_seed(seed)), torch.arange(n) % 3)


def rounds_of(recipe: Recipe, rounds: int = 3) -> list[ServerState]:
    people = Population.of({client: balanced(12, seed) for seed, client in enumerate("abc")})
    bench = Bench(balanced(30, 9), population=3, classes=3, local=LOCAL, inputs=InputForm((6,)))
    return [r.state for r in run(recipe, InProcess(people), bench, None, start_of(MLP), RunPlan(rounds=rounds))]


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
    state, bench, own = start_of(MLP, round_=2), Bench(classes=3, local=LOCAL, seed=4), balanced(9, 1)
    brief = Brief(2, MLP, state.single.posterior.mean, classes=3)
    plain = train_on_rows(Work(LOCAL), brief, "server", own, seed=4)
    mine = train_on(own, state, LOCAL, bench)
    assert all(mine.params[n].equal(t) for n, t in plain.params.items())


def cohort(**counts: list[int]) -> Cohort:
    notes = {c: {"counts/labels": torch.tensor(n)} for c, n in counts.items()}
    return Cohort.of([update_of(c, {}, MLP, float(sum(n)), notes=notes[c]) for c, n in counts.items()])


@pytest.mark.parametrize(("classes", "value"), [(1, 0.7583), (2, 0.6100), (5, 0.3113)])
def test_the_divergence_of_a_few_classes_from_ten_balanced_ones(classes: int, value: float) -> None:
    few = torch.tensor([7] * classes + [0] * (10 - classes))
    even = torch.full((10,), 3)
    assert divergence(few, even) == pytest.approx(value, abs=5e-5)
    assert divergence(few, even) == pytest.approx(jensenshannon(few / few.sum(), even / 30, base=2) ** 2)


def test_counts_are_remembered_per_client_and_the_newest_wins() -> None:
    state = start_of(MLP, {}, memory={"mask/w": torch.ones(1)})
    state = record_label_counts(state, cohort(a=[3, 1], b=[0, 4]))
    state = record_label_counts(state, cohort(b=[2, 2], c=[1, 0]))
    assert set(state.memory) == {"mask/w", "labels/a", "labels/b", "labels/c"}
    assert population_histogram(state.memory, 3).tolist() == [6.0, 3.0]


def test_clients_never_heard_are_guessed_until_they_answer() -> None:
    state = record_label_counts(start_of(MLP, {}), cohort(a=[6, 0], b=[2, 0]))
    assert population_histogram(state.memory, 4).tolist() == [8.0 + 4.0, 4.0]
    assert population_histogram(state.memory, 4, "ignored").tolist() == [8.0, 0.0]
    assert population_histogram(state.memory, 2).tolist() == [8.0, 0.0]


def test_a_cohorts_histogram_is_that_of_its_rows_together() -> None:
    assert cohort_histogram(cohort(a=[3, 1], b=[0, 4])).tolist() == [3, 5]

"""Every method for every task: it works, or it says in one sentence before any training that it needs classes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fedfuse
from fedfuse.core.messages import Cohort, Envelope
from fedfuse.core.model import Apart, Single
from fedfuse.core.posterior import Posterior
from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import all_methods
from fedfuse.core.rows import Rows
from fedfuse.core.settings import LocalSettings, Optimizer
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench, ServerState
from fedfuse.errors import ConfigError, RecipeError
from fedfuse.server.admission.admit import admit_all
from fedfuse.server.judge import Judge
from fedfuse.server.round import fuse_round
from fedfuse.tasks import BINARY, CLASSIFICATION, REGRESSION, Task, task_named
from fedfuse.training.round import client_round

FEATURES, CLIENTS = 6, ("a", "b", "c")
CLASSES = {"classification": 3, "binary": 2, "multilabel": 3, "regression": 1}
LOCAL = LocalSettings(batch_size=8, epochs=2, optimizer=Optimizer(lr=0.1))
NEED_CLASSES = {"ams", "dense", "fedov", "pfnm", "fedma", "feddu", "fedap", "fedduap", "imc", "temperature"}


def rows(task: Task, seed: int, count: int) -> Rows:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(count, FEATURES, generator=draw)
    score = x @ torch.linspace(-1, 1, FEATURES)
    targets: dict[str, Tensor] = {
        "classification": (score > 0).long() + (score > 1).long(),
        "binary": (score > 0).long(),
        "multilabel": torch.stack([score > 0, score > 1, x[:, 0] > 0], 1).float(),
        "regression": score,
    }
    return Rows(x, targets[task.name])


def setting(task: Task) -> tuple[ServerState, Bench]:
    classes, server = CLASSES[task.name], rows(task, 99, 30)
    spec = Spec("mlp", {"inputs": FEATURES, "hidden": [7], "classes": task.outputs(classes)})
    torch.manual_seed(0)
    state = ServerState(0, Single(spec, Posterior(spec.build().state_dict())))
    return state, Bench(server, server.x, len(CLIENTS), classes, LOCAL, task=task)


def one_round(recipe: Recipe, state: ServerState, bench: Bench) -> tuple[ServerState, Cohort]:
    state = recipe.begin_round(state, bench)
    brief, work = state.brief(recipe.publishes, bench.classes, bench.task), recipe.work(LOCAL)
    sent = [
        Envelope(c, client_round(work, brief, c, rows(bench.task, i, 12 + 5 * i)).payload)
        for i, c in enumerate(CLIENTS)
    ]
    admission = admit_all(sent, brief, recipe.evidence, CLIENTS, training=LOCAL, trains=recipe.trains)
    assert not admission.refused
    return fuse_round(recipe, admission.cohort, state, bench), admission.cohort


@pytest.mark.parametrize("task", [t for t in CLASSES if t != "classification"])
@pytest.mark.parametrize("name", sorted(all_methods()))
def test_a_method_works_for_a_task_or_refuses_it(name: str, task: str) -> None:
    recipe, (state, bench) = fedfuse.recipe(name), setting(task_named(task))
    if name in NEED_CLASSES:
        with pytest.raises(RecipeError, match=f"'{name}' .* {task}"):
            recipe.check(1, bench, state)
        return
    if name == "hrank":  # whatever the task, it removes channels of convolutions
        with pytest.raises(ConfigError, match="no convolution"):
            recipe.check(30, bench, state)
        return
    recipe.check(1, bench, state)
    after, cohort = one_round(recipe, state, bench)
    judge = Judge(rows(bench.task, 7, 50), bench.classes, task=bench.task)
    scores = judge.score(after.model)
    assert scores.keys() >= set(bench.task.scores)
    if isinstance(after.model, Apart):
        return
    answers = after.model.logits(judge.test.x)
    assert answers.shape == (50, bench.task.outputs(bench.classes))
    assert bool(answers.isfinite().all())
    assert len(cohort) == 3


@pytest.mark.parametrize("task", CLASSES)
def test_training_gets_better_at_its_task(task: str) -> None:
    state, bench = setting(task_named(task))
    recipe, judge = fedfuse.recipe("fedavg"), Judge(rows(bench.task, 7, 200), bench.classes, task=bench.task)
    before = judge.score(state.model)
    for _ in range(6):
        state, _ = one_round(recipe, state, bench)
    after = judge.score(state.model)
    falling = [name for name in ("rmse", "nll") if name in after]
    assert all(after[name] < before[name] for name in falling)
    assert falling


@pytest.mark.parametrize("task", [BINARY, REGRESSION])
def test_an_ensemble_answers_with_the_mean_prediction(task: Task) -> None:
    state, bench = setting(task)
    after, cohort = one_round(fedfuse.recipe("ensemble"), state, bench)
    x = rows(task, 3, 9).x
    each = torch.stack([task.predict(Single(u.spec, u.posterior).logits(x)) for u in cohort])
    torch.testing.assert_close(task.predict(after.model.logits(x)), each.mean(0))  # type: ignore[union-attr]


def test_files_carry_their_task() -> None:
    module = torch.nn.Linear(FEATURES, 1)
    updates = [
        fedfuse.local_update(module, rows(REGRESSION, i, 20), task="regression", client=str(i), lr=0.1)
        for i in range(3)
    ]
    fused = fedfuse.fuse(updates, "fedavg")
    assert fused.task is REGRESSION
    odd = fedfuse.local_update(module, rows(BINARY, 5, 20), task="binary", client="odd")
    refused = fedfuse.fuse([*updates, odd], "fedavg").refused
    assert [r["client"] for r in refused] == ["odd"]
    with pytest.raises(RecipeError, match="one class"):
        fedfuse.local_update(module, rows(REGRESSION, 0, 9), "pfnm", task="regression")
    with pytest.raises(fedfuse.FuseError, match="expected float32"):
        fedfuse.local_update(module, rows(CLASSIFICATION, 0, 9), task="regression")

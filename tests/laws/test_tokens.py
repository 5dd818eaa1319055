"""Every method on networks that read tokens: it works, or it says in one sentence before any training why it cannot."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fedfuse
from fedfuse.core.inputs import InputForm
from fedfuse.core.messages import Envelope
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
from fedfuse.tasks import CLASSIFICATION, LANGUAGE_MODEL, TEXT_CLASSIFICATION, Task
from fedfuse.training.round import client_round

LENGTH, TOKENS, CLIENTS = 5, 9, ("a", "b", "c")
LOCAL = LocalSettings(batch_size=8, epochs=1, optimizer=Optimizer(lr=0.1))
SIZES = {"tokens": TOKENS, "length": LENGTH, "width": 8, "heads": 2, "depth": 1}


class Encoder(nn.Module):
    """Somebody's own network around torch's encoder."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 12, 0.0, batch_first=True)
        self.embed, self.body = nn.Embedding(TOKENS, 8), nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.read = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = self.read(self.body(self.embed(x)).mean(1))
        return answer


NETWORKS: dict[str, tuple[Task, Spec]] = {
    "language-model": (LANGUAGE_MODEL, Spec("transformer", SIZES)),
    "text-classification": (TEXT_CLASSIFICATION, Spec("text_classifier", {**SIZES, "classes": 3})),
    "own": (CLASSIFICATION, Spec.of(Encoder())),
}
COUNT_CLASSES = {"ams", "dense", "fedov", "pfnm", "fedma", "feddu", "fedap", "fedduap", "imc", "temperature"}
FIT_A_LAYER = {"newton", "refit", "ridge"}
MOVE_INPUTS = {"dense", "fedov", "ridge"}
OTHER_NETWORKS = {"pfnm": "fully connected", "fedma": "one plain layer after another"}
LATER = {"fedap", "fedduap", "hrank", "imc"}  # they prune after many rounds, whatever the network


def rows(task: Task, seed: int, count: int) -> Rows:
    x = torch.randint(1, TOKENS, (count, LENGTH), generator=torch.Generator().manual_seed(seed))
    return Rows(x, x.roll(-1, 1) if task is LANGUAGE_MODEL else x.sum(1) % 3)


def setting(task: Task, spec: Spec) -> tuple[ServerState, Bench]:
    server, form = rows(task, 99, 30), InputForm((LENGTH,), tokens=TOKENS)
    torch.manual_seed(0)
    state = ServerState(0, Single(spec, Posterior(spec.build().state_dict())))
    classes = TOKENS if task is LANGUAGE_MODEL else 3
    return state, Bench(server, server.x, len(CLIENTS), classes, LOCAL, inputs=form, task=task)


def one_round(recipe: Recipe, state: ServerState, bench: Bench) -> ServerState:
    state = recipe.begin_round(state, bench)
    brief, work = state.brief(recipe.publishes, bench.classes, bench.task), recipe.work(LOCAL)
    sent = [
        Envelope(c, client_round(work, brief, c, rows(bench.task, i, 20 + 5 * i)).payload)
        for i, c in enumerate(CLIENTS)
    ]
    admission = admit_all(sent, brief, recipe.evidence, CLIENTS, training=LOCAL, trains=recipe.trains)
    assert not admission.refused
    return fuse_round(recipe, admission.cohort, state, bench)


def refusal(name: str, task: Task) -> str | None:
    """The words in which a method is expected to refuse."""
    if task is LANGUAGE_MODEL and name in COUNT_CLASSES:
        return "language-model"
    if task is LANGUAGE_MODEL and name in FIT_A_LAYER:
        return "one target per row"
    if name in MOVE_INPUTS:
        return "as numbers .* tokens"
    return OTHER_NETWORKS.get(name, "rounds" if name in LATER else None)


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("name", sorted(all_methods()))
def test_a_method_works_on_tokens_or_refuses_them(name: str, network: str) -> None:
    task, spec = NETWORKS[network]
    recipe, (state, bench) = fedfuse.recipe(name), setting(task, spec)
    if words := refusal(name, task):
        with pytest.raises((RecipeError, ConfigError), match=words):
            recipe.check(1, bench, state)
        return
    recipe.check(1, bench, state)
    after = one_round(recipe, state, bench)
    judge = Judge(rows(task, 7, 20), bench.classes, task=task)
    assert judge.score(after.model).keys() >= set(task.scores)
    if not isinstance(after.model, Apart):
        answers = after.model.logits(judge.test.x)
        assert answers.shape[-1] == task.outputs(bench.classes)
        assert bool(answers.isfinite().all())


def test_an_ensemble_of_language_models_answers_with_their_mean_probability() -> None:
    state, bench = setting(*NETWORKS["language-model"])
    after = one_round(fedfuse.recipe("ensemble"), state, bench)
    x = rows(LANGUAGE_MODEL, 3, 9).x
    each = torch.stack([m.logits(x).softmax(-1) for m in after.model.members])
    torch.testing.assert_close(after.model.logits(x).softmax(-1), each.mean(0))  # type: ignore[union-attr]


@pytest.mark.parametrize("source", ["server", "unlabelled"])
def test_tokens_that_are_given_can_be_distilled_on(source: str) -> None:
    state, bench = setting(*NETWORKS["text-classification"])
    recipe = fedfuse.recipe("ensemble", distill=source, epochs=2)
    recipe.check(1, bench, state)
    assert isinstance(one_round(recipe, state, bench).model, Single)


def test_training_lowers_perplexity() -> None:
    state, bench = setting(*NETWORKS["language-model"])
    judge, recipe = Judge(rows(LANGUAGE_MODEL, 7, 50), TOKENS, task=LANGUAGE_MODEL), fedfuse.recipe("fedavg")
    before = judge.score(state.model)["perplexity"]
    for _ in range(5):
        state = one_round(recipe, state, bench)
    assert judge.score(state.model)["perplexity"] < before

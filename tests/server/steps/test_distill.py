"""Back to one network: a student of a teacher it can equal becomes its equal."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from fedfuse.core.inputs import InputForm
from fedfuse.core.messages import ClientUpdate, Cohort, Start
from fedfuse.core.model import Apart, Single
from fedfuse.core.posterior import Posterior
from fedfuse.core.recipe import Recipe
from fedfuse.core.rows import Rows
from fedfuse.core.settings import LocalSettings, Optimizer
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench, ServerState
from fedfuse.data.transforms import CropFlip
from fedfuse.errors import RecipeError
from fedfuse.nets.head import with_outputs
from fedfuse.nets.mixture import MeanLogit, Mixture, OpenSetVote, TopLogit
from fedfuse.server.aggregate.ensemble import KeepAll
from fedfuse.server.aggregate.mean import mean_of
from fedfuse.server.steps.distill import Distill, distillation, kl_at
from fedfuse.server.steps.synthesize import Generate, Impressions, ServerInputs, UnlabelledInputs

LINEAR = Spec("mlp", {"inputs": 5, "hidden": [], "classes": 3})
QUICK = Optimizer(name="adam", lr=0.05)


def cohort(spec: Spec = LINEAR, count: int = 3, seed: int = 0) -> Cohort:
    torch.manual_seed(seed)
    return Cohort.of([ClientUpdate(f"c{i}", Posterior(spec.build().state_dict()), 1.0, 1, spec) for i in range(count)])


def bench(n: int = 200) -> Bench:
    x = torch.randn(n, 5, generator=torch.Generator().manual_seed(1))
    return Bench(Rows(x, torch.zeros(n, dtype=torch.int64)), x, 3, 3, inputs=InputForm((5,), (-2.0,), (2.0,)))


def mixed(who: Cohort, rule: KeepAll, on: Bench) -> ServerState:
    spec = who.updates[0].spec
    torch.manual_seed(9)
    return rule(who, ServerState(0, Single.of(spec.build(), spec)), on)


def test_the_divergence_by_hand() -> None:
    student, teacher = torch.tensor([[0.0, 0.0]]), torch.tensor([[2 * math.log(3), 0.0]])
    expected = 4 * (3 / 4 * math.log(3 / 2) + 1 / 4 * math.log(1 / 2))
    assert float(kl_at(2.0, student, teacher)) == pytest.approx(expected, rel=1e-5)
    assert float(kl_at(3.0, teacher, teacher)) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("temperature", [1.0, 20.0])
def test_a_student_of_a_linear_teacher_recovers_it(temperature: float) -> None:
    """The mean of linear networks is a linear network: logits agree up to what softmax does not see."""
    who, on = cohort(), bench()
    before = mixed(who, KeepAll(MeanLogit()), on)
    lessons = Distill(ServerInputs(), temperature, epochs=120, batch=50, optimizer=QUICK)
    after = lessons(before, who, on)
    assert isinstance(after.model, Single)
    x = torch.randn(100, 5)
    mine, theirs = after.model.logits(x), before.model.logits(x)  # type: ignore[union-attr]
    assert torch.allclose(mine.softmax(-1), theirs.softmax(-1), atol=0.01)
    centred = [z - z.mean(-1, keepdim=True) for z in (mine, theirs)]
    assert torch.allclose(*centred, atol=0.05)
    found, exact = after.model.posterior.mean["classifier.weight"], mean_of(who)["classifier.weight"]
    assert torch.allclose(found - found.mean(0), exact - exact.mean(0), atol=0.05)
    assert after.facts["distilled"]["agreement"] > 0.97
    assert after.facts["distilled"]["inputs"] == 200
    assert after.facts["distilled"]["loss"] < 0.01


@pytest.mark.parametrize("lessons", [UnlabelledInputs(), Impressions(count=60, steps=40), Generate(64, 8, 5, width=8)])
def test_every_source_of_inputs_teaches(lessons: UnlabelledInputs | Impressions | Generate) -> None:
    who, on = cohort(), bench()
    before = mixed(who, KeepAll(MeanLogit()), on)
    step = Distill(lessons, 4.0, epochs=30, batch=32, optimizer=QUICK)
    after = step(before, who, on)
    x = on.need_unlabelled("this test")
    same = after.model.logits(x).argmax(-1) == before.model.logits(x).argmax(-1)  # type: ignore[union-attr]
    assert same.double().mean() > 0.8
    again = step(before, who, on)
    assert all(t.equal(again.single.posterior.mean[n]) for n, t in after.single.posterior.mean.items()), "same seed"
    assert all(
        t.equal(u) for t, u in zip(_weights(before), _weights(mixed(who, KeepAll(MeanLogit()), on)), strict=True)
    )


def _weights(state: ServerState) -> list[torch.Tensor]:
    assert isinstance(state.model, Mixture)
    return [t for m in state.model.members for t in m.posterior.mean.values()]


def test_the_pool_grows_by_what_is_generated() -> None:
    who, on = cohort(), bench()
    before = mixed(who, KeepAll(MeanLogit()), on)
    after = Distill(Generate(16, 8, 2, width=4), 4.0, epochs=5)(before, who, on)
    assert after.facts["distilled"]["inputs"] == 5 * 16


def test_a_student_may_begin_at_the_mean() -> None:
    who, on = cohort(count=2), bench()
    before = mixed(who, KeepAll(MeanLogit()), on)
    still = Optimizer(name="sgd", lr=1e-12)
    after = Distill(ServerInputs(), epochs=1, optimizer=still, begin="mean")(before, who, on)
    assert torch.allclose(after.single.posterior.mean["classifier.weight"], mean_of(who)["classifier.weight"])
    fresh = Distill(ServerInputs(), epochs=1, optimizer=still)(before, who, on)
    assert not torch.allclose(fresh.single.posterior.mean["classifier.weight"], mean_of(who)["classifier.weight"])


def test_teachers_of_other_architectures_teach_the_experiments_own() -> None:
    deep = Spec("mlp", {"inputs": 5, "hidden": [7, 7], "classes": 3})
    on, who = bench(), cohort(deep)
    torch.manual_seed(0)
    before = KeepAll(TopLogit(1))(who, ServerState(0, Single.of(LINEAR.build(), LINEAR)), on)
    after = Distill(ServerInputs(), 4.0, epochs=3, begin="mean")(before, who, on)
    assert after.single.spec == LINEAR
    assert after.starts == {}
    assert after.facts["members"] == 1
    assert after.facts["cost"] == pytest.approx(15 / (3 * (35 + 49 + 21))), "what one answer costs now, not before"


def test_a_student_of_an_open_set_vote_knows_no_unknown() -> None:
    wide = with_outputs(Start(LINEAR, LINEAR.build().state_dict()), 4, seed=0)
    on = bench()
    who = Cohort.of([ClientUpdate(c, Posterior(wide.params), 1.0, 1, wide.spec) for c in "ab"])
    before = KeepAll(OpenSetVote())(who, ServerState(0, Single(wide.spec, Posterior(wide.params))), on)
    after = Distill(ServerInputs(), 4.0, epochs=2)(before, who, on)
    assert after.single.spec == LINEAR
    assert after.single.logits(torch.zeros(2, 5)).shape == (2, 3)


def test_lessons_are_augmented_and_asked_again() -> None:
    spec = Spec("lenet", {"size": 8, "classes": 3, "hidden": [4]})
    who = cohort(spec, 2)
    x = torch.rand(20, 1, 8, 8)
    on = Bench(None, x, 2, 3, LocalSettings(augment=CropFlip(pad=2)))
    before = mixed(who, KeepAll(MeanLogit()), on)
    plain = Distill(UnlabelledInputs(), 4.0, epochs=2)(before, who, replace(on, local=LocalSettings()))
    moved = Distill(UnlabelledInputs(), 4.0, epochs=2)(before, who, on)
    assert not moved.single.posterior.mean["conv1.weight"].equal(plain.single.posterior.mean["conv1.weight"])


def test_batch_norms_learn_from_no_batch_of_one() -> None:
    spec = Spec.of(nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)))
    who, on = cohort(spec, 2), bench(33)
    after = Distill(ServerInputs(), 4.0, epochs=2, batch=16)(mixed(who, KeepAll(MeanLogit()), on), who, on)
    assert int(after.single.posterior.mean["1.num_batches_tracked"]) == 4


def test_rounds_can_go_on_after_distillation() -> None:
    recipe = Recipe(aggregate=KeepAll(), steps=(Distill(ServerInputs()),))
    assert recipe.result == "single"
    assert recipe.needs == {"server_rows", "network"}
    recipe.check(5, bench())
    with pytest.raises(RecipeError, match="inputs without labels and there are none"):
        Recipe(name="mine", aggregate=KeepAll(), steps=(Distill(UnlabelledInputs()),)).check(1, Bench())


def test_networks_that_stay_apart_cannot_teach() -> None:
    who = cohort()
    apart = Apart(tuple(Single(u.spec, u.posterior) for u in who))
    with pytest.raises(RecipeError, match="have no common answer to learn"):
        Distill(ServerInputs())(ServerState(0, apart), who, bench())


def test_a_methods_words_become_a_step() -> None:
    assert distillation("none", 9, 1.0, 1, 1e-3) == ()
    (step,) = distillation("server", 9, 3.0, 7, 0.01)
    assert step == Distill(ServerInputs(), 3.0, 7, optimizer=Optimizer(name="adam", lr=0.01))
    (made,) = distillation("impressions", 9, 3.0, 7, 0.01)
    assert isinstance(made, Distill)
    assert made.input_source == Impressions(count=9)

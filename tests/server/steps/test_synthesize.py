"""Inputs for distillation: those the server holds, answers asked for that are given, and DENSE's losses as written."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedfuse.core.inputs import InputForm
from fedfuse.core.model import Single
from fedfuse.core.posterior import Posterior
from fedfuse.core.rows import Rows
from fedfuse.core.settings import LocalSettings
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench
from fedfuse.data.transforms import CropFlip
from fedfuse.errors import ConfigError, RecipeError
from fedfuse.nets.forward import AtLayer
from fedfuse.nets.mixture import MeanLogit, Mixture, TopLogit
from fedfuse.server.steps.synthesize import (
    Generate,
    Impressions,
    ServerInputs,
    UnlabelledInputs,
    answer_and_gap,
    class_similarity,
    count_outputs,
    generator,
    initialize_generator,
    server_inputs,
    wanted_answers,
)

LINEAR = Spec("mlp", {"inputs": 6, "hidden": [], "classes": 3})
BENCH = Bench(inputs=InputForm((6,), (-3.0,), (3.0,)), classes=3, seed=5)


def linear(weight: torch.Tensor) -> Single:
    return Single(LINEAR, Posterior({"classifier.weight": weight, "classifier.bias": torch.zeros(3)}))


def mixture(*members: Single, rule: TopLogit | MeanLogit | AtLayer | None = None) -> Mixture:
    alike = torch.full((len(members),), 1 / len(members), dtype=torch.float64)
    return Mixture(members, alike, rule or MeanLogit())


def test_similar_classes_have_similar_rows() -> None:
    rows = torch.tensor([[1.0, 0.0], [0.6, 0.8], [-1.0, 0.0]])
    spec = Spec("mlp", {"inputs": 2, "hidden": [], "classes": 3})
    member = Single(spec, Posterior({"classifier.weight": 5 * rows, "classifier.bias": torch.zeros(3)}))
    cosine = torch.tensor([[1.0, 0.6, -1.0], [0.6, 1.0, -0.6], [-1.0, -0.6, 1.0]])
    expected = (cosine - cosine.amin(1, keepdim=True)) / (cosine.amax(1, keepdim=True) - cosine.amin(1, keepdim=True))
    assert torch.allclose(class_similarity([member], 3), expected, atol=1e-6)
    assert torch.allclose(class_similarity([member, member], 3), expected, atol=1e-6)
    assert torch.allclose(class_similarity([member], 2), torch.eye(2), atol=1e-6), "an unknown class is left out"


def test_wanted_answers_are_dirichlet_draws() -> None:
    similarity = torch.tensor([[1.0, 0.5, 0.25], [0.5, 1.0, 0.5], [0.1, 0.2, 1.0]])
    places = torch.arange(60_000)
    answers = wanted_answers(similarity, places, (1.0,), torch.Generator().manual_seed(0)).double()
    assert torch.allclose(answers.sum(-1), torch.ones(60_000, dtype=torch.float64), atol=1e-5)
    for c in range(3):
        alpha, mine = similarity[c].double(), answers[c::3]
        total = float(alpha.sum())
        mean = alpha / total
        assert torch.allclose(mine.mean(0), mean, atol=0.01)
        assert torch.allclose(mine.var(0), mean * (1 - mean) / (total + 1), atol=0.01)
    extreme = wanted_answers(similarity, places[:600], (1e-3,), torch.Generator().manual_seed(0))
    assert extreme.isfinite().all(), "parameters near zero do not become 0/0"
    assert (extreme.amax(-1) > 0.99).double().mean() > 0.9


def test_impressions_are_answered_as_they_were_wanted() -> None:
    torch.manual_seed(0)
    teacher = mixture(linear(3 * torch.randn(3, 6)), linear(3 * torch.randn(3, 6)), rule=TopLogit(1))
    made = Impressions(count=30, of="teacher", steps=400, lr=0.1, temperature=2.0, batch=20)
    x = made(0, teacher, None, BENCH)
    assert x.shape == (30, 6)
    assert x.abs().max() <= 3
    draw = BENCH.stream("impressions")
    wanted = wanted_answers(class_similarity(teacher.members, 3), torch.arange(30), made.beta, draw)
    given = (teacher.logits(x) / 2).softmax(-1)
    assert (given.argmax(-1) == wanted.argmax(-1)).double().mean() > 0.9
    noise = (teacher.logits(BENCH.inputs.noise(30, draw)) / 2).log_softmax(-1)  # type: ignore[union-attr]
    assert F.kl_div(given.log(), wanted, reduction="batchmean") < 0.3 * F.kl_div(noise, wanted, reduction="batchmean")
    assert x.equal(made(0, teacher, None, BENCH)), "same seed, same inputs"
    assert len(made(1, teacher, None, BENCH)) == 0


def test_of_several_networks_each_makes_its_share_of_the_impressions() -> None:
    """A loud network answers for all; asked one by one, the quiet one is asked for what only it knows."""
    quiet = linear(torch.tensor([[3.0, 0, 0, 0, 0, 0], [0, 3.0, 0, 0, 0, 0], [-3.0, -3.0, 0, 0, 0, 0]]))
    silent = {"classifier.weight": torch.zeros(3, 6), "classifier.bias": torch.tensor([0.0, 0.0, 90.0])}
    loud = Single(LINEAR, Posterior(silent))
    teacher = mixture(quiet, loud, rule=TopLogit(1))
    made = Impressions(count=25, steps=200, lr=0.1, beta=(1e-3,))
    x = made(0, teacher, None, BENCH)
    assert x.shape == (25, 6)
    assert sorted(set(quiet.logits(x[:12]).argmax(-1).tolist())) == [0, 1, 2]
    together = replace(made, of="teacher")(0, teacher, None, BENCH)
    assert set(teacher.logits(together).argmax(-1).tolist()) == {2}


def test_held_classes_alone_are_asked_for_where_counts_tell_them() -> None:
    sure = [linear(9 * torch.eye(3, 6)) for _ in range(2)]
    made = Impressions(count=12, steps=300, lr=0.2, beta=(0.1,), held=True)
    assert made.needs == {"counts"}
    told = replace(mixture(*sure), held=((2,), (0, 1)))
    answers = sure[0].logits(made(0, told, None, BENCH)).argmax(-1)
    assert set(answers[:6].tolist()) == {2}
    assert set(answers[6:].tolist()) == {0, 1}
    similarity = torch.full((3, 3), 0.5).fill_diagonal_(1.0)
    wanted = wanted_answers(similarity, torch.arange(500), (1.0,), torch.Generator().manual_seed(0), held=(0, 2))
    assert wanted[:, 1].mean() < 0.01, "an answer is not uncertain about a class nobody saw"
    assert torch.allclose(wanted[::2, 0].mean(), torch.tensor(2 / 3), atol=0.05)
    with pytest.raises(ConfigError, match="do not come one by one with label counts"):
        made(0, mixture(*sure), None, BENCH)


def test_few_impressions_of_many_networks_still_ask_for_every_class() -> None:
    sure = [linear(9 * torch.eye(3, 6)) for _ in range(3)]
    x = Impressions(count=6, steps=300, lr=0.2, beta=(10.0,))(0, mixture(*sure), None, BENCH)
    assert sorted(sure[0].logits(x).argmax(-1).tolist()) == [0, 0, 1, 1, 2, 2]
    assert Impressions(count=2, steps=1)(0, mixture(*sure), None, BENCH).shape == (2, 6), "fewer than networks"


def test_dense_loss_by_hand() -> None:
    """Two images, two classes: the student agrees on the first, and not on the second."""
    teacher = torch.tensor([[math.log(3), 0.0], [math.log(4), 0.0]])
    student = torch.tensor([[0.5, 0.0], [0.0, math.log(2)]])
    labels, gap = torch.tensor([0, 1]), torch.tensor(7.0)
    one_hot = (-math.log(3 / 4) - math.log(1 / 5)) / 2
    apart = 4 / 5 * math.log((4 / 5) / (1 / 3)) + 1 / 5 * math.log((1 / 5) / (2 / 3))
    loss = Generate(oh=2.0, bn=3.0, adv=5.0).loss(teacher, student, labels, gap)
    assert float(loss) == pytest.approx(2 * one_hot + 3 * 7.0 - 5 * apart / 2, rel=1e-5)


def test_the_gap_is_the_distance_to_what_norms_remember() -> None:
    net = nn.Sequential(nn.BatchNorm2d(2), nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 2))
    spec = Spec.of(net)
    members = []
    torch.manual_seed(0)
    for _ in range(2):
        params = {n: t.clone() for n, t in spec.build().state_dict().items()}
        params |= {n: torch.rand_like(t) for n, t in params.items() if "running" in n}
        members.append(Single(spec, Posterior(params)))
    x = torch.randn(5, 2, 2, 2)
    z, gap = answer_and_gap(mixture(*members), x)
    expected = 0.0
    for m in members:
        p = m.posterior.mean
        first = F.batch_norm(x, p["0.running_mean"], p["0.running_var"], p["0.weight"], p["0.bias"])
        second = F.conv2d(first, p["1.weight"], p["1.bias"])
        for h, norm in ((x, "0"), (second, "2")):
            mean, var = h.mean((0, 2, 3)), h.var((0, 2, 3), correction=0)
            expected += float((mean - p[f"{norm}.running_mean"]).norm() + (var - p[f"{norm}.running_var"]).norm())
    assert float(gap) == pytest.approx(expected / 2, rel=1e-5)
    assert torch.allclose(z, torch.stack([m.logits(x) for m in members]).mean(0), atol=1e-6)
    assert float(answer_and_gap(mixture(linear(torch.eye(3, 6))), torch.zeros(2, 6))[1]) == 0.0


def test_members_chosen_early_teach_too() -> None:
    torch.manual_seed(0)
    teacher = mixture(linear(torch.randn(3, 6)), linear(torch.randn(3, 6)), rule=AtLayer(1))
    x = torch.randn(8, 6)
    assert torch.allclose(answer_and_gap(teacher, x)[0], teacher.logits(x), atol=1e-6)
    assert count_outputs(teacher, InputForm((6,))) == 3


def test_generators_paint_inputs_of_every_form() -> None:
    for shape in ((1, 28, 28), (3, 32, 32), (1, 8, 8), (2, 7, 5), (1, 3, 3), (6,)):
        net = initialize_generator(generator(InputForm(shape), 10, 4), torch.Generator().manual_seed(0))
        assert net(torch.randn(4, 10)).shape == (4, *shape)
    assert net[0].weight.std() < 0.03  # type: ignore[index, union-attr]


def test_dense_generator_finds_images_the_teacher_is_sure_of_and_the_student_gets_wrong() -> None:
    torch.manual_seed(1)
    teacher = mixture(linear(torch.randn(3, 6)), linear(torch.randn(3, 6)))
    student = LINEAR.build().eval().requires_grad_(False)
    made = Generate(batch=32, latent=8, steps=40, lr=0.02, adv=0.0, width=8)
    x = made(0, teacher, student, BENCH)
    labels = _labels(made, epoch=0)
    noise = BENCH.inputs.noise(32, torch.Generator().manual_seed(0))  # type: ignore[union-attr]
    assert F.cross_entropy(teacher.logits(x), labels) < 0.7 * F.cross_entropy(teacher.logits(noise), labels)
    wrong = Generate(batch=32, latent=8, steps=40, lr=0.02, oh=0.0, adv=1.0, width=8)(0, teacher, student, BENCH)
    differ = [(teacher.logits(v).argmax(-1) != student(v).argmax(-1)).double().mean() for v in (wrong, x)]
    assert differ[0] > differ[1]
    assert x.equal(made(0, teacher, student, BENCH)), "same seed, same images"
    assert not x.equal(made(1, teacher, student, BENCH)), "a new generator every epoch"


def _labels(made: Generate, epoch: int) -> torch.Tensor:
    draw = BENCH.stream("generate", epoch)
    assert BENCH.inputs is not None
    initialize_generator(generator(BENCH.inputs, made.latent, made.width), draw)
    torch.randn(made.batch, made.latent, generator=draw)
    return torch.randint(3, (made.batch,), generator=draw)


def test_views_are_augmented_as_clients_rows_were() -> None:
    spec = Spec("lenet", {"size": 8, "classes": 3, "hidden": [4]})
    teacher = mixture(Single.of(spec.build(), spec))
    made = Generate(batch=4, latent=4, steps=2, width=2)
    plain = Bench(inputs=InputForm((1, 8, 8)), classes=3)
    moved = Bench(inputs=InputForm((1, 8, 8)), classes=3, local=LocalSettings(augment=CropFlip(pad=2)))
    student = spec.build().eval()
    assert made(0, teacher, student, plain).shape == (4, 1, 8, 8)
    assert made(0, teacher, student, moved).shape == (4, 1, 8, 8)


SMALL = Spec("mlp", {"inputs": 4, "classes": 2})
ROWS = Rows(torch.randn(10, 4), torch.zeros(10, dtype=torch.int64))


def test_given_inputs_come_once() -> None:
    teacher, student = Single.of(SMALL.build(), SMALL), SMALL.build()
    bench = Bench(rows=ROWS, unlabelled=torch.ones(3, 4))
    assert ServerInputs()(0, teacher, student, bench).equal(ROWS.x)
    assert len(ServerInputs()(1, teacher, student, bench)) == 0
    assert UnlabelledInputs()(0, teacher, student, bench).equal(torch.ones(3, 4))
    assert len(UnlabelledInputs()(5, teacher, student, bench)) == 0
    with pytest.raises(RecipeError, match=r"set data\.unlabelled"):
        UnlabelledInputs()(0, teacher, student, Bench())
    with pytest.raises(RecipeError, match=r"set data\.server_fraction"):
        ServerInputs()(0, teacher, student, Bench())


def test_held_inputs_are_a_seeded_sample_of_the_servers_own() -> None:
    found = server_inputs(Bench(rows=ROWS, unlabelled=torch.ones(3, 4)), 6, "probe")
    assert found is not None
    x, source = found
    assert source == "server"
    assert len(x) == 6
    assert all(bool((ROWS.x == row).all(1).any()) for row in x)
    again = server_inputs(Bench(rows=ROWS), 6, "probe")
    assert again is not None
    assert again[0].equal(x)
    bare = server_inputs(Bench(unlabelled=torch.ones(3, 4)), 6, "probe")
    assert bare is not None
    assert (len(bare[0]), bare[1]) == (3, "unlabelled")
    assert server_inputs(Bench(), 6, "probe") is None

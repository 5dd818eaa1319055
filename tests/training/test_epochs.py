"""A client's training by compiled kernels against the same by torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from builders import initial, rows
from fedfuse.client.objectives import Contrastive, Proximal
from fedfuse.core.messages import Brief
from fedfuse.core.rows import Rows
from fedfuse.core.seams import Batch, Objective, TaskLoss, Work
from fedfuse.core.settings import LocalSettings
from fedfuse.core.spec import Spec
from fedfuse.core.state import Local, with_kind
from fedfuse.errors import ConfigError
from fedfuse.methods.scaffold import Controlled
from fedfuse.training.pulls import Masked, pull_of
from fedfuse.training.round import RoundAnswer, client_round
from fedfuse.wire.codec import decode


def network() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(
        *(nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.Tanh(), nn.AvgPool2d(2)),
        *(nn.Flatten(), nn.Linear(64, 3)),
    )


SPEC = Spec.of(network())
START = initial(SPEC)
OWN = rows(50, 1, 8, 8)


def random_like(seed: int, scale: float = 0.1) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {n: scale * torch.randn(p.shape, generator=draw) for n, p in network().named_parameters()}


def answer(
    kernel: str, settings: dict[str, Any], work: Work | None = None, round_: int = 0, seed: int = 0
) -> RoundAnswer:
    base: dict[str, Any] = {"epochs": 2, "batch_size": 16, "optimizer": {"lr": 0.05}, "kernel": kernel}
    work = replace(work or Work(), settings=LocalSettings.model_validate(base | settings))
    brief = Brief(round_, SPEC, START, with_kind("control", random_like(1)), classes=3)
    return client_round(work, brief, "a", OWN, memory=with_kind("control", random_like(2)), seed=seed)


def weights(given: RoundAnswer) -> dict[str, Tensor]:
    return {n: t for n, t in decode(given.payload).tensors.items() if not n.startswith("~")}


@dataclass(frozen=True)
class Noise:
    """An augmentation that draws."""

    def __call__(self, x: Tensor, draw: torch.Generator) -> Tensor:
        return x + 0.1 * torch.randn(x.shape, generator=draw)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"optimizer": {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.05}},
        {"optimizer": {"lr": 0.05, "weight_decay": 0.05}},
        {"clip": 0.05},
        {"clip": 0.05, "optimizer": {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.05}},
        {"clip": 1000.0},
        {"epochs": 4, "decay": {"gamma": 0.1, "every": 2}, "round_decay": 0.9},
        {"max_steps": 3},
        {"max_steps": 5, "epochs": 3},
        {"drop_last": True},
        {"batch_size": 7},
        {"batch_size": 1000, "drop_last": True},
        {"augment": Noise()},
    ],
)
@pytest.mark.parametrize("objective", [TaskLoss(), Proximal(0.5), Controlled(), Controlled(Proximal(0.3))])
def test_both_kernels_train_alike(settings: dict[str, Any], objective: Objective) -> None:
    mine, theirs = (answer(kernel, settings, Work(objective=objective), 3) for kernel in ("compiled", "torch"))
    for name, t in weights(theirs).items():
        assert torch.allclose(weights(mine)[name], t, rtol=1e-5, atol=2e-6), name
    told, expected = decode(mine.payload).header, decode(theirs.payload).header
    assert (told["num_examples"], told["steps"]) == (expected["num_examples"], expected["steps"])
    assert told["facts"]["loss"] == pytest.approx(expected["facts"]["loss"], rel=1e-5)


def test_a_reply_says_by_which_kernel() -> None:
    assert decode(answer("compiled", {}).payload).header["facts"]["compiled"] == 1.0
    assert "compiled" not in decode(answer("torch", {}).payload).header["facts"]
    trained = answer("compiled", {}).payload
    brief = Brief(0, SPEC, START, classes=3)
    again = client_round(Work(), brief, "a", OWN, trained=trained).payload
    assert decode(again).header["facts"]["compiled"] == 1.0


def test_dropout_depends_on_the_seed_alone() -> None:
    torch.manual_seed(2)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 3))
    brief = Brief(0, Spec.of(net), initial(Spec.of(net)), classes=3)
    work = Work(LocalSettings(batch_size=16, epochs=2, kernel="compiled"))
    first = client_round(work, brief, "a", OWN, seed=1).payload
    client_round(work, brief, "b", rows(20, 1, 8, 8), seed=1)
    assert client_round(work, brief, "a", OWN, seed=1).payload == first
    assert client_round(work, brief, "a", OWN, seed=2).payload != first
    assert client_round(work, replace(brief, round=1), "a", OWN, seed=1).payload != first


@dataclass(frozen=True, slots=True)
class Doubled(TaskLoss):
    """A subclass computes something else: it must not be taken for its parent."""

    def __call__(self, local: Local, batch: Batch) -> Tensor:
        return 2 * TaskLoss.__call__(self, local, batch)


@pytest.mark.parametrize(
    ("work", "word"),
    [
        (Work(objective=Doubled()), "Doubled"),
        (Work(objective=Proximal(0.1, Doubled())), "Proximal"),
        (Work(project=Masked()), "Masked"),
    ],
)
def test_other_objectives_and_projections_are_torchs(work: Work, word: str) -> None:
    assert answer("auto", {}, work).payload == answer("torch", {}, work).payload
    with pytest.raises(ConfigError, match=rf'kernel = "compiled" .*{word}'):
        answer("compiled", {}, work)


def test_a_contrastive_term_counts_from_the_second_round_on() -> None:
    module = network()
    local = Local("a", Brief(0, SPEC, START, classes=3), OWN, LocalSettings(), module, {}, 0)
    assert pull_of(Contrastive(1.0), local) == pull_of(TaskLoss(), local)
    later = Local("a", local.brief, OWN, LocalSettings(), module, with_kind("last", START), 0)
    assert pull_of(Contrastive(1.0), later) is None
    assert pull_of(Contrastive(0.0), later) == pull_of(TaskLoss(), later)


def test_labels_of_no_class_fail_as_they_always_did() -> None:
    odd = Rows(OWN.x, torch.full((50,), 7))
    with pytest.raises(IndexError):
        client_round(Work(), Brief(0, SPEC, START, classes=3), "a", odd)

"""The training loop against a plain one, and at its edges."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from builders import initial, rows
from fedfuse.client.class_sums import LabelCounts
from fedfuse.core.messages import Brief
from fedfuse.core.rng import stream
from fedfuse.core.rows import Rows
from fedfuse.core.seams import Batch, Work
from fedfuse.core.settings import LocalSettings
from fedfuse.core.spec import Spec
from fedfuse.core.state import Local
from fedfuse.errors import ConfigError
from fedfuse.training.pulls import Masked
from fedfuse.training.round import RoundAnswer, client_round, train_on_rows
from fedfuse.wire.codec import decode
from fedfuse.wire.messages import decode_brief, encode_brief

MLP = Spec("mlp", {"inputs": 4, "hidden": [5], "classes": 3})


def brief_of(spec: Spec, round_: int = 0) -> Brief:
    return Brief(round_, spec, initial(spec, 1), classes=3)


def trained(answer: RoundAnswer) -> dict[str, Tensor]:
    return {n: t for n, t in decode(answer.payload).tensors.items() if not n.startswith("~")}


def header(answer: RoundAnswer) -> Any:
    return decode(answer.payload).header


def plain_loop(
    brief: Brief, data: Rows, settings: LocalSettings, client: str = "a", seed: int = 0
) -> dict[str, Tensor]:
    """What anybody would write with torch.optim."""
    module = brief.spec.build()
    module.load_state_dict(dict(brief.params))
    module.train()
    own = settings.optimizer
    optimizer = torch.optim.SGD(module.parameters(), own.lr, own.momentum, weight_decay=own.weight_decay)
    for epoch in range(settings.epochs):
        for group in optimizer.param_groups:
            group["lr"] = settings.rate(brief.round, epoch)
        order = torch.randperm(len(data), generator=stream(0, brief.round, "a", "order", epoch))
        for index in order.split(settings.batch_size):
            optimizer.zero_grad()
            loss = F.cross_entropy(module(data.x[index]), data.y[index])
            loss = loss + settings.l1 * sum(p.abs().sum() for p in module.parameters())
            loss.backward()
            if settings.clip is not None:
                torch.nn.utils.clip_grad_norm_(module.parameters(), settings.clip)
            optimizer.step()
    return {n: t.detach().clone() for n, t in module.state_dict().items()}


@pytest.mark.parametrize(
    "settings",
    [
        {"epochs": 3, "batch_size": 8, "optimizer": {"lr": 0.1}},
        {"epochs": 2, "batch_size": 8, "optimizer": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}},
        {"epochs": 4, "batch_size": 20, "optimizer": {"lr": 0.5}, "decay": {"gamma": 0.1, "every": 2}},
        {"epochs": 2, "batch_size": 8, "optimizer": {"lr": 0.1}, "l1": 0.01, "clip": 0.5, "round_decay": 0.9},
    ],
)
def test_the_loop_is_a_plain_one(settings: dict[str, Any]) -> None:
    chosen, brief, data = LocalSettings.model_validate(settings), brief_of(MLP, round_=2), rows(20, 4)
    mine = trained(client_round(Work(chosen), brief, "a", data))
    theirs = plain_loop(brief, data, chosen)
    assert all(torch.allclose(mine[n], theirs[n], rtol=1e-5, atol=1e-6) for n in theirs)
    assert not mine["fc1.weight"].equal(brief.params["fc1.weight"])


def test_images_train_as_in_a_plain_loop() -> None:
    spec = Spec("lenet", {"size": 8, "hidden": [6], "classes": 3})
    data = rows(12, 1, 8, 8, seed=3)
    settings = LocalSettings(epochs=2, batch_size=5, optimizer={"lr": 0.1, "momentum": 0.9})
    brief = brief_of(spec)
    mine, theirs = trained(client_round(Work(settings), brief, "a", data)), plain_loop(brief, data, settings)
    assert all(torch.allclose(mine[n], theirs[n], rtol=1e-4, atol=1e-6) for n in theirs)


def test_a_round_is_a_pure_function_of_its_arguments() -> None:
    spec = Spec.of(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3)))
    brief, data, work = brief_of(spec), rows(30, 4), Work(LocalSettings(batch_size=7))
    before = {n: t.clone() for n, t in brief.params.items()}
    first = client_round(work, brief, "a", data, seed=5).payload
    torch.manual_seed(99)  # dropout has a stream of its own
    client_round(work, brief, "b", rows(9, 4, seed=3), seed=5)  # and the bench is cleared between clients
    stirred = torch.random.get_rng_state()
    assert client_round(work, brief, "a", data, seed=5).payload == first
    assert torch.random.get_rng_state().equal(stirred)
    assert client_round(work, brief, "a", data, seed=6).payload != first
    assert client_round(work, brief, "b", data, seed=5).payload != first
    assert client_round(work, replace(brief, round=1), "a", data, seed=5).payload != first
    assert all(brief.params[n].equal(before[n]) for n in before)


def test_a_reply_counts_examples_and_steps() -> None:
    work = Work(LocalSettings(epochs=3, batch_size=8))
    told = header(client_round(work, brief_of(MLP), "a", rows(20, 4)))
    assert (told["num_examples"], told["steps"]) == (20.0, 9)


@pytest.mark.parametrize(("limit", "steps"), [(1, 1), (4, 4), (5, 5), (100, 6)])
def test_max_steps_ends_training_inside_an_epoch(limit: int, steps: int) -> None:
    settings = LocalSettings(epochs=2, batch_size=7, max_steps=limit)
    answer = client_round(Work(settings), brief_of(MLP), "a", rows(20, 4))
    assert header(answer)["steps"] == steps


def test_fewer_steps_are_the_first_ones_of_more() -> None:
    full = LocalSettings(epochs=1, batch_size=7, max_steps=1)
    one_epoch_of_one_batch = client_round(Work(full), brief_of(MLP), "a", rows(20, 4))
    order = torch.randperm(20, generator=stream(0, 0, "a", "order", 0))[:7]
    again = client_round(Work(LocalSettings(batch_size=7)), brief_of(MLP), "a", rows(20, 4).take(order))
    a, b = trained(one_epoch_of_one_batch), trained(again)
    assert all(torch.allclose(a[n], b[n], atol=1e-6) for n in a)


def test_drop_last_leaves_the_small_batch_out() -> None:
    settings = LocalSettings(epochs=2, batch_size=8, drop_last=True)
    assert header(client_round(Work(settings), brief_of(MLP), "a", rows(20, 4)))["steps"] == 4
    short = client_round(Work(settings), brief_of(MLP), "a", rows(5, 4))
    assert header(short)["steps"] == 0
    assert all(t.equal(brief_of(MLP).params[n]) for n, t in trained(short).items())


def test_a_client_smaller_than_a_batch_trains_on_what_it_has() -> None:
    assert header(client_round(Work(LocalSettings(epochs=2)), brief_of(MLP), "a", rows(5, 4)))["steps"] == 2


def test_a_client_with_one_class_trains() -> None:
    data = Rows(rows(10, 4).x, torch.full((10,), 2))
    brief = brief_of(MLP)
    settings = LocalSettings(epochs=5, batch_size=4, optimizer={"lr": 0.5})
    state = trained(client_round(Work(settings), brief, "a", data))
    before, after = (MLP.forward(p, data.x).softmax(-1)[:, 2].mean() for p in (brief.params, state))
    assert after > before


@pytest.mark.parametrize("n", [1, 5, 9])
def test_a_batch_of_one_passes_batch_norms(n: int) -> None:
    """Batches of 4 leave one row over; its batch norm uses running statistics and does not move them."""
    spec = Spec.of(nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3)))
    brief = brief_of(spec)
    state = trained(client_round(Work(LocalSettings(batch_size=4)), brief, "a", rows(n, 4)))
    assert all(t.isfinite().all() for t in state.values())
    assert int(state["1.num_batches_tracked"]) == n // 4
    assert not state["0.weight"].equal(brief.params["0.weight"])


def test_running_statistics_are_those_of_the_batches_seen() -> None:
    spec = Spec.of(nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3)))
    data = rows(12, 4)
    state = trained(client_round(Work(LocalSettings(batch_size=64)), brief_of(spec), "a", data))
    assert torch.allclose(state["0.running_mean"], 0.1 * data.x.mean(0), atol=1e-6)
    assert torch.allclose(state["0.running_var"], 0.9 + 0.1 * data.x.var(0), atol=1e-6)


def test_a_client_without_rows_is_told_so() -> None:
    with pytest.raises(ConfigError, match="^a .*rows"):
        client_round(Work(), brief_of(MLP), "a", rows(0, 4))


@dataclass(frozen=True, slots=True)
class FirstHalf:
    def __call__(self, own: Rows, brief: Brief) -> Rows:
        return own.take(range(len(own) // 2))


@dataclass(frozen=True, slots=True)
class Pinned:
    name: str

    def __call__(self, name: str, value: Tensor, brief: Brief) -> Tensor:
        return brief.params[name] if name == self.name else value


@dataclass(frozen=True, slots=True)
class Plus:
    """An augmentation that says how often it drew."""

    def __call__(self, x: Tensor, draw: torch.Generator) -> Tensor:
        return x + torch.randn(x.shape, generator=draw)


def test_view_project_and_augment_take_their_part() -> None:
    brief, data, settings = brief_of(MLP), rows(20, 4), LocalSettings(batch_size=8)
    viewed = client_round(Work(settings, view=FirstHalf()), brief, "a", data)
    assert viewed.payload == client_round(Work(settings), brief, "a", data.take(range(10))).payload
    pinned = trained(client_round(Work(settings, project=Pinned("fc1.weight")), brief, "a", data))
    assert pinned["fc1.weight"].equal(brief.params["fc1.weight"])
    assert not pinned["fc1.bias"].equal(brief.params["fc1.bias"])
    noisy = Work(settings.model_copy(update={"augment": Plus()}))
    once, again = (client_round(noisy, brief, "a", data).payload for _ in range(2))
    assert once == again != client_round(Work(settings), brief, "a", data).payload


def test_evidence_can_be_brought_later_from_a_finished_training() -> None:
    """Train once, fuse many: the same bytes as if evidence had been asked for at once."""
    brief, data = brief_of(MLP), rows(20, 4)
    bare = client_round(Work(), brief, "a", data)
    asked = Work(evidence=(LabelCounts(),))
    assert (
        client_round(asked, brief, "a", data, trained=bare.payload).payload
        == client_round(asked, brief, "a", data).payload
    )


@dataclass(frozen=True, slots=True)
class Counting:
    """An objective that a client's memory can see."""

    def __call__(self, local: Local, batch: Batch) -> Tensor:
        local.memory["seen/rows"] = local.memory.get("seen/rows", torch.zeros(())) + len(batch[1])
        return F.cross_entropy(local.predict(batch[0]), batch[1])


def test_memory_comes_back_and_is_not_shared() -> None:
    kept = {"seen/rows": torch.tensor(5.0)}
    answer = client_round(Work(objective=Counting()), brief_of(MLP), "a", rows(20, 4), memory=kept)
    assert answer.memory["seen/rows"].item() == 25.0
    assert kept["seen/rows"].item() == 5.0


def test_the_mean_loss_of_the_last_epoch_is_told() -> None:
    settings = LocalSettings(epochs=1, batch_size=64, optimizer={"lr": 1e-12})
    brief, data = brief_of(MLP), rows(20, 4)
    expected = F.cross_entropy(MLP.forward(brief.params, data.x), data.y)
    assert header(client_round(Work(settings), brief, "a", data))["facts"]["loss"] == pytest.approx(float(expected))


def test_what_the_brief_holds_stays_and_the_rest_trains_as_if_it_were_all() -> None:
    """Holding the first layer is training the others on its output: gradients, clipping and all."""
    plain, settings = brief_of(MLP), LocalSettings(epochs=2, batch_size=8, clip=0.05, optimizer={"lr": 0.3})
    held = {f"held/fc1.{n}": torch.ones((), dtype=torch.bool) for n in ("weight", "bias")}
    data = rows(20, 4)
    state = trained(client_round(Work(settings), replace(plain, memory=held), "a", data))
    assert all(state[f"fc1.{n}"].equal(plain.params[f"fc1.{n}"]) for n in ("weight", "bias"))
    tail = Spec("mlp", {"inputs": len(plain.params["fc1.bias"]), "hidden": [], "classes": 3})
    seen = F.relu(F.linear(data.x.flatten(1), plain.params["fc1.weight"], plain.params["fc1.bias"]))
    start = {n: t for n, t in plain.params.items() if n.startswith("classifier")}
    alone = trained(client_round(Work(settings), Brief(0, tail, start, classes=3), "a", Rows(seen, data.y)))
    assert all(torch.allclose(state[n], alone[n], atol=1e-6) for n in alone)
    assert not state["classifier.weight"].equal(plain.params["classifier.weight"])


def test_a_held_norm_keeps_its_statistics() -> None:
    spec = Spec.of(nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3)))
    brief = brief_of(spec)
    held = {f"held/{n}": torch.ones((), dtype=torch.bool) for n in ("0.weight", "0.bias", "1.weight", "1.bias")}
    state = trained(client_round(Work(LocalSettings(batch_size=4)), replace(brief, memory=held), "a", rows(9, 4)))
    assert all(state[n].equal(brief.params[n]) for n in state if not n.startswith("3."))
    free = trained(client_round(Work(LocalSettings(batch_size=4)), brief, "a", rows(9, 4)))
    assert not free["1.running_mean"].equal(brief.params["1.running_mean"]), "the next round is free again"


def test_without_epochs_a_client_brings_evidence_for_the_weights_it_was_given() -> None:
    brief = brief_of(MLP)
    work = Work(LocalSettings(epochs=0), evidence=(LabelCounts(),))
    answer = client_round(work, brief, "a", rows(9, 4))
    assert all(t.equal(brief.params[n]) for n, t in trained(answer).items())
    assert trained(answer).keys() == brief.params.keys()
    assert (header(answer)["steps"], header(answer)["facts"]) == (0, {})


def test_a_client_that_does_not_train_sends_evidence_alone() -> None:
    brief = brief_of(MLP)
    work = Work(LocalSettings(epochs=5), evidence=(LabelCounts(),), trains=False)
    answer = client_round(work, brief, "a", rows(9, 4))
    assert set(decode(answer.payload).tensors) == {"~counts/labels"}
    assert header(answer)["steps"] == 0
    with pytest.raises(ConfigError, match="^a .*rows"):
        client_round(work, brief, "a", rows(0, 4))


def test_masked_weights_stay_zero_through_training_and_over_the_wire() -> None:
    spec = Spec("mlp", {"inputs": 3, "hidden": [4], "classes": 2})
    mask, params = torch.rand(4, 3, generator=torch.Generator().manual_seed(0)) < 0.5, initial(spec)
    params["fc1.weight"] = params["fc1.weight"] * mask
    brief = decode_brief(encode_brief(Brief(0, spec, params, {"mask/fc1.weight": mask}, classes=2)))
    settings = LocalSettings(batch_size=5, optimizer={"lr": 0.1, "momentum": 0.9})
    after = train_on_rows(Work(settings, project=Masked()), brief, "c", rows(30, 3, classes=2)).params
    assert not after["fc1.weight"][~mask].any()
    assert not after["fc1.weight"][mask].equal(params["fc1.weight"][mask])
    assert not after["fc1.bias"].equal(params["fc1.bias"])

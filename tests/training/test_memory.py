"""What clients remember while the network is pruned under their hands."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedfuse
from builders import initial, rows, start_of
from fedfuse.core.inputs import InputForm
from fedfuse.core.messages import Brief
from fedfuse.core.recipe import Recipe
from fedfuse.core.settings import LocalSettings
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench, entries_of, with_kind
from fedfuse.engines.local import InProcess, Population
from fedfuse.nets.channels import channel_groups, keep_channels
from fedfuse.server.loop import Record, RunPlan, run
from fedfuse.server.steps.prune import FixedRate, Prune
from fedfuse.training.round import CHANNELS, fit_memory

SHAPE = (1, 8, 8)
LENET = Spec("lenet", {"size": 8, "maps": [6, 8], "hidden": [10], "classes": 3})


def own_net() -> nn.Module:
    parts = nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 3), nn.Flatten(), nn.Linear(64, 3)
    return nn.Sequential(*parts)


def pruned_run(recipe: Recipe, spec: Spec, rounds: int = 4, **plan: Any) -> tuple[list[Record], InProcess]:
    engine = InProcess(Population.of({client: rows(12, *SHAPE, seed=seed) for seed, client in enumerate("abcd")}))
    local = LocalSettings(batch_size=4, optimizer={"lr": 0.05})
    bench = Bench(rows(20, *SHAPE, seed=9), population=4, classes=3, local=local, inputs=InputForm(SHAPE))
    return list(run(recipe, engine, bench, None, start_of(spec), RunPlan(rounds=rounds, **plan))), engine


def with_prunings(method: str, last: bool = True) -> Recipe:
    """The method with FedAP's pruning after its first and after its third round."""
    recipe, cuts = fedfuse.recipe(method), tuple(Prune(at, FixedRate(0.4), "uniform") for at in (0, 2))
    return replace(recipe, steps=(*recipe.steps, *cuts) if last else (*cuts, *recipe.steps))


@pytest.mark.parametrize("per_round", [None, 2])
@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("method", ["scaffold", "moon"])
def test_memories_follow_prunings_and_nobody_is_lost(method: str, last: bool, per_round: int | None) -> None:
    spec = LENET if method == "moon" else Spec.of(own_net())
    records, engine = pruned_run(with_prunings(method, last), spec, per_round=per_round)
    assert not [r for r in records if r.facts["refused"] or r.facts["dropped"]]
    state = records[-1].state
    sizes = {n: t.shape for n, t in state.single.posterior.mean.items()}
    assert sum(s.numel() for s in sizes.values()) < 0.7 * sum(t.numel() for t in spec.build().state_dict().values())
    for n, t in entries_of(state.memory, "control").items():
        assert t.shape == sizes[n]
    kind = "control" if method == "scaffold" else "last"
    told = [f["facts"] for r in records for f in r.facts["clients"].values()]
    assert any(f"carried over {kind}" in f for f in told)
    assert not any(name.startswith("forgot") for f in told for name in f)
    assert all(CHANNELS in {name.partition("/")[0] for name in m} for m in engine.memories.values())


def test_variates_after_a_pruning_are_those_of_the_channels_that_stayed() -> None:
    small, params = cut({"conv1": [1, 4]})
    variate = {n: torch.randn_like(t) for n, t in params.items()}
    found, facts = fit_memory(with_kind("control", variate), Brief(3, small, cut_params(small, params)), SHAPE)
    assert facts == {"carried over control": float(len(params))}
    assert found["control/conv1.weight"].equal(variate["conv1.weight"][[1, 4]])
    assert found["control/conv2.weight"].equal(variate["conv2.weight"][:, [1, 4]])
    assert found["control/fc1.weight"].equal(variate["fc1.weight"])


def test_a_memory_of_a_pruned_network_follows_its_next_pruning() -> None:
    small, params = cut({"conv1": [1, 4, 5]})
    smaller, _ = cut({"conv1": [1, 5]})
    weights = cut_params(small, params)
    memory = with_kind("last", weights) | {f"{CHANNELS}/conv1": torch.tensor([1, 4, 5])}
    found, facts = fit_memory(memory, Brief(3, smaller, cut_params(smaller, params)), SHAPE)
    assert facts == {"carried over last": float(len(params))}
    assert found["last/conv1.weight"].equal(params["conv1.weight"][[1, 5]])
    assert found["last/conv2.weight"].equal(params["conv2.weight"][:, [1, 5]])


def cut(keep: dict[str, list[int]]) -> tuple[Spec, dict[str, Tensor]]:
    """A network that keeps these channels of LENET, and LENET's own weights."""
    params = initial(LENET, 1)
    moves = {g: keep[g.name] for g in channel_groups(LENET, SHAPE) if g.name in keep}
    return keep_channels(LENET, params, moves)[0], params


def cut_params(small: Spec, params: dict[str, Tensor]) -> dict[str, Tensor]:
    keep = {g: small.kept[g.name] for g in channel_groups(LENET, SHAPE) if g.name in small.kept}
    return keep_channels(LENET, params, keep)[1]


@pytest.mark.parametrize(
    "strange",
    [
        {"conv1.bias": torch.zeros(9)},  # of a network nobody here knows
        {"conv1.bias": torch.zeros(6), "elsewhere": torch.zeros(1)},
    ],
)
def test_what_cannot_be_carried_is_forgotten_as_a_whole(strange: dict[str, Tensor]) -> None:
    small, params = cut({"conv2": [0, 3]})
    memory = with_kind("last", {**params, **strange}) | with_kind("other", {"label": torch.ones(1)})
    found, facts = fit_memory(memory, Brief(3, small, cut_params(small, params)), SHAPE)
    assert list(found) == ["other/label"]
    assert facts == {"forgot last": float(len({**params, **strange}))}


def test_a_network_that_grew_is_a_new_one_to_its_clients() -> None:
    wide = replace(LENET, surgery={"fc1.weight": (12, 32), "fc1.bias": (12,), "classifier.weight": (3, 12)})
    memory = with_kind("control", dict(LENET.build().state_dict()))
    found, facts = fit_memory(memory, Brief(1, wide, dict(wide.build().state_dict())), SHAPE)
    assert (found, list(facts)) == ({}, ["forgot control"])


def test_a_memory_that_fits_is_left_alone() -> None:
    params = dict(LENET.build().state_dict())
    memory = with_kind("control", params) | {"kron/conv1/in": torch.ones(3)}
    found, facts = fit_memory(memory, Brief(1, LENET, params), SHAPE)
    assert (found.keys(), facts) == (memory.keys(), {})


def test_a_pull_by_curvature_waits_for_factors_of_the_new_shape() -> None:
    recipe = fedfuse.recipe("fedlpa", eta=1.0)
    cuts = (Prune(0, FixedRate(0.4), "uniform"),)
    records, _ = pruned_run(replace(recipe, steps=(*recipe.steps, *cuts)), LENET, rounds=3)
    assert not [r for r in records if r.facts["refused"] or r.facts["dropped"]]


def test_a_variate_that_cannot_follow_starts_again_at_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedfuse.methods.scaffold.carry_over", lambda *_: None)
    records, _ = pruned_run(with_prunings("scaffold", last=False), LENET, rounds=3)
    assert records[0].facts["facts"]["forgot"] == ["control"]
    assert not [r for r in records if r.facts["refused"] or r.facts["dropped"]]

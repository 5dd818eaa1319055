"""One round, through every door: a run, the fusion of updates in memory and of their files give the same bytes.

Where a door cannot honour a part of a method it refuses, with one sentence that names the part. The Flower strategy's
half of this law is in `test_strategy_agrees.py`.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fedfuse
from fedfuse.core.model import Apart, Model, Single
from fedfuse.core.registry import all_methods, find_method
from fedfuse.core.rows import Rows
from fedfuse.core.settings import LocalSettings
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench, ServerState
from fedfuse.engines.local import InProcess, Population
from fedfuse.errors import ConfigError, FuseError, RecipeError
from fedfuse.nets.mixture import Mixture
from fedfuse.server.loop import RunPlan, run

CLIENTS, CLASSES, SEED = 4, 3, 3
SPEC = Spec("lenet", {"size": 8, "maps": [4, 4], "hidden": [6], "classes": CLASSES})
FLAT = Spec("mlp", {"inputs": 64, "hidden": [6], "classes": CLASSES})
SETTINGS: dict[str, Any] = {"batch_size": 8, "epochs": 2, "optimizer": {"lr": 0.05, "momentum": 0.9}}

# What a server that only reads files cannot do; everything else must agree to the last bit.
REFUSED = {"hybrid_fl", "data_sharing", "prunefl"}  # their server trains, lends rows, or prepares the network first


def rows(seed: int, n: int) -> Rows:
    draw = torch.Generator().manual_seed(seed)
    y = torch.randint(CLASSES, (n,), generator=draw)
    return Rows(torch.rand(n, 1, 8, 8, generator=draw) + 0.3 * y[:, None, None, None], y)


DATA = {f"c{i}": rows(i, 13 + 4 * i) for i in range(CLIENTS)}
SERVER = rows(99, 30)


@cache
def start(spec: Spec) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return dict(spec.build().state_dict())


def options(name: str) -> dict[str, Any]:
    """Small where the default is long."""
    small: dict[str, dict[str, Any]] = {
        "dense": {"epochs": 1, "steps": 2, "batch": 8, "width": 4, "latent": 8},
        "hrank": {"at": 1},
        "fedap": {"at": 1},
        "fedduap": {"at": 1},
        "imc": {"at": 1, "times": 1},
    }
    known = find_method(name).schema.model_fields
    return {key: value for key, value in small.get(name, {}).items() if key in known}


def network(name: str) -> Spec:
    return FLAT if name == "pfnm" else SPEC  # PFNM matches fully connected networks


def tensors(model: Model) -> dict[str, Tensor]:
    if isinstance(model, Single):
        return dict(model.posterior.mean)
    assert isinstance(model, Mixture | Apart)
    found = {f"{i}/{n}": t for i, m in enumerate(model.members) for n, t in m.posterior.mean.items()}
    return found | ({"weights": model.weights} if isinstance(model, Mixture) else {})


def by_run(name: str) -> Model:
    spec = network(name)
    bench = Bench(SERVER, None, CLIENTS, CLASSES, LocalSettings.model_validate(SETTINGS), SEED)
    state = ServerState(0, Single.of(_loaded(spec), spec))
    engine = InProcess(Population.of(DATA), SEED)
    (record,) = run(find_method(name).recipe(**options(name)), engine, bench, None, state, RunPlan(1))
    return record.state.model


def _loaded(spec: Spec) -> torch.nn.Module:
    module = spec.build()
    module.load_state_dict(start(spec))
    return module


def site(name: str, client: str) -> fedfuse.Update:
    recipe = fedfuse.recipe(name, **options(name))
    common: dict[str, Any] = {"client": client, "start": start(network(name)), "classes": CLASSES, "seed": SEED}
    return fedfuse.local_update(network(name), DATA[client], recipe, **common, **SETTINGS)


def fused(name: str, updates: list[Any], begin: Any) -> Model:
    recipe = fedfuse.recipe(name, **options(name))
    return fedfuse.fuse(updates, recipe, start=begin, server_rows=SERVER, seed=SEED).model


@pytest.mark.parametrize("name", sorted(all_methods()))
def test_a_run_updates_and_files_give_the_same_bytes_or_say_why_not(name: str, tmp_path: Path) -> None:
    if name in REFUSED:
        for ask in (lambda: site(name, "c0"), lambda: fused(name, [start(SPEC)] * 2, start(SPEC))):
            with pytest.raises(RecipeError, match=f"'{name}'"):
                ask()
        return
    expected = tensors(by_run(name))
    updates = [site(name, client) for client in DATA]
    begin = start_of(updates[0], name)
    paths = [update.save(tmp_path / f"{update.client}.safetensors") for update in updates]
    for door in (updates, list(reversed(updates)), paths):
        found = tensors(fused(name, door, begin))
        assert found.keys() == expected.keys()
        assert all(found[n].dtype == t.dtype and found[n].equal(t) for n, t in expected.items())


def start_of(update: fedfuse.Update, name: str) -> dict[str, Tensor] | None:
    """The common start, where the network that is trained is the one the user chose."""
    begin = start(network(name))
    if "start" in fedfuse.recipe(name).needs and fedfuse.recipe(name).trains:
        return begin
    if not fedfuse.recipe(name).trains:
        return begin if update.spec == network(name) else None
    return begin if update.state_dict().keys() == begin.keys() and _same_shapes(update, begin) else None


def _same_shapes(update: fedfuse.Update, begin: dict[str, Tensor]) -> bool:
    return all(t.shape == begin[n].shape for n, t in update.state_dict().items())


@pytest.mark.parametrize("name", sorted(all_methods()))
def test_files_fuse_without_the_networks_code_or_say_that_it_must_run(name: str, tmp_path: Path) -> None:
    """The header says whose network it is and what each tensor is for; nothing it names is imported."""
    if name in REFUSED or name in ("pfnm", "ridge"):  # random features take the network's place
        return
    foreign = _Elsewhere(_loaded(SPEC))
    recipe = fedfuse.recipe(name, **options(name))
    common: dict[str, Any] = {"classes": CLASSES, "seed": SEED, **SETTINGS}
    updates = [fedfuse.local_update(foreign, DATA[c], recipe, client=c, **common) for c in DATA]
    paths = [update.save(tmp_path / f"{update.client}.safetensors") for update in updates]
    begin = dict(foreign.state_dict()) if "start" in recipe.needs else None
    if "network" in recipe.needs:
        with pytest.raises(FuseError, match=f"_Elsewhere', .* {name!r}"):
            fedfuse.fuse(paths, recipe, start=begin, server_rows=SERVER)
        return
    here, there = (fedfuse.fuse(some, recipe, start=begin, seed=SEED).model for some in (updates, paths))
    assert all(tensors(there)[n].equal(t) for n, t in tensors(here).items())


class _Elsewhere(torch.nn.Module):
    """A network of somebody's own."""

    def __init__(self, body: torch.nn.Module | None = None) -> None:
        super().__init__()
        if body is None:
            raise RuntimeError("nobody asked for this class to be built")
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def test_effective_steps_follow_the_momentum_sites_trained_with() -> None:
    """Momentum 0.9 over 46 steps is 374.8 gradients' worth of walking, not 46."""
    data = Rows(torch.randn(46 * 8, 4), torch.arange(46 * 8) % 2)
    net = torch.nn.Linear(4, 2)
    sites = [
        fedfuse.local_update(net, data, "fednova", client=c, batch_size=8, lr=0.01, momentum=0.9) for c in ("a", "b")
    ]
    fused = fedfuse.fuse(sites, "fednova", start=net.state_dict())
    assert fused.facts["effective_steps"] == pytest.approx(370.7, abs=1)


def test_sites_that_must_agree_are_told_who_differs_and_in_what() -> None:
    data, net = Rows(torch.randn(16, 4), torch.arange(16) % 2), torch.nn.Linear(4, 2)
    sites = [fedfuse.local_update(net, data, "qfedavg", client=c, lr=lr) for c, lr in (("a", 0.1), ("b", 0.01))]
    with pytest.raises(ConfigError, match="q-FedAvg .* a had rate = 0.1 and b rate = 0.01"):
        fedfuse.fuse(sites, "qfedavg", start=net.state_dict())
    nova = [fedfuse.local_update(net, data, "fednova", client=c, lr=lr) for c, lr in (("a", 0.1), ("b", 0.05))]
    found = fedfuse.fuse(nova, "fednova", start=net.state_dict())
    assert found.facts["effective_steps"] == pytest.approx((1 + 0.5) / 2)

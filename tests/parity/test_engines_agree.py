"""Every method gives the same bytes in process and over a Flower grid with real messages."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedfuse.core.inputs import InputForm
from fedfuse.core.model import Mixture, Single, networks
from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import all_methods
from fedfuse.core.rows import Rows
from fedfuse.core.seams import Engine
from fedfuse.core.settings import LocalSettings
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench, ServerState
from fedfuse.engines.base import InProcess, Population
from fedfuse.errors import ConfigError
from fedfuse.server.judge import Judge
from fedfuse.server.loop import Plan, Record, run

pytest.importorskip("flwr")
sys.path.insert(0, str(Path(__file__).parents[1] / "engines"))

from fake_grid import FakeGrid, TestSite, grid_of, rows, small_options

from fedfuse.engines.flower import Federation, FlowerEngine
from fedfuse.engines.flower_client import client_app

CLASSES, SIZES, SEED = 3, (14, 9, 22), 5
LOCAL = LocalSettings(batch_size=8, epochs=1, optimizer={"lr": 0.1, "momentum": 0.5})
MLP = Spec("mlp", {"inputs": 64, "hidden": [5], "classes": CLASSES})
CONV = Spec("lenet", {"size": 8, "maps": [4, 6], "hidden": [8], "classes": CLASSES})
TIMES = ("train_seconds", "server_seconds")


def images(seed: int, n: int) -> Rows:
    made = rows(seed, n, 64, CLASSES)
    return Rows(made.x.view(n, 1, 8, 8), made.y)


@cache
def population() -> Population:
    return Population.of({f"client-{i}": images(i, n) for i, n in enumerate(SIZES)})


def bench() -> Bench:
    server = images(99, 30)
    return Bench(server, server.x, len(SIZES), CLASSES, LOCAL, SEED, InputForm((1, 8, 8)))


def rounds_of(recipe: Recipe) -> int:
    return 2 if recipe.result != "mixture" else 1


def start(recipe: Recipe) -> ServerState:
    """A small network that the recipe can work on."""
    torch.manual_seed(0)
    dense, conv = (ServerState(0, Single.of(spec.build(), spec)) for spec in (MLP, CONV))
    try:
        recipe.check(rounds_of(recipe), bench(), dense)
    except ConfigError:  # there are no channels to remove
        return conv
    return dense


def records(recipe: Recipe, engine: Engine) -> list[Record]:
    plan = Plan(rounds_of(recipe), enrolled=population().sizes())
    return list(run(recipe, engine, bench(), Judge(images(7, 20), CLASSES), start(recipe), plan))


def over_flower(recipe: Recipe) -> FlowerEngine:
    grid = grid_of(client_app(TestSite(population(), recipe, LOCAL)), len(SIZES))
    federation = Federation(grid, len(SIZES), deadline=60, names=population().clients)
    federation.gather()
    return FlowerEngine(federation, recipe.label, recipe, LOCAL, SEED)


def tensors(record: Record) -> dict[str, Tensor]:
    state = record.state
    found = {f"memory/{n}": t for n, t in state.memory.items()}
    for place, network in enumerate(networks(state.model)):
        found |= {f"{place}/{n}": t for n, t in network.posterior.mean.items()}
    if isinstance(state.model, Mixture):
        found["weights"] = state.model.weights
    return found


def told(record: Record) -> dict[str, Any]:
    return {key: str(value) for key, value in record.facts.items() if key not in TIMES}


@pytest.mark.parametrize("name", sorted(all_methods()))
def test_in_process_and_flower_agree_to_the_last_bit(name: str) -> None:
    method = all_methods()[name]
    recipe = method.recipe(**small_options(method))
    engine = over_flower(recipe)
    if "to every client" in getattr(recipe.roster, "reveals", ""):  # rows that are lent out are in no experiment file
        with pytest.raises(ConfigError, match="cannot run on a federation"):
            records(recipe, engine)
        return
    ours = records(recipe, InProcess(population(), SEED))
    theirs = records(recipe, engine)
    assert len(ours) == len(theirs) == rounds_of(recipe)
    for one, other in zip(ours, theirs, strict=True):
        a, b = tensors(one), tensors(other)
        assert a.keys() == b.keys()
        assert all(a[n].dtype == b[n].dtype and a[n].equal(b[n]) for n in a)
        assert told(one) == told(other)
    grid = engine.federation.grid
    assert isinstance(grid, FakeGrid)
    assert len(set(grid.pulls[-len(SIZES) :])) == len(SIZES)

"""Every method gives the same bytes in process and over a Flower grid with real messages."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import all_methods
from fedfuse.core.seams import Engine
from fedfuse.engines.local import InProcess
from fedfuse.errors import ConfigError
from fedfuse.server.judge import Judge
from fedfuse.server.loop import Record, RunPlan, run

pytest.importorskip("flwr")
sys.path.insert(0, str(Path(__file__).parent))

from small_runs import CLASSES, LOCAL, SEED, SIZES, bench, images, population, rounds_of, start, tensors  # noqa: I001
from fake_grid import FakeGrid, TestSite, grid_of, small_options

from fedfuse.flower.engine import Federation, FlowerEngine
from fedfuse.flower.site import client_app

TIMES = ("train_seconds", "server_seconds", "diagnostic_seconds")


def records(recipe: Recipe, engine: Engine) -> list[Record]:
    plan = RunPlan(rounds_of(recipe), enrolled=population().sizes())
    return list(run(recipe, engine, bench(), Judge(images(7, 20), CLASSES), start(recipe), plan))


def over_flower(recipe: Recipe) -> FlowerEngine:
    grid = grid_of(client_app(TestSite(population(), recipe, LOCAL)), len(SIZES))
    federation = Federation(grid, len(SIZES), deadline=60, names=population().clients)
    federation.gather()
    return FlowerEngine(federation, recipe.label, recipe, LOCAL, SEED)


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
        a, b = tensors(one.state), tensors(other.state)
        assert a.keys() == b.keys()
        assert all(a[n].dtype == b[n].dtype and a[n].equal(b[n]) for n in a)
        assert told(one) == told(other)
    grid = engine.federation.grid
    assert isinstance(grid, FakeGrid)
    assert len(set(grid.pulls[-len(SIZES) :])) == len(SIZES)

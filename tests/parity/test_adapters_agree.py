"""Rounds over adapters in one process and over Flower: the same bytes, and no base in them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from fedfuse.core.model import Single
from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import find_method
from fedfuse.core.rng import seeded
from fedfuse.core.seams import Engine
from fedfuse.core.state import ServerState
from fedfuse.engines.local import InProcess
from fedfuse.models.adapted import adapted_spec
from fedfuse.server.judge import Judge
from fedfuse.server.loop import Record, RunPlan, run

pytest.importorskip("flwr")
sys.path.insert(0, str(Path(__file__).parent))

from small_runs import CLASSES, CONV, LOCAL, SEED, SIZES, bench, images, population, tensors  # noqa: I001
from fake_grid import TestSite, grid_of

from fedfuse.flower.engine import Federation, FlowerEngine
from fedfuse.flower.site import client_app

SPEC = adapted_spec(CONV, {"rank": 2})
WHOLE = 4 * sum(p.numel() for p in CONV.build().parameters())


def records(recipe: Recipe, engine: Engine) -> list[Record]:
    with seeded(0, "start"):
        state = ServerState(0, Single.of(SPEC.build(), SPEC))
    plan = RunPlan(2, enrolled=population().sizes())
    return list(run(recipe, engine, bench(), Judge(images(7, 20), CLASSES), state, plan))


@pytest.mark.parametrize(
    ("name", "options"), [("flora", {}), ("flexlora", {}), ("flexlora", {"moments": True}), ("fedit", {})]
)
def test_a_federation_agrees_with_one_process(name: str, options: dict[str, Any]) -> None:
    recipe = find_method(name).recipe(**options)
    grid = grid_of(client_app(TestSite(population(), recipe, LOCAL)), len(SIZES))
    federation = Federation(grid, len(SIZES), deadline=60, names=population().clients)
    federation.gather()
    theirs = records(recipe, FlowerEngine(federation, recipe.label, recipe, LOCAL, SEED))
    ours = records(recipe, InProcess(population(), SEED))
    for one, other in zip(ours, theirs, strict=True):
        a, b = tensors(one.state), tensors(other.state)
        assert a.keys() == b.keys()
        assert all(a[n].equal(b[n]) for n in a)
        assert not any("base_layer" in n for n in a)
        for side in ("bytes_up", "bytes_down"):
            assert one.facts[side] == other.facts[side]
    assert ours[0].facts["bytes_down"] < len(SIZES) * WHOLE

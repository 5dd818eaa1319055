"""Matched networks on real images, at a scale of seconds: clients that begin apart; one exchange, or one a layer."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from fedfuse.client.class_sums import LabelCounts
from fedfuse.core.messages import Cohort
from fedfuse.core.registry import find_method
from fedfuse.core.seams import Aggregator, Work
from fedfuse.core.state import ServerState
from fedfuse.engines.local import InProcess
from fedfuse.experiment.config import Experiment
from fedfuse.experiment.prepare import Setting, prepare
from fedfuse.methods.pfnm import MatchedUnits
from fedfuse.server.admission.admit import admit_all
from fedfuse.server.aggregate.chain import Matcher
from fedfuse.server.aggregate.ensemble import KeepAll
from fedfuse.server.aggregate.mean import Mean
from fedfuse.server.loop import run

pytestmark = pytest.mark.paper

CELLS: dict[str, dict[str, Any]] = {
    "three to six labels": {"kind": "labels", "low": 3, "high": 6, "share": "copy"},
    "Dirichlet 0.5": {"kind": "dirichlet", "alpha": 0.5},
}


def experiment(partition: dict[str, Any], **more: Any) -> Experiment:
    return Experiment(
        data={"source": "mnist", "partition": partition, "clients": 5, "train_limit": 4000, "server_fraction": 0.05},
        model={"name": "mlp", "hidden": [100], "init": "pfnm"},
        local={"epochs": 6, "optimizer": {"name": "adam", "lr": 0.001}},
        start="separate",
        methods=[{"name": "pfnm"}],
        **more,
    )


@cache
def exchange(cell: str) -> tuple[Setting, Cohort]:
    """Five clients' updates, each from weights of its own."""
    prepared = prepare(experiment(CELLS[cell]))
    setting, evidence = prepared.setting(0), (LabelCounts(),)
    brief, engine = setting.start.brief((), 10), InProcess(setting.population, 0)
    replies = engine.exchange(brief, Work(prepared.local, evidence=evidence), engine.clients)
    return setting, admit_all(replies, brief, evidence, engine.clients).cohort


@cache
def fused(cell: str, aggregate: Aggregator) -> ServerState:
    setting, cohort = exchange(cell)
    return aggregate(cohort, setting.start, setting.bench)


def accuracy(cell: str, aggregate: Aggregator) -> float:
    setting, _ = exchange(cell)
    return 100 * float(setting.judge.evaluate(fused(cell, aggregate).model)["accuracy"])


@pytest.fixture(autouse=True)
def _real(real_data: Path) -> None:
    """Every test here reads real images."""


@pytest.mark.parametrize("cell", CELLS)
def test_matched_networks_are_far_above_averaged_ones(cell: str) -> None:
    assert accuracy(cell, MatchedUnits()) > accuracy(cell, Mean()) + 20


@pytest.mark.parametrize("cell", CELLS)
def test_one_matched_network_is_about_as_good_as_all_together(cell: str) -> None:
    assert accuracy(cell, MatchedUnits()) > accuracy(cell, KeepAll()) - 5


@pytest.mark.parametrize("cell", CELLS)
def test_the_network_grows_with_the_mass_of_the_process(cell: str) -> None:
    widths = [
        fused(cell, MatchedUnits((gamma,), (1.0,), (1.0,), Matcher())).facts["widths"]["fc1"]
        for gamma in (1e-3, 1.0, 50.0)
    ]
    assert widths == sorted(widths)
    assert 100 <= widths[0] < 110
    assert 250 < widths[2] <= 500


def test_layer_by_layer_is_better_than_all_layers_at_once() -> None:
    """FedMA's pass: clients mend their later layers after each matching."""
    prepared = prepare(experiment(CELLS["Dirichlet 0.5"], rounds=2))
    setting = prepared.setting(0)
    recipe = find_method("fedma").recipe()
    records = list(
        run(recipe, InProcess(setting.population, 0), setting.bench, setting.judge, setting.start, setting.plan)
    )
    at_once, by_layer = (100 * record.facts["accuracy"] for record in records)
    assert by_layer > at_once + 5

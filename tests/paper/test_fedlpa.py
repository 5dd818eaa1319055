"""FedLPA's published trends on real images, at a scale of seconds: one exchange of ten skewed clients."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from fedfuse.client.kfac import KroneckerFactors
from fedfuse.core.messages import Cohort
from fedfuse.core.seams import Aggregator, Work
from fedfuse.engines.local import InProcess
from fedfuse.experiment.config import Experiment
from fedfuse.experiment.prepare import Setting, prepare
from fedfuse.server.admission.admit import admit_all
from fedfuse.server.aggregate.mean import Mean
from fedfuse.server.aggregate.natural import NaturalKron

pytestmark = pytest.mark.paper

CELLS: dict[str, tuple[str, dict[str, Any], int]] = {
    "MNIST, two classes per client": ("mnist", {"kind": "classes", "per_client": 2}, 0),
    "Fashion-MNIST, Dirichlet 0.1": ("fashion-mnist", {"kind": "dirichlet", "alpha": 0.1}, 1),
}


@cache
def exchange(cell: str) -> tuple[Setting, Cohort]:
    """Ten clients' updates with their factors: 20,000 rows, 5 local epochs."""
    source, partition, seed = CELLS[cell]
    experiment = Experiment(
        data={"source": source, "partition": partition, "train_limit": 20_000},
        model={"name": "lenet"},
        local={"epochs": 5, "optimizer": {"lr": 0.01, "momentum": 0.9, "weight_decay": 1e-5}},
        methods=[{"name": "fedlpa"}],
    )
    prepared = prepare(experiment)
    setting, evidence = prepared.setting(seed), (KroneckerFactors(choose=True, min_rows=1),)
    brief, engine = setting.start.brief((), 10), InProcess(setting.population, seed)
    replies = engine.exchange(brief, Work(prepared.local, evidence=evidence), engine.clients)
    return setting, admit_all(replies, brief, evidence, engine.clients).cohort


def accuracy(cell: str, aggregate: Aggregator) -> float:
    setting, cohort = exchange(cell)
    fused = aggregate(cohort, setting.start, setting.bench)
    return 100 * float(setting.judge.evaluate(fused.model)["accuracy"])


@pytest.fixture(autouse=True)
def _real(real_data: Path) -> None:
    """Every test here reads real images."""


DEFAULT = NaturalKron(1e-1, scale="root")


@pytest.mark.parametrize("cell", CELLS)
def test_the_default_is_far_above_fedavg(cell: str) -> None:
    assert accuracy(cell, DEFAULT) > accuracy(cell, Mean()) + 15


@pytest.mark.parametrize("cell", CELLS)
def test_factors_as_they_are_do_where_clients_train_briefly(cell: str) -> None:
    assert accuracy(cell, NaturalKron()) > accuracy(cell, Mean()) + 15


@pytest.mark.parametrize("cell", CELLS)
def test_a_damping_chosen_by_the_clients_is_as_good(cell: str) -> None:
    chosen = accuracy(cell, NaturalKron("evidence", "evidence"))
    assert chosen > accuracy(cell, Mean()) + 15
    assert chosen > accuracy(cell, DEFAULT) - 15


@pytest.mark.parametrize("cell", CELLS)
def test_with_trace_damping_the_exact_solution_is_what_makes_it_work(cell: str) -> None:
    assert accuracy(cell, NaturalKron()) > accuracy(cell, NaturalKron(solver="expectation")) + 5


@pytest.mark.parametrize("cell", CELLS)
def test_every_layer_is_solved_to_the_tolerance(cell: str) -> None:
    setting, cohort = exchange(cell)
    facts = DEFAULT(cohort, setting.start, setting.bench).facts
    assert set(facts["residual"]) == {"conv1", "conv2", "fc1", "fc2", "classifier"}
    assert max(facts["residual"].values()) <= 1e-8
    assert max(facts["iterations"].values()) < 400
    assert facts["averaged"] == []

"""How long a run will take: by a clock of the test's own, and by the work that long steps say they do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fedfuse.core.inputs import InputForm
from fedfuse.core.messages import Brief
from fedfuse.core.rows import Rows
from fedfuse.core.seams import Work
from fedfuse.core.settings import LocalSettings
from fedfuse.core.state import Bench
from fedfuse.engines.pool import Pool
from fedfuse.experiment.config import Experiment
from fedfuse.experiment.estimate import Pace, TimeInWorker, estimate_seconds
from fedfuse.experiment.prepare import prepare
from fedfuse.server.steps import synthesize
from fedfuse.server.steps.distill import Distill
from fedfuse.server.steps.synthesize import Generate, Impressions, ServerInputs

Tiny = Callable[..., Experiment]


def steady(work: Work, _: Brief, __: Rows) -> float:
    """Every step takes a second, every round another, whatever this machine does."""
    return 1.0 + work.settings.epochs


def test_training_is_scaled_by_rows_epochs_rounds_and_seeds(tiny: Tiny) -> None:
    local = {"batch_size": 10, "epochs": 3}
    data = {"clients": 3, "train_limit": 90, "test_limit": 30}
    prepared = prepare(tiny("fedavg", rounds=2, seeds=[0, 1], local=local, data=data))
    sizes = prepared.setting(0).population.sizes().values()
    training = sum(3 * -(-n // 10) * 1.0 + 1.0 for n in sizes)
    assert estimate_seconds(prepared, time_round=steady) == {"fedavg": pytest.approx(4 * (training + 30 / 3 / 10))}
    assert estimate_seconds(prepared, 2, steady)["fedavg"] == pytest.approx(4 * (training / 2 + 1))


def test_one_training_serves_every_rule_of_one_round(tiny: Tiny) -> None:
    once = estimate_seconds(prepare(tiny("fedavg", "fednova", rounds=1)), time_round=steady)
    assert once["fednova"] < once["fedavg"]
    twice = estimate_seconds(prepare(tiny("fedavg", "fednova", rounds=2)), time_round=steady)
    assert twice["fednova"] == twice["fedavg"]


def test_evidence_is_brought_to_a_training_that_is_counted_already(tiny: Tiny) -> None:
    local = {"epochs": 50}
    alone = estimate_seconds(prepare(tiny("fedlpa", rounds=1, local=local)), time_round=steady)
    beside = estimate_seconds(prepare(tiny("fedavg", "fedlpa", "fisher", rounds=1, local=local)), time_round=steady)
    assert beside["fedavg"] > 0.9 * alone["fedlpa"]
    assert max(beside["fedlpa"], beside["fisher"]) < 0.1 * alone["fedlpa"]
    rounds = estimate_seconds(prepare(tiny("fedavg", "fedlpa", rounds=2, local=local)), time_round=steady)
    assert rounds["fedlpa"] == pytest.approx(2 * alone["fedlpa"])


def test_a_long_step_of_the_server_dominates(tiny: Tiny) -> None:
    found = estimate_seconds(prepare(tiny("fedavg", "dense", rounds=1)), time_round=steady)
    assert found["dense"] > 100 * found["fedavg"]


def test_the_server_takes_torchs_steps_and_the_generators_own_time(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synthesize, "_seconds_per_image", lambda *_: 0.5)
    short = {"name": "dense", "epochs": 2, "steps": 3, "batch": 8}
    prepared = prepare(tiny("fedavg", rounds=1, methods=[{"name": "fedavg"}, short], data={"clients": 3}))

    def by_kernel(work: Work, _: Brief, __: Rows) -> float:
        return work.settings.epochs * (10.0 if work.settings.kernel == "torch" else 1.0)

    _, dense = estimate_seconds(prepared, time_round=by_kernel).values()
    batch = prepared.local.batch_size
    passes = 2 * 3 * 8 * 4 + 8 * (1 + 2)
    assert dense == pytest.approx(2 * 3 * 8 * 0.5 + passes * 10 / batch + len(prepared.dataset.test) / 3 / batch)


def test_a_generator_is_tried() -> None:
    bench = Bench(population=5, classes=2, inputs=InputForm((1, 8, 8)))
    assert Distill(Generate(batch=8, steps=2, width=4, latent=4), epochs=4).seconds(bench) > 0
    assert Distill(Impressions(count=100, steps=7), epochs=3).seconds(bench) == 0


def test_who_does_not_train_is_not_asked_for_epochs(tiny: Tiny) -> None:
    local, data = {"batch_size": 10, "epochs": 50}, {"clients": 3, "train_limit": 90, "test_limit": 30}
    found = estimate_seconds(prepare(tiny("ridge", rounds=1, local=local, data=data)), time_round=steady)
    assert found["ridge"] == pytest.approx(2.0 * 90 / 10 + 30 / 3 * 2.0 / 10, rel=0.4)  # a pass, and scores


def test_a_real_step_is_timed(tiny: Tiny) -> None:
    found = estimate_seconds(prepare(tiny("fedavg", "fedlpa")))
    assert all(0 < seconds < 600 for seconds in found.values())


def test_a_worker_that_will_train_is_timed(tiny: Tiny) -> None:
    with Pool(1) as pool:
        found = estimate_seconds(prepare(tiny("fedavg", "fedlpa")), 1, TimeInWorker(pool))
        assert pool.is_awake
    assert all(0 < seconds < 600 for seconds in found.values())


def test_few_steps_may_be_asked_for() -> None:
    pace = Pace(step=1.0, rest=2.0, batch=10)
    assert pace.round_seconds(100, LocalSettings(epochs=5, batch_size=10, max_steps=7), evidence=False) == 9.0
    assert pace.round_seconds(100, LocalSettings(epochs=1, batch_size=10), evidence=True) == 10 + 2 * 10


def test_long_steps_say_what_they_do() -> None:
    rows = Rows(torch.zeros(20, 4), torch.arange(20) % 2)
    bench = Bench(rows=rows, population=5, classes=2)
    assert Distill(ServerInputs(), epochs=3).passes(5, bench) == 60
    assert Distill(Impressions(count=100, steps=7), epochs=3).passes(5, bench) == 700 + 300
    assert Distill(Impressions(count=100, steps=7, of="teacher"), epochs=3).passes(5, bench) == 5 * 700 + 300
    made = Distill(Generate(batch=8, steps=2), epochs=4).passes(5, bench)
    assert made == 4 * 2 * 8 * 6 + 8 * (1 + 2 + 3 + 4)

"""The disturbance score: how often a sum of logits overrules the surest network."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedfuse.core.inputs import InputForm
from fedfuse.core.messages import ClientUpdate, Cohort
from fedfuse.core.model import Single
from fedfuse.core.posterior import Posterior
from fedfuse.core.rows import Rows
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench, ServerState
from fedfuse.experiment.config import Experiment
from fedfuse.nets.mixture import find_disturbed
from fedfuse.server.steps.disturb import Disturbance

SPEC = Spec("mlp", {"inputs": 4, "hidden": [6], "classes": 3})


def cohort(count: int, spec: Spec = SPEC) -> Cohort:
    torch.manual_seed(0)
    return Cohort.of([ClientUpdate(f"c{i}", Posterior(spec.build().state_dict()), 1.0, 1, spec) for i in range(count)])


def state(spec: Spec = SPEC) -> ServerState:
    return ServerState(0, Single.of(spec.build(), spec))


def test_the_score_is_a_share_of_the_servers_rows() -> None:
    who, before = cohort(4), state()
    rows = Rows(torch.randn(200, 4), torch.zeros(200, dtype=torch.int64))
    after = Disturbance(count=500)(before, who, Bench(rows=rows))
    logits = torch.stack([SPEC.forward(u.posterior.mean, rows.x) for u in who])
    assert after.facts["disturbance"] == pytest.approx(float(find_disturbed(logits).double().mean()))
    assert 0 < after.facts["disturbance"] < 1
    assert after.facts["disturbance_inputs"] == "server"
    assert after.model is before.model, "it measures and changes nothing"
    few = Disturbance(count=20)(before, who, Bench(unlabelled=rows.x))
    assert few.facts["disturbance_inputs"] == "unlabelled"


def test_one_network_is_not_disturbed() -> None:
    after = Disturbance(count=20)(state(), cohort(1), Bench(inputs=InputForm((4,))))
    assert after.facts == {"disturbance": 0.0, "disturbance_inputs": "impressions"}


def test_without_rows_networks_show_what_they_know() -> None:
    who, bench = cohort(3), Bench(inputs=InputForm((4,), (-2.0,), (2.0,)), seed=1)
    after = Disturbance(count=30)(state(), who, bench)
    assert after.facts["disturbance_inputs"] == "impressions"
    assert after.facts == Disturbance(count=30)(state(), who, bench).facts


def test_networks_nobody_can_ask_are_left_unmeasured() -> None:
    spec = Spec.of(nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 2)))
    before = state(spec)
    assert Disturbance()(before, cohort(2, spec), Bench()) is before


def test_every_method_of_an_experiment_can_be_measured() -> None:
    entries = [{"name": "fedlpa", "rounds": 1, "then": {"name": "scaffold"}}, {"name": "ams"}, {"name": "rklb"}]
    told, silent = (Experiment(methods=entries, judge={"disturbance": on}).recipes() for on in (True, False))
    for label, recipe in told.items():
        for round_ in (1, 2):
            now, before = recipe.at(round_), silent[label].at(round_)
            assert sum(isinstance(step, Disturbance) for step in now.steps) == 1, "once, whoever asks for it"
            assert [s for s in now.steps if not isinstance(s, Disturbance)] == [
                s for s in before.steps if not isinstance(s, Disturbance)
            ]
            assert now.result == before.result

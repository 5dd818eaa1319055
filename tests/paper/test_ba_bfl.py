"""BA-BFL on real images at a scale of seconds: Fashion-MNIST, LeNet, three skewed clients, four rounds."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from fedfuse.core.registry import find_method
from fedfuse.engines.local import InProcess
from fedfuse.experiment.config import Experiment
from fedfuse.experiment.prepare import Setting, prepare
from fedfuse.server.loop import Record, RunPlan, run

pytestmark = pytest.mark.paper


@cache
def setting() -> Setting:
    experiment = Experiment(
        data={
            "source": "fashion-mnist",
            "clients": 3,
            "partition": {"kind": "dirichlet", "alpha": 0.5},
            "train_limit": 6000,
            "test_limit": 2000,
        },
        model={"name": "lenet"},
        local={"epochs": 3, "optimizer": {"lr": 0.03, "momentum": 0.9, "weight_decay": 1e-5}},
        judge={"ood": "mnist", "clients": "never"},
        methods=[{"name": "fedavg"}],
    )
    return prepare(experiment).setting(0)


@cache
def last(name: str, rounds: int = 4, **options: Any) -> Record:
    at = setting()
    engine, recipe = InProcess(at.population, at.seed), find_method(name).recipe(**options)
    *_, record = run(recipe, engine, at.bench, at.judge, at.start, RunPlan(rounds))
    return record


@pytest.fixture(autouse=True)
def _real(real_data: Path) -> None:
    """Every test here reads real images."""


def test_one_bayesian_layer_keeps_pace_with_fedavg() -> None:
    plain, bayes = last("fedavg").facts, last("rklb", last=1).facts
    assert bayes["nll"] < plain["nll"] + 0.03
    assert bayes["accuracy"] > plain["accuracy"] - 0.03
    assert plain["accuracy"] > 0.6


def test_its_standard_deviations_learn_and_differ_by_more_than_half() -> None:
    """After 24 epochs: by then those that rows say nothing about are at the prior's, and others rest below."""
    facts = last("rklb", rounds=8, last=1).facts["facts"]
    sigma, apart = facts["sigma"]["net.classifier"], facts["sigma_apart"]["net.classifier"]
    assert sigma["95 %"] > 1.5 * sigma["5 %"]
    assert apart > 0.02  # and clients differ about one weight


def test_it_is_less_sure_of_digits_than_of_clothes() -> None:
    scores = last("rklb", last=1).facts
    assert scores["ood_auroc"] > 0.6
    assert scores["ood_entropy"] > scores["entropy"]
    assert 0 < scores["mutual_information"] < scores["entropy"]


def test_rules_coincide_as_released_and_differ_once_variances_learn() -> None:
    """With frozen, equal variances every rule but GAA takes the plain mean, which is the paper's own finding."""
    frozen = [last(rule, rounds=1, last=3, released=True, kl=1.0) for rule in ("eaa", "rklb", "wb", "aalv")]
    learned = [last(rule, rounds=2, last=3) for rule in ("eaa", "rklb")]
    name = "net.fc1.weight"
    first, *others = (r.state.single.posterior.mean[name] for r in frozen)
    assert all(first.allclose(other, atol=1e-6) for other in others)
    mean, natural = (r.state.single.posterior.mean[name] for r in learned)
    assert (mean - natural).norm() > 0.001 * mean.norm()
    assert not mean.allclose(natural, atol=1e-6)

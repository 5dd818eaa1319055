"""SWA on real rows: Table II in small, at its first round and from a common start.

What was found while these margins were set (20,000 rows of Fashion-MNIST, LeNet, 3 epochs, seeds 0 to 2): at
0.6/0.15/0.15 the HOS weights are 6 to 11 points above the plain mean and about as good as weighing by examples; at
equal splits they gain nothing and may lose. The Rényi weights are uniform to 0.02 where clients are alike; where one
has more rows its weights are wider, so it is nearer to N(0, 1) and weighs a little less, never more.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from fedfuse.core.state import ServerState
from fedfuse.engines.local import InProcess
from fedfuse.experiment.config import Experiment
from fedfuse.experiment.prepare import Setting, prepare
from fedfuse.methods.swa import NonGaussianMean, Renyi
from fedfuse.server.admission.admit import Admission, admit_all
from fedfuse.server.aggregate.mean import Mean

pytestmark = pytest.mark.paper

EQUAL, UNEQUAL = (0.3, 0.3, 0.3), (0.6, 0.15, 0.15)


class Trained(NamedTuple):
    """Three clients after their first round: every rule below fuses the same updates."""

    setting: Setting
    admission: Admission

    def fused(self, aggregate: Mean | NonGaussianMean) -> ServerState:
        return aggregate(self.admission.cohort, self.setting.start, self.setting.bench)

    def accuracy(self, aggregate: Mean | NonGaussianMean) -> float:
        return 100 * float(self.setting.judge.evaluate(self.fused(aggregate).model)["accuracy"])


@cache
def trained(shares: tuple[float, ...], seed: int) -> Trained:
    prepared = prepare(
        Experiment(
            seeds=(seed,),
            data={
                "source": "fashion-mnist",
                "clients": 3,
                "partition": {"kind": "shares", "shares": shares},
                "train_limit": 20_000,
                "test_limit": 5_000,
                "server_fraction": 0.01,
            },
            model={"name": "lenet"},
            local={"epochs": 3, "optimizer": {"lr": 0.02, "momentum": 0.9, "weight_decay": 1e-4}},
            methods=[{"name": "swa"}],
        )
    )
    setting, recipe = prepared.setting(seed), prepared.recipes["swa"]
    engine, brief = InProcess(setting.population), setting.start.brief(())
    answers = engine.exchange(brief, recipe.work(setting.bench.local), engine.clients)
    enrolled = setting.population.sizes()
    return Trained(setting, admit_all(answers, brief, recipe.evidence, engine.clients, enrolled=enrolled))


def renyi_weights(clients: Trained) -> list[list[float]]:
    return [list(line.values()) for line in clients.fused(NonGaussianMean(Renyi())).facts["layer_weights"].values()]


def test_unequal_splits_gain_over_the_plain_mean(real_data: Path) -> None:
    both = [trained(UNEQUAL, seed) for seed in (0, 1)]
    gains = [each.accuracy(NonGaussianMean()) - each.accuracy(Mean(uniform=True)) for each in both]
    assert sum(gains) / len(gains) >= 3, gains


def test_the_score_stands_in_for_the_amount_of_training(real_data: Path) -> None:
    """In most layers the client with four times the rows weighs most; weighing by rows does as well."""
    clients = trained(UNEQUAL, 0)
    weights = clients.fused(NonGaussianMean()).facts["layer_weights"].values()
    assert sum(line["client-00"] > 1 / 3 for line in weights) >= 4
    assert clients.accuracy(Mean()) - clients.accuracy(Mean(uniform=True)) >= 3


def test_equal_splits_gain_nothing(real_data: Path) -> None:
    clients = trained(EQUAL, 0)
    assert clients.accuracy(NonGaussianMean()) - clients.accuracy(Mean(uniform=True)) < 2


def test_renyi_weights_are_the_plain_mean_where_clients_are_alike(real_data: Path) -> None:
    clients = trained(EQUAL, 0)
    assert all(abs(w - 1 / 3) < 0.02 for line in renyi_weights(clients) for w in line)
    gap = clients.accuracy(NonGaussianMean(Renyi())) - clients.accuracy(Mean(uniform=True))
    assert abs(gap) < 0.5


def test_renyi_weights_stay_near_uniform_and_never_favour_the_larger_client(real_data: Path) -> None:
    for line in renyi_weights(trained(UNEQUAL, 0)):
        assert line[0] < 1 / 3
        assert all(abs(w - 1 / 3) < 0.15 for w in line)

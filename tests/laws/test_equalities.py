"""Methods that must be FedAvg where their own idea has nothing to say yet, on a real network, to the last bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedfuse.core.model import Single
from fedfuse.core.registry import find_method
from fedfuse.core.rows import Rows
from fedfuse.core.settings import LocalSettings
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench, ServerState, entries_of
from fedfuse.engines.local import InProcess, Population
from fedfuse.server.loop import Record, RunPlan, run


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(5, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 3)
    )


SPEC = Spec.of(network())
SIZES = {"a": 9, "b": 16, "c": 40}


def rows() -> dict[str, Rows]:
    draw = torch.Generator().manual_seed(5)
    return {
        c: Rows(torch.randn(n, 5, generator=draw), torch.randint(3, (n,), generator=draw)) for c, n in SIZES.items()
    }


def federate(name: str, rounds: int, settings: dict[str, Any] | None = None, **options: Any) -> list[Record]:
    base: dict[str, Any] = {"batch_size": 8, "epochs": 2, "optimizer": {"lr": 0.1, "momentum": 0.9}}
    bench = Bench(population=3, classes=3, local=LocalSettings.model_validate(base | (settings or {})))
    state = ServerState(0, Single.of(network(), SPEC))
    engine = InProcess(Population.of(rows()))
    return list(run(find_method(name).recipe(**options), engine, bench, None, state, RunPlan(rounds, enrolled=SIZES)))


def same(a: Record, b: Record) -> bool:
    mine, theirs = a.state.single.posterior.mean, b.state.single.posterior.mean
    return all(mine[n].equal(theirs[n]) for n in theirs)


@pytest.fixture(scope="module")
def fedavg() -> list[Record]:
    return federate("fedavg", 3)


@pytest.mark.parametrize(("name", "options"), [("scaffold", {}), ("moon", {"mu": 5.0})])
def test_the_first_round_is_fedavgs_and_the_second_is_not(
    name: str, options: dict[str, Any], fedavg: list[Record]
) -> None:
    records = federate(name, 2, **options)
    assert same(records[0], fedavg[0])
    assert not same(records[1], fedavg[1])


@pytest.mark.parametrize(("name", "options"), [("fedprox", {"mu": 0.0}), ("moon", {"mu": 0.0})])
def test_without_its_term_a_method_is_fedavg_in_every_round(
    name: str, options: dict[str, Any], fedavg: list[Record]
) -> None:
    assert all(same(a, b) for a, b in zip(federate(name, 3, **options), fedavg, strict=True))


def test_fednova_with_equal_steps_is_fedavg() -> None:
    equal = {"max_steps": 3}  # every client has at least three batches in two epochs
    nova, avg = (federate(name, 1, equal)[0].state.single.posterior.mean for name in ("fednova", "fedavg"))
    assert all(torch.allclose(nova[n].double(), avg[n].double(), rtol=0, atol=1e-7) for n in avg)


def test_moons_loss_in_round_two_is_the_one_worked_out_by_hand() -> None:
    """One full-batch step, no dropout: the loss the client reports is that of the global model of round one.

    The live network starts at the global model, so its cosine to it is 1 but for batch norm, which is in training
    mode in the live network and in evaluation mode in the frozen ones.
    """
    net = nn.Sequential(nn.Linear(5, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 3))
    data, mu, temperature = rows(), 2.0, 0.5
    bench = Bench(classes=3, local=LocalSettings(batch_size=64, optimizer={"lr": 0.5}))
    engine = InProcess(Population.of(data))
    rounds = run(
        find_method("moon").recipe(mu=mu, temperature=temperature),
        engine,
        bench,
        None,
        ServerState(0, Single.of(net, Spec.of(net))),
        RunPlan(2),
    )
    given = next(rounds).state.single.posterior.mean
    kept = {client: entries_of(engine.memories[client], "last") for client in data}  # as it was after the first round
    second = next(rounds)
    for client, own in data.items():
        expected = by_hand(net, given, kept[client], own, mu, temperature)
        assert second.facts["clients"][client]["facts"]["loss"] == pytest.approx(expected, rel=1e-5)


@torch.no_grad()
def by_hand(net: nn.Module, given: Any, last: Any, own: Rows, mu: float, temperature: float) -> float:
    def features(state: Any, training: bool) -> tuple[Tensor, Tensor]:
        net.load_state_dict(dict(state))
        net.train(training)
        z = net[:5](own.x)
        return net[5](z), z

    logits, z = features(given, True)
    near, far = features(given, False)[1], features(last, False)[1]

    def cosine(a: Tensor, b: Tensor) -> Tensor:
        return (a * b).sum(1) / (a.norm(dim=1) * b.norm(dim=1)).clamp(min=1e-8)

    plus, minus = (cosine(z, near) / temperature).exp(), (cosine(z, far) / temperature).exp()
    return float(F.cross_entropy(logits, own.y) - mu * (plus / (plus + minus)).log().mean())

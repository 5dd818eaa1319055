"""Server optimizers against their recurrences, written out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedfuse.core.messages import ClientUpdate, Cohort
from fedfuse.core.model import Single
from fedfuse.core.posterior import Posterior
from fedfuse.core.registry import find_method
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench, ServerState
from fedfuse.server.aggregate.adaptive import ServerOptimizer

NET = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
SPEC = Spec.of(NET)
TRAINED = ("0.weight", "0.bias", "1.weight", "1.bias")


def drawn(seed: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {
        n: torch.randn(t.shape, generator=draw) if t.is_floating_point() else torch.tensor(seed)
        for n, t in NET.state_dict().items()
    }


def cohort(round_: int) -> Cohort:
    return Cohort(tuple(ClientUpdate(f"c{k}", Posterior(drawn(10 * round_ + k)), 1.0 + k, 1, SPEC) for k in range(3)))


def mean(round_: int, name: str) -> Tensor:
    return sum(u.posterior.mean[name].double() * w for u, w in zip(cohort(round_), cohort(round_).weights, strict=True))  # type: ignore[return-value]


def rounds(optimizer: ServerOptimizer, count: int) -> list[ServerState]:
    states = [ServerState(0, Single(SPEC, Posterior(drawn(99))))]
    for round_ in range(count):
        states.append(optimizer(cohort(round_), states[-1], Bench()))
    return states[1:]


def by_hand(rule: str, name: str, count: int, lr: float, b1: float, b2: float, tau: float) -> list[Tensor]:
    w = drawn(99)[name].double()
    m, v = torch.zeros_like(w), torch.full_like(w, tau**2)
    seen = []
    for round_ in range(count):
        delta = mean(round_, name) - w
        if rule == "momentum":
            m = b1 * m + delta
            w = w + lr * m
        else:
            m = b1 * m + (1 - b1) * delta
            square = delta**2
            v = {
                "adam": b2 * v + (1 - b2) * square,
                "yogi": v - (1 - b2) * square * torch.sign(v - square),
                "adagrad": v + square,
            }[rule]
            w = w + lr * m / (v.sqrt() + tau)
        seen.append(w)
    return seen


@pytest.mark.parametrize("rule", ["momentum", "adam", "yogi", "adagrad"])
def test_every_round_is_that_of_the_recurrence(rule: Any) -> None:
    how: dict[str, float] = {"lr": 0.3, "b1": 0.8, "b2": 0.95, "tau": 1e-2}
    optimizer = ServerOptimizer(rule, lr=0.3, beta1=0.8, beta2=0.95, tau=1e-2)
    states = rounds(optimizer, 4)
    for name in TRAINED:
        for got, expected in zip(states, by_hand(rule, name, 4, **how), strict=True):
            assert torch.allclose(got.single.posterior.mean[name].double(), expected, atol=1e-5)


def test_buffers_are_those_of_the_mean() -> None:
    (state,) = rounds(ServerOptimizer("adam", lr=0.1), 1)
    assert torch.allclose(state.single.posterior.mean["1.running_var"].double(), mean(0, "1.running_var"), atol=1e-6)
    assert state.single.posterior.mean["1.num_batches_tracked"].item() == 2


def test_momentum_without_memory_and_with_rate_one_is_fedavg() -> None:
    states = rounds(ServerOptimizer("momentum", lr=1.0, beta1=0.0), 2)
    for round_, state in enumerate(states):
        for name in TRAINED:
            assert torch.allclose(state.single.posterior.mean[name].double(), mean(round_, name), atol=1e-6)


@pytest.mark.parametrize(("name", "rule"), [("fedavgm", "momentum"), ("fedadam", "adam"), ("fedyogi", "yogi")])
def test_the_methods_use_their_rule(name: str, rule: str) -> None:
    aggregate = find_method(name).recipe().aggregate
    assert isinstance(aggregate, ServerOptimizer)
    assert aggregate.rule == rule

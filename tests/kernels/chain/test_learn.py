"""SGD, Adam and AMSGrad on long rows, against torch's own optimizers in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from plain_training import error, rows, seeded, trained
from torch import nn

from fedfuse.client.objectives import Proximal
from fedfuse.core.seams import TaskLoss, Work
from fedfuse.core.settings import LocalSettings, Optimizer
from fedfuse.kernels.chain.learn import add_signs, make_descent, rows_needed

SIZE = 1000
OPTIMIZERS: dict[str, tuple[dict[str, Any], Any]] = {
    "sgd": ({"momentum": 0.0}, lambda p: torch.optim.SGD(p, lr=0.01)),
    "momentum": (
        {"momentum": 0.9, "weight_decay": 0.1},
        lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, weight_decay=0.1),
    ),
    "adam": ({"name": "adam"}, lambda p: torch.optim.Adam(p, lr=0.01)),
    "adam with decay": (
        {"name": "adam", "weight_decay": 0.1, "betas": (0.8, 0.95)},
        lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1, betas=(0.8, 0.95)),
    ),
    "amsgrad": (
        {"name": "amsgrad", "betas": (0.5, 0.5)},
        lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, betas=(0.5, 0.5)),
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_twenty_steps_are_torchs(name: str) -> None:
    settings, make = OPTIMIZERS[name]
    optimizer, draw = Optimizer(**settings), np.random.default_rng(0)
    start = draw.normal(scale=0.05, size=SIZE).astype(np.float32)
    w, reference = start.copy(), torch.tensor(start, dtype=torch.float64, requires_grad=True)
    descent = make_descent(optimizer, [np.zeros(SIZE, np.float32) for _ in range(rows_needed(optimizer))])
    theirs = make([reference])
    for turn in range(20):
        g = (draw.normal(size=SIZE) * 0.5**turn).astype(np.float32)  # smaller and smaller: the largest moment matters
        descent.step(w, g.copy(), 0.5, 0.01)
        reference.grad = 0.5 * torch.tensor(g, dtype=torch.float64)
        theirs.step()
    moved = reference.detach().numpy() - start
    assert np.abs(w - start - moved).max() < 1e-5 * np.abs(moved).max()
    assert np.abs(moved).min() > 0


def test_signs_of_weights_are_added() -> None:
    w, g = np.array([-2.0, 0.0, 3.0], np.float32), np.ones(3, np.float32)
    add_signs(w, g, 0.25)
    assert g.tolist() == [0.75, 1.0, 1.25]


def net() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(2, 5, 3, bias=False), nn.Tanh(), nn.AvgPool2d(2), nn.Flatten()),
        *(nn.Linear(45, 19), nn.Tanh(), nn.Linear(19, 3, bias=False)),
    )


@pytest.mark.parametrize("optimizer", [{"name": "adam", "lr": 0.003}, {"name": "amsgrad", "lr": 0.003}, {"lr": 0.05}])
@pytest.mark.parametrize("more", [{}, {"l1": 0.01}, {"clip": 0.05}, {"l1": 0.01, "clip": 0.05}])
@pytest.mark.parametrize("objective", [TaskLoss(), Proximal(0.5)])
def test_clients_train_alike_by_both_kernels(optimizer: dict[str, Any], more: dict[str, Any], objective: Any) -> None:
    """What fills rows up must not move: Adam would make whole steps of the smallest rounding there."""
    data = rows((2, 8, 8), 50)
    settings = LocalSettings(epochs=5, batch_size=16, optimizer=optimizer, **more)
    (mine, facts), (theirs, plain) = (
        trained(Work(settings, objective), seeded(net), data, kernel) for kernel in ("compiled", "torch")
    )
    assert error(mine, theirs) < 1e-4
    assert facts["steps"] == plain["steps"] == 20
    losses = [header["facts"]["loss"] for header in (facts, plain)]  # type: ignore[index]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_an_optimizer_begins_anew_in_every_round() -> None:
    data, start = rows((2, 8, 8), 50), seeded(net)
    settings = LocalSettings(epochs=2, batch_size=16, optimizer={"name": "amsgrad", "lr": 0.003})
    (first, _), (again, _) = (trained(Work(settings, TaskLoss()), start, data, "compiled") for _ in range(2))
    assert all(first[name].equal(again[name]) for name in first)

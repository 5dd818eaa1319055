"""Our optimiser steps against `torch.optim`, step by step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fedfuse.core.settings import LocalSettings, Optimizer
from fedfuse.training.optimizers import log_variance_step, shape_gradients, stepper

OURS_AND_THEIRS: list[tuple[dict[str, Any], Callable[[list[Tensor]], torch.optim.Optimizer]]] = [
    ({"lr": 0.1}, lambda p: torch.optim.SGD(p, lr=0.1)),
    ({"lr": 0.1, "momentum": 0.9}, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    ({"lr": 0.1, "weight_decay": 0.01}, lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.01)),
    (
        {"lr": 0.05, "momentum": 0.5, "weight_decay": 0.1},
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.5, weight_decay=0.1),
    ),
    ({"name": "adam", "lr": 0.01}, lambda p: torch.optim.Adam(p, lr=0.01)),
    (
        {"name": "adam", "lr": 0.01, "weight_decay": 0.1, "betas": (0.5, 0.9)},
        lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1, betas=(0.5, 0.9)),
    ),
    ({"name": "amsgrad", "lr": 0.01}, lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True)),
    (
        {"name": "amsgrad", "lr": 0.01, "weight_decay": 0.1},
        lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1, amsgrad=True),
    ),
]


def gradients(draw: torch.Generator, params: list[Tensor], step: int) -> list[Tensor]:
    """Gradients whose size falls, so that AMSGrad's memory of the largest one matters."""
    return [torch.randn(p.shape, generator=draw, dtype=p.dtype) * 10 ** (-step / 4) for p in params]


@pytest.mark.parametrize(("ours", "theirs"), OURS_AND_THEIRS, ids=lambda v: str(v) if isinstance(v, dict) else "")
def test_every_step_is_that_of_torch_optim(
    ours: dict[str, Any], theirs: Callable[[list[Tensor]], torch.optim.Optimizer]
) -> None:
    draw = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=draw, dtype=torch.float64) for shape in ((3, 4), (5,), ())]
    mine, reference = [p.clone() for p in start], [p.clone().requires_grad_() for p in start]
    step, optimiser = stepper(Optimizer(**ours)), theirs(reference)  # type: ignore[arg-type]
    for t in range(12):
        grads = gradients(draw, start, t)
        for p, g in zip(reference, grads, strict=True):
            p.grad = g.clone()
        optimiser.step()
        step(mine, [g.clone() for g in grads], ours["lr"])
        for a, b in zip(mine, reference, strict=True):
            assert torch.allclose(a, b.detach(), rtol=1e-12, atol=1e-14)


def test_the_rate_may_change_between_steps() -> None:
    mine, reference = [torch.ones(2)], [torch.ones(2, requires_grad=True)]
    step, optimiser = stepper(Optimizer(momentum=0.9)), torch.optim.SGD(reference, lr=1.0, momentum=0.9)
    for rate in (0.1, 0.01, 0.001):
        optimiser.param_groups[0]["lr"] = rate
        reference[0].grad = torch.tensor([1.0, -2.0])
        optimiser.step()
        step(mine, [torch.tensor([1.0, -2.0])], rate)
    assert torch.allclose(mine[0], reference[0].detach(), rtol=0, atol=1e-7)


def test_buffers_do_not_survive_a_round() -> None:
    """A fresh stepper has forgotten; the same one has not."""
    settings = Optimizer(momentum=0.9)
    once, twice = [torch.zeros(1)], [torch.zeros(1)]
    same = stepper(settings)
    for _ in range(2):
        stepper(settings)(once, [torch.ones(1)], 1.0)
        same(twice, [torch.ones(1)], 1.0)
    assert once[0].item() == -2.0
    assert twice[0].item() == pytest.approx(-2.9)


def test_l1_adds_the_sign_of_the_weights() -> None:
    grads = [torch.zeros(3)]
    shape_gradients([torch.tensor([-2.0, 0.0, 0.5])], grads, LocalSettings(l1=0.25))
    assert grads[0].tolist() == [-0.25, 0.0, 0.25]


@pytest.mark.parametrize("limit", [0.5, 5.0, 50.0])
def test_clipping_is_that_of_torch(limit: float) -> None:
    shapes = ((3, 4), (7,))
    reference = [torch.zeros(s, requires_grad=True) for s in shapes]
    grads = [torch.randn(s, generator=torch.Generator().manual_seed(1)) for s in shapes]
    for p, g in zip(reference, grads, strict=True):
        p.grad = g.clone()
    torch.nn.utils.clip_grad_norm_(reference, limit)
    shape_gradients([p.detach() for p in reference], grads, LocalSettings(clip=limit))
    assert all(torch.allclose(g, p.grad, rtol=1e-5) for g, p in zip(grads, reference, strict=True))  # type: ignore[arg-type]


def test_l1_comes_before_clipping() -> None:
    grads = [torch.tensor([3.0])]
    shape_gradients([torch.tensor([1.0])], grads, LocalSettings(l1=1.0, clip=2.0))
    assert grads[0].item() == pytest.approx(2.0)


def test_log_variances_take_natural_gradient_steps_of_bounded_length() -> None:
    """With L = h σ²/2 + KL/n the step is −η (σ² (n h + 1) − 1): zero exactly at the posterior's variance."""
    n, h, rate = 50, 0.4, 0.1
    rho = torch.tensor([-6.0, -torch.tensor(n * h + 1).log().item(), 8.0], requires_grad=True)
    loss = (h * rho.exp() / 2 + (rho.exp() - 1 - rho) / (2 * n)).sum()
    (grad,) = torch.autograd.grad(loss, [rho])
    moved = rho.detach().clone()
    log_variance_step([moved], [grad], rate, n)
    expected = -rate * (rho.detach().exp() * (n * h + 1) - 1)
    assert torch.allclose(moved - rho.detach(), expected.clamp(-1, 1), atol=1e-6)
    assert (moved - rho.detach()).tolist() == pytest.approx(
        [rate * (1 - 21 * torch.tensor(-6.0).exp().item()), 0, -1], abs=1e-6
    )

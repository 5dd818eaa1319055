"""Methods on clients whose loss is quadratic, where everything has a closed form.

Client k's loss is f_k(w) = ½ (w − t_k)ᵀ H_k (w − t_k). Its rows are n_k copies of t_k, so every batch has the same
gradient and the number of rows is the client's num_examples. Everything is float64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedfuse.client.objectives import Proximal
from fedfuse.core.model import Single
from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import find_method
from fedfuse.core.rows import Rows
from fedfuse.core.seams import Batch, Objective
from fedfuse.core.settings import LocalSettings
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench, Local, ServerState
from fedfuse.engines.local import InProcess, Population
from fedfuse.methods.scaffold import Controlled
from fedfuse.server.loop import RunPlan, run

DIMENSION, RATE = 3, 0.1


class Point(nn.Module):
    """A network that is one vector of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(DIMENSION, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w


SPEC = Spec.of(Point())


@cache
def curvature(client: int) -> Tensor:
    """H_k: symmetric, eigenvalues from 0.5 up to about 4, different for every client."""
    root = torch.randn(DIMENSION, DIMENSION, generator=torch.Generator().manual_seed(client), dtype=torch.float64)
    return root @ root.T / DIMENSION + 0.5 * torch.eye(DIMENSION, dtype=torch.float64)


@dataclass(frozen=True, slots=True)
class Quadratic:
    """½ (w − t)ᵀ H (w − t), H by the client's label."""

    def __call__(self, local: Local, batch: Batch) -> Tensor:
        away = local.live["w"] - batch[0].mean(0)
        return away @ curvature(int(batch[1][0])) @ away / 2


@dataclass(frozen=True, slots=True)
class Slope:
    """⟨t, w⟩: the same gradient everywhere."""

    def __call__(self, local: Local, batch: Batch) -> Tensor:
        return local.live["w"] @ batch[0].mean(0)


@dataclass(frozen=True, slots=True)
class World:
    """Three clients with their targets, sizes and shares."""

    sizes: tuple[int, ...]

    @property
    def targets(self) -> list[Tensor]:
        draw = torch.Generator().manual_seed(42)
        return [3 * torch.randn(DIMENSION, generator=draw, dtype=torch.float64) for _ in self.sizes]

    @property
    def shares(self) -> list[float]:
        return [n / sum(self.sizes) for n in self.sizes]

    def rows(self) -> dict[str, Rows]:
        pairs = zip(self.sizes, self.targets, strict=True)
        return {f"c{k}": Rows(t.repeat(n, 1), torch.full((n,), k)) for k, (n, t) in enumerate(pairs)}

    def optimum(self) -> Tensor:
        """Where Σ f_k H_k (w − t_k) = 0."""
        parts = [(f, curvature(k), t) for k, (f, t) in enumerate(zip(self.shares, self.targets, strict=True))]
        return torch.linalg.solve(sum(f * h for f, h, _ in parts), sum(f * h @ t for f, h, t in parts))  # type: ignore[arg-type]

    def federate(self, recipe: Recipe, rounds: int, start: Tensor | None = None, **settings: Any) -> list[Tensor]:
        """The global model after every round."""
        local = LocalSettings.model_validate({"batch_size": 100, "optimizer": {"lr": RATE}} | settings)
        bench = Bench(population=len(self.sizes), local=local)
        begin = torch.zeros(DIMENSION, dtype=torch.float64) if start is None else start
        state = ServerState(0, replace(Single.of(Point(), SPEC), posterior=Single.of(at(begin), SPEC).posterior))
        population = Population.of(self.rows())
        plan = RunPlan(rounds, enrolled=population.sizes())
        records = run(recipe, InProcess(population), bench, None, state, plan)
        return [r.state.single.posterior.mean["w"] for r in records]


def at(w: Tensor) -> Point:
    point = Point()
    point.w.data.copy_(w)
    return point


def made(name: str, objective: Objective | None = None, **options: Any) -> Recipe:
    """A method whose clients have quadratic losses."""
    return replace(find_method(name).recipe(**options), objective=objective or Quadratic())


def descended(h: Tensor, target: Tensor, start: Tensor, steps: int) -> Tensor:
    """Gradient descent in closed form: t + (I − ηH)^τ (w₀ − t)."""
    shrink = torch.linalg.matrix_power(torch.eye(len(h), dtype=h.dtype) - RATE * h, steps)
    return target + shrink @ (start - target)


def close(a: Tensor, b: Tensor, tolerance: float = 1e-10) -> bool:
    return torch.allclose(a, b, rtol=0, atol=tolerance)


WORLD, EQUAL = World((10, 30, 60)), World((10, 10, 10))
START = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)


def biased(world: World, steps: int) -> Tensor:
    """FedAvg's fixed point: (I − Σ f A_k) w = Σ f (I − A_k) t_k with A_k = (I − ηH_k)^τ."""
    one = torch.eye(DIMENSION, dtype=torch.float64)
    a = [torch.linalg.matrix_power(one - RATE * curvature(k), steps) for k in range(len(world.sizes))]
    left = one - sum(f * ak for f, ak in zip(world.shares, a, strict=True))
    right = sum(f * (one - ak) @ t for f, ak, t in zip(world.shares, a, world.targets, strict=True))
    return torch.linalg.solve(left, right)  # type: ignore[arg-type]


def test_a_round_of_fedavg_is_the_mean_of_closed_forms() -> None:
    ends = [descended(curvature(k), t, START, 5) for k, t in enumerate(WORLD.targets)]
    expected = sum(f * w for f, w in zip(WORLD.shares, ends, strict=True))
    assert close(WORLD.federate(made("fedavg"), 1, START, epochs=5)[0], expected)  # type: ignore[arg-type]


def test_fedavg_with_one_step_reaches_the_optimum_and_with_many_stalls_beside_it() -> None:
    assert close(WORLD.federate(made("fedavg"), 150)[-1], WORLD.optimum(), 1e-4)
    stalled = WORLD.federate(made("fedavg"), 25, epochs=10)[-1]
    assert close(stalled, biased(WORLD, 10), 1e-6)
    assert close(WORLD.federate(made("fedavg"), 1, biased(WORLD, 10), epochs=10)[0], biased(WORLD, 10))
    assert (stalled - WORLD.optimum()).norm() > 0.05


@pytest.mark.parametrize("mu", [0.0, 0.5, 4.0])
def test_fedprox_descends_on_the_loss_with_its_quadratic_term(mu: float) -> None:
    """Its local loss has curvature H + μI and its minimum at (H + μI)⁻¹ (H t + μ w₀), between t and w₀."""
    ends = []
    for k, t in enumerate(WORLD.targets):
        h = curvature(k) + mu * torch.eye(DIMENSION, dtype=torch.float64)
        ends.append(descended(h, torch.linalg.solve(h, curvature(k) @ t + mu * START), START, 7))
    expected = sum(f * w for f, w in zip(WORLD.shares, ends, strict=True))
    got = WORLD.federate(made("fedprox", Proximal(mu, Quadratic()), mu=mu), 1, START, epochs=7)[0]
    assert close(got, expected)  # type: ignore[arg-type]


def test_fedprox_pulls_towards_the_global_model() -> None:
    lone = World((10,))
    ways = [
        (lone.federate(made("fedprox", Proximal(mu, Quadratic())), 1, START, epochs=100)[0] - START).norm().item()
        for mu in (0.0, 0.1, 1.0, 5.0)
    ]
    assert ways == sorted(ways, reverse=True)
    h, mu = curvature(0), 1.0
    rest = torch.linalg.solve(h + mu * torch.eye(DIMENSION), h @ lone.targets[0] + mu * START)
    stationary = lone.federate(made("fedprox", Proximal(mu, Quadratic())), 1, START, epochs=200)[0]
    assert close(stationary, rest, 1e-8)
    assert close(h @ (stationary - lone.targets[0]) + mu * (stationary - START), torch.zeros(DIMENSION).double(), 1e-8)


def momentum_walk(gradient: Callable[[Tensor], Tensor], start: Tensor, steps: int, rho: float) -> Tensor:
    w, velocity = start, torch.zeros_like(start)
    for _ in range(steps):
        velocity = rho * velocity + gradient(w)
        w = w - RATE * velocity
    return w


@pytest.mark.parametrize("rho", [0.0, 0.9])
def test_fednova_with_unequal_steps_and_momentum_is_the_published_formula(rho: float) -> None:
    """Sizes 10, 30, 60 in batches of 10 make 2, 6 and 12 steps in two epochs."""
    steps = [2, 6, 12]
    ends = [
        momentum_walk(lambda w, k=k, t=t: curvature(k) @ (w - t), START, tau, rho)  # type: ignore[misc]
        for (k, t), tau in zip(enumerate(WORLD.targets), steps, strict=True)
    ]
    a = [(tau - rho * (1 - rho**tau) / (1 - rho)) / (1 - rho) for tau in steps]
    reach = sum(f * ai for f, ai in zip(WORLD.shares, a, strict=True))
    mean_walk = sum(f * (START - w) / ai for f, w, ai in zip(WORLD.shares, ends, a, strict=True))
    optimizer = {"lr": RATE, "momentum": rho}
    got = WORLD.federate(made("fednova"), 1, START, epochs=2, batch_size=10, optimizer=optimizer)[0]
    assert close(got, START - reach * mean_walk)


@pytest.mark.parametrize("rho", [0.0, 0.9])
def test_fednova_moves_along_the_mean_gradient_however_often_clients_step(rho: float) -> None:
    """With constant gradients g_k: w = w₀ − η τ_eff Σ f_k g_k, while FedAvg leans towards who steps most."""
    optimizer = {"lr": RATE, "momentum": rho}
    got, plain = (
        WORLD.federate(made(name, Slope()), 1, START, epochs=2, batch_size=10, optimizer=optimizer)[0]
        for name in ("fednova", "fedavg")
    )
    mean_gradient = sum(f * t for f, t in zip(WORLD.shares, WORLD.targets, strict=True))
    moved = START - got
    assert close(moved / moved.norm(), mean_gradient / mean_gradient.norm(), 1e-9)  # type: ignore[union-attr]
    assert not close((START - plain) / (START - plain).norm(), moved / moved.norm(), 0.01)


def scaffold_by_hand(world: World, rounds: int, steps: int, start: Tensor) -> list[Tensor]:
    """Option II with zero start, written out."""
    w, c = start, torch.zeros_like(start)
    own = [torch.zeros_like(start) for _ in world.sizes]
    seen = []
    for _ in range(rounds):
        ends, deltas = [], []
        for k, t in enumerate(world.targets):
            y = w
            for _ in range(steps):
                y = y - RATE * (curvature(k) @ (y - t) - own[k] + c)
            new = own[k] - c + (w - y) / (RATE * steps)
            ends.append(y)
            deltas.append(new - own[k])
            own[k] = new
        w = sum(f * y for f, y in zip(world.shares, ends, strict=True))  # type: ignore[assignment]
        c = c + sum(deltas) / len(world.sizes)
        seen.append(w)
    return seen


def test_scaffold_is_the_published_algorithm_round_by_round() -> None:
    got = WORLD.federate(made("scaffold", Controlled(Quadratic())), 5, START, epochs=4)
    by_hand = scaffold_by_hand(WORLD, 5, 4, START)
    assert all(close(a, b, 1e-9) for a, b in zip(got, by_hand, strict=True))


@pytest.mark.parametrize(
    "settings",
    [
        {"epochs": 10},
        {"epochs": 10, "optimizer": {"lr": RATE / 2, "momentum": 0.5}},
        {"epochs": 10, "decay": {"gamma": 0.5, "every": 4}},  # the variate divides by the rates really used
    ],
)
def test_scaffold_reaches_the_optimum_where_fedavg_stalls(settings: dict[str, Any]) -> None:
    scaffold = made("scaffold", Controlled(Quadratic()))
    assert close(EQUAL.federate(scaffold, 60, **settings)[-1], EQUAL.optimum(), 1e-6)
    stalled = EQUAL.federate(made("fedavg"), 20, EQUAL.optimum(), **settings)[-1]
    assert (stalled - EQUAL.optimum()).norm() > 0.05


@pytest.mark.parametrize("rho", [0.0, 0.9])
def test_fednova_with_equal_steps_is_fedavg(rho: float) -> None:
    optimizer = {"lr": RATE / 4, "momentum": rho}
    nova, avg = (WORLD.federate(made(n), 3, START, epochs=4, optimizer=optimizer) for n in ("fednova", "fedavg"))
    assert all(close(a, b, 1e-12) for a, b in zip(nova, avg, strict=True))

import itertools

import numpy as np
import pytest
import scipy.optimize
import torch

from fedfuse.errors import ConfigError, NotConverged
from fedfuse.linalg.assign import match, match_each, sinkhorn


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("n", "m"), [(4, 4), (3, 5), (5, 3), (1, 1)])
@pytest.mark.parametrize("maximize", [False, True])
def test_matching_equals_brute_force(n: int, m: int, maximize: bool) -> None:
    cost = normal(n, m)
    wide = cost if n <= m else cost.T
    totals = [
        sum(float(wide[i, j]) for i, j in enumerate(p)) for p in itertools.permutations(range(max(n, m)), min(n, m))
    ]
    found = match(cost, maximize=maximize)
    assert found.total == pytest.approx(max(totals) if maximize else min(totals), abs=1e-5)
    assert found.total == pytest.approx(float(cost[found.rows, found.cols].sum()), abs=1e-5)
    assert len(found.rows) == min(n, m) == len(set(found.cols.tolist()))


def test_a_shuffled_copy_is_put_back_in_order() -> None:
    mine = normal(6, 10)
    shuffle = torch.tensor([3, 0, 5, 1, 4, 2])
    other = mine[shuffle] + 0.01 * normal(6, 10, seed=1)
    p = match(torch.cdist(mine, other)).cols
    assert torch.equal(shuffle[p], torch.arange(6))
    assert torch.allclose(other[p], mine, atol=0.1)


@pytest.mark.parametrize("bad", [torch.tensor([1.0]), torch.tensor([[torch.nan]]), torch.tensor([[torch.inf]])])
def test_costs_must_be_finite_matrices(bad: torch.Tensor) -> None:
    with pytest.raises(ConfigError, match="expected a matrix of finite numbers"):
        match(bad)
    with pytest.raises(ConfigError, match="expected a matrix of finite numbers"):
        sinkhorn(bad)


def test_plans_have_their_marginals_and_gibbs_form() -> None:
    cost = normal(5, 7).abs().double()
    a, b = torch.rand(5, generator=torch.Generator().manual_seed(1)).double(), torch.ones(7).double()
    a, b = 3 * a / a.sum(), 3 * b / b.sum()
    found = sinkhorn(cost, a, b, reg=0.1)
    assert torch.allclose(found.plan.sum(1), a, atol=1e-8)
    assert torch.allclose(found.plan.sum(0), b, atol=1e-8)
    potentials = 0.1 * found.plan.log() + cost  # f_i + g_j: no interaction is left after double centring
    centred = potentials - potentials.mean(1, keepdim=True) - potentials.mean(0) + potentials.mean()
    assert torch.allclose(centred, torch.zeros(5, 7).double(), atol=1e-9)
    assert found.error <= 3e-9


def test_a_cold_plan_costs_what_linear_programming_finds() -> None:
    cost = normal(4, 6).abs().double()
    a, b = torch.full((4,), 1 / 4).double(), torch.full((6,), 1 / 6).double()
    rows = np.kron(np.eye(4), np.ones((1, 6)))
    cols = np.kron(np.ones((1, 4)), np.eye(6))
    best = scipy.optimize.linprog(
        cost.flatten().numpy(), A_eq=np.vstack([rows, cols]), b_eq=np.concatenate([a.numpy(), b.numpy()])
    ).fun
    found = sinkhorn(cost, reg=0.005, tol=1e-7, max_iters=50_000)
    assert best - 1e-6 <= float((found.plan * cost).sum()) <= best + 0.005 * np.log(24)


def test_a_cold_square_plan_is_the_assignment() -> None:
    cost = normal(6, 6)
    plan = sinkhorn(cost, reg=0.01, tol=1e-6, max_iters=50_000).plan
    assert torch.equal(plan.argmax(1), match(cost).cols)
    assert plan.max(1).values.min() > 0.9 / 6


def test_a_hot_plan_is_independence_and_empty_units_stay_empty() -> None:
    a, b = torch.tensor([0.0, 0.3, 0.7]).double(), torch.tensor([0.5, 0.5, 0.0]).double()
    plan = sinkhorn(normal(3, 3), a, b, reg=1e6).plan
    assert torch.allclose(plan, a[:, None] * b, atol=1e-6)
    assert not plan[0].any()
    assert not plan[:, 2].any()


def test_tiny_temperatures_do_not_underflow() -> None:
    plan = sinkhorn(torch.tensor([[0.0, 1e4], [1e4, 0.0]]), reg=1e-3).plan
    assert torch.allclose(plan, torch.eye(2).double() / 2)


def test_bad_masses_and_short_breath_are_explained() -> None:
    cost = normal(3, 3)
    with pytest.raises(ConfigError, match="rows weigh 3 and columns 1"):
        sinkhorn(cost, rows=torch.ones(3))
    with pytest.raises(ConfigError, match="expected 3 finite numbers of at least 0"):
        sinkhorn(cost, rows=torch.tensor([1.0, -1.0, 1.0]))
    with pytest.raises(ConfigError, match="positive reg"):
        sinkhorn(cost, reg=0.0)
    with pytest.raises(NotConverged, match=r"layer 2: row masses are off by .* after 3 sweeps"):
        sinkhorn(cost, reg=0.01, max_iters=3, what="layer 2")


def test_several_assignments_are_those_of_each() -> None:
    gains = torch.randn(5, 6, 6, generator=torch.Generator().manual_seed(0))
    each = torch.stack([match(gain, maximize=True).cols for gain in gains])
    assert match_each(gains).equal(each)
    assert match_each(gains[:0]).shape == (0, 6)
    for bad in (gains[0], gains[:, :2], torch.full((1, 2, 2), torch.nan)):
        with pytest.raises(ConfigError, match="match_each"):
            match_each(bad)

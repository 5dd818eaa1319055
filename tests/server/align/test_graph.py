"""Joint matching: its score against brute force, and never below pairwise matching's."""

from __future__ import annotations

from itertools import combinations, permutations, product

import pytest
import torch
from torch import Tensor

from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench
from fedfuse.errors import ConfigError
from fedfuse.nets.channels import channel_groups, placed
from fedfuse.server.align.graph import ByGraph, joint_score
from fedfuse.server.align.nets import Moves, Net
from fedfuse.server.align.weights import ByWeights

SMALL = Spec("mlp", {"inputs": 3, "hidden": [4], "classes": 2})
DEEP = Spec("mlp", {"inputs": 6, "hidden": [8, 7, 6], "classes": 3})


def nets(spec: Spec, count: int, noise: float = 1.0, seed: int = 0) -> list[Net]:
    """Noisy permuted copies of one network."""
    draw = torch.Generator().manual_seed(seed)
    forms = {n: t.shape for n, t in spec.build().state_dict().items()}
    common = {n: torch.randn(shape, generator=draw) for n, shape in forms.items()}
    groups = channel_groups(spec, (spec.options["inputs"],))
    found = []
    for k in range(count):
        own = {n: t + noise * torch.randn(t.shape, generator=draw) for n, t in common.items()}
        own = placed(own, {g: torch.randperm(g.size, generator=draw) for g in groups})
        found.append(Net(f"c{k}", spec, groups, own))
    return found


def by_hand(every: list[Net], moves: list[Moves]) -> float:
    hidden = {p.tensor for g in every[0].groups for p in g.places}
    there = [
        placed(n.params, {g: o for g in n.groups if isinstance(o := m.get(g.name), Tensor)})
        for n, m in zip(every, moves, strict=True)
    ]
    return sum(float((a[n] * b[n]).sum()) for a, b in combinations(there, 2) for n in hidden)


def test_the_score_is_the_sum_over_pairs() -> None:
    every = nets(DEEP, 4)
    draw = torch.Generator().manual_seed(1)
    moves: list[Moves] = [{g.name: torch.randperm(g.size, generator=draw) for g in n.groups} for n in every]
    assert joint_score(every, moves) == pytest.approx(by_hand(every, moves), rel=1e-4)


@pytest.mark.parametrize("seed", range(4))
def test_three_small_networks_are_ordered_as_brute_force_orders_them(seed: int) -> None:
    first, *rest = every = nets(SMALL, 3, noise=0.7, seed=seed)
    found = ByGraph()(rest, first, Bench())
    orders = [torch.tensor(p) for p in permutations(range(4))]
    best = max(joint_score(every, [{}, {"fc1": a}, {"fc1": b}]) for a, b in product(orders, orders))
    assert joint_score(every, [{}, *found]) == pytest.approx(best, rel=1e-5)


@pytest.mark.parametrize("noise", [0.3, 1.0, 3.0])
def test_the_score_never_falls_below_pairwise_matchings(noise: float) -> None:
    better = 0
    for seed in range(2):
        first, *rest = every = nets(DEEP, 4, noise=noise, seed=seed)
        pairwise = joint_score(every, [{}, *ByWeights()(rest, first, Bench())])
        jointly = joint_score(every, [{}, *ByGraph()(rest, first, Bench())])
        assert jointly >= pairwise - 1e-4
        better += jointly > pairwise + 1e-3
    assert better or noise == 0.3, "with noise the others help to find one's place"


def test_temperatures_fall() -> None:
    for hot, cold, cooling in [(0.1, 0.5, 0.5), (0.5, 0.0, 0.5), (0.5, 0.1, 1.0), (0.5, 0.1, 0.0)]:
        with pytest.raises(ConfigError, match="0 < cold ≤ hot"):
            ByGraph(hot, cold, cooling)

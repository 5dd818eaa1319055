"""Matching by weights against every order there is."""

from __future__ import annotations

from itertools import permutations, product

import pytest
import torch
from torch import Tensor, nn

from builders import net_of
from fedfuse.core.params import Params, squared_distance
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench
from fedfuse.errors import ConfigError
from fedfuse.nets.channels import Group, move_units
from fedfuse.server.align.nets import Moves, Net
from fedfuse.server.align.weights import ByWeights, WeightMatching, best_order, wiring


def moved(one: Net, moves: Moves) -> Params:
    return move_units(one.params, {g: o for g in one.groups if isinstance(o := moves[g.name], Tensor)})


def nearest(one: Net, target: Net) -> float:
    """The least squared distance over all orders of all groups, by trying them."""
    tries = product(*(permutations(range(g.size)) for g in one.groups))
    return min(
        squared_distance(move_units(one.params, dict(zip(one.groups, orders, strict=True))), target.params)
        for orders in tries
    )


@pytest.mark.parametrize("seed", range(5))
def test_one_hidden_layer_is_matched_exactly(seed: int) -> None:
    spec = Spec("mlp", {"inputs": 3, "hidden": [5], "classes": 2})
    target, one = net_of(spec, (3,), seed), net_of(spec, (3,), seed + 100)
    (found,) = ByWeights()([one], target, Bench())
    assert squared_distance(moved(one, found), target.params) == pytest.approx(nearest(one, target), rel=1e-6)


def test_two_hidden_layers_end_where_no_layer_can_do_better_and_near_the_best() -> None:
    spec = Spec("mlp", {"inputs": 3, "hidden": [4, 4], "classes": 2})
    best, got, plain = 0.0, 0.0, 0.0
    for seed in range(3):
        target, one = net_of(spec, (3,), seed), net_of(spec, (3,), seed + 100)
        (found,) = ByWeights()([one], target, Bench())
        here = moved(one, found)
        distance = squared_distance(here, target.params)
        for group in one.groups:
            others = [squared_distance(move_units(here, {group: p}), target.params) for p in permutations(range(4))]
            assert distance <= min(others) + 1e-5
        best, got, plain = (
            best + nearest(one, target),
            got + distance,
            plain + squared_distance(one.params, target.params),
        )
    assert best <= got <= best + 0.2 * (plain - best)


def test_the_distance_never_grows() -> None:
    """A network near its reference stays as it is, where matching layer by layer might lose it."""
    spec = Spec("lenet", {"size": 8, "hidden": [12]})
    target = net_of(spec, (1, 8, 8), 0)
    for noise in (0.1, 1.0, 3.0):
        extra = net_of(spec, (1, 8, 8), 5).params
        one = Net("c", spec, target.groups, {n: t + noise * extra[n] for n, t in target.params.items()})
        (found,) = ByWeights()([one], target, Bench())
        assert squared_distance(moved(one, found), target.params) <= squared_distance(one.params, target.params) + 1e-4
        if noise == 0.1:
            assert all(isinstance(o, Tensor) and o.equal(torch.arange(len(o))) for o in found.values())


class Recurrent(nn.Module):
    """A layer that reads what it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.again, self.out = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x).relu()
        return self.out(x + self.again(self.again(x).relu()).relu())


def test_a_layer_that_reads_what_it_makes_only_moves_for_the_better() -> None:
    spec = Spec.of(Recurrent())
    target = net_of(spec, (3,), 0)
    (group,) = target.groups
    beside = {place: {name for _, name in stands} for place, stands in wiring(target.groups)[group.name].items()}
    assert all(group.name in names for place, names in beside.items() if "again.w" in place.tensor)
    copy = Net("copy", spec, target.groups, move_units(target.params, {group: [2, 3, 1, 0]}))
    assert squared_distance(moved(copy, ByWeights()([copy], target, Bench())[0]), target.params) < 1e-10
    for seed in range(10, 16):
        one = net_of(spec, (3,), seed)
        board = WeightMatching.of(target.matched_tensors(), [one.matched_tensors()], one.groups)
        before = float(board.scores())
        board.climb(50)
        assert float(board.scores()) >= before - 1e-5


class Walled(nn.Module):
    """Channels side by side, read by a convolution in two groups, and a flatten."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Conv2d(1, 3, 1), nn.Conv2d(1, 4, 1)
        self.both, self.grouped = nn.Conv2d(7, 6, 1), nn.Conv2d(6, 4, 1, groups=2)
        self.out = nn.Linear(4 * 4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.both(torch.cat([self.left(x), self.right(x)], 1).relu()).relu()
        return self.out(self.grouped(x).relu().flatten(1))


def alike(group: Group, target: Params, here: Params) -> Tensor:
    """How alike the units of two networks are as they stand."""
    some = [p.rows(target, group.size) @ p.rows(here, group.size).mT for p in group.locations if p.tensor in target]
    return torch.stack(some).sum(0)


@pytest.mark.parametrize("network", ["walls", "lenet"])
def test_gains_and_scores_are_those_of_networks_really_moved(network: str) -> None:
    spec, side = (Spec.of(Walled()), 2) if network == "walls" else (Spec("lenet", {"size": 8, "hidden": [12]}), 8)
    target, *some = (net_of(spec, (1, side, side), seed) for seed in range(4))
    told, groups, draw = target.matched_tensors(), target.groups, torch.Generator().manual_seed(0)
    board, everybody = WeightMatching.of(told, [one.matched_tensors() for one in some], groups), [0, 1, 2]
    for first in range(3):  # all are moved, then some of them
        for group in groups:
            walls = torch.arange(group.size).chunk(group.sections)
            orders = [torch.cat([w[torch.randperm(len(w), generator=draw)] for w in walls]) for _ in some[first:]]
            board.set_orders(group, everybody[first:], torch.stack(orders))
        for k, one in enumerate(some):
            here = move_units(one.matched_tensors(), {g: board.orders[g.name][k] for g in groups})
            score = torch.stack([(told[n] * t).sum() for n, t in here.items()]).sum()
            assert float(board.scores()[k]) == pytest.approx(float(score), abs=1e-4)
            for group in groups:
                gains = board.gains(group, everybody)[k][:, board.orders[group.name][k]]
                assert torch.allclose(gains, alike(group, told, here), atol=1e-4)


def test_rooms_keep_their_units() -> None:
    gain = torch.tensor([[0.0, 1.0, 9.0, 9.0], [1.0, 0.0, 9.0, 9.0], [9.0, 9.0, 1.0, 0.0], [9.0, 9.0, 0.0, 1.0]])
    assert best_order(gain, sections=2).tolist() == [1, 0, 2, 3]


def test_no_sweep_is_no_matching() -> None:
    with pytest.raises(ConfigError, match="sweeps is 0"):
        ByWeights(0)

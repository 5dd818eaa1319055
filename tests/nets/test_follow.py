"""Following positions: what odd networks bind, what pins units, and what is named because it cannot move."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedfuse.core.spec import Spec, drop_tied_names
from fedfuse.nets.channels import Location, channel_groups, move_units, units_left_out
from fedfuse.nets.follow import ANY, FIXED, Bindings, follow
from odd_networks import ODD, Cumulative, Language, Odd, Vision


def weights_of(spec: Spec) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(3)
    return {
        n: torch.rand(t.shape, generator=draw, dtype=torch.float64) if t.is_floating_point() else t
        for n, t in spec.build().state_dict().items()
    }


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
def test_units_of_odd_networks_move_and_nothing_is_noticed(odd: Odd) -> None:
    spec = Spec.of(odd.module.double())
    groups, weights = channel_groups(spec, odd.shape), weights_of(spec)
    assert [(g.size, g.sections) for g in groups] == odd.sizes
    assert units_left_out(spec, odd.shape) == ()
    x = torch.randn(3, *odd.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x = (x > 0).long() if isinstance(odd.module, Language) else x
    moves = {}
    for group in groups:
        room = group.size // group.sections
        moves[group] = torch.cat([torch.arange(room).roll(1) + k * room for k in range(group.sections)])
    moved = move_units(weights, moves)
    net = spec.build().eval()
    one, other = (torch.func.functional_call(net, drop_tied_names(spec, w), (x,)) for w in (weights, moved))
    assert torch.allclose(one, other, rtol=1e-9)
    assert any(not weights[n].equal(moved[n]) for n in weights)


def test_heads_are_blocks_of_queries_keys_and_values() -> None:
    _, heads, _ = channel_groups(Vision(3), (5, 4))
    assert heads.locations == (
        *(Location("qkv.weight", 0, per=4, offset=o) for o in (0, 12, 24)),
        *(Location("qkv.bias", 0, per=4, offset=o) for o in (0, 12, 24)),
        Location("join.weight", 1, per=4, reads=True),
    )


def test_what_an_operation_tells_apart_is_left_out_by_name() -> None:
    assert units_left_out(Cumulative(), (4,)) == ("enter.weight (cumsum)",)
    assert [g.name for g in channel_groups(Cumulative(), (4,))] == ["hidden"]


def test_what_the_answer_does_not_need_binds_nothing() -> None:
    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.out = nn.Linear(3, 4), nn.Linear(3, 4), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            one, other = self.a(x), self.b(x)
            torch.stack([one, other]).cumsum(-1)
            return self.out(torch.cat([one, other], 1))

    assert [g.size for g in channel_groups(Idle(), (3,))] == [4, 4]


def test_bindings_are_sets_and_reasons_stay_with_them() -> None:
    bindings = Bindings()
    a, b, c = (bindings.fresh(2) for _ in range(3))
    bindings.pin(b[:1], "cumsum")
    bindings.bind(a, b)
    assert np.array_equal(bindings.bind(b, c), b)
    assert len({bindings.root(int(labels[0])) for labels in (a, b, c)}) == 1
    assert bindings.pins(int(c[0])) == {"cumsum"}
    assert not bindings.pins(int(c[1]))


def test_an_axis_meets_positions_and_constants() -> None:
    bindings = Bindings()
    units = bindings.fresh(2)
    assert np.array_equal(bindings.bind(np.full(2, ANY), units), units)
    assert not bindings.pins(int(units[0]))
    bindings.bind(units, np.full(2, FIXED))
    assert bindings.pins(int(units[0])) == {"bound to positions"}


def test_nothing_of_the_process_is_left_changed() -> None:
    before = torch.backends.mha.get_fastpath_enabled()
    follow(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)).double(), torch.ones(1, 2, dtype=torch.float64))
    assert torch.backends.mha.get_fastpath_enabled() == before

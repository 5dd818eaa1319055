"""What is aligned: where inputs' shapes come from, and units of grouped convolutions and concatenations blended."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fedfuse.core.inputs import InputForm
from fedfuse.core.rows import Rows
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench
from fedfuse.errors import ConfigError
from fedfuse.nets.channels import channel_groups, placed
from fedfuse.server.align.nets import Coupling, blended, input_shape


def test_the_shape_of_an_input_is_found_wherever_it_is_known() -> None:
    lenet = Spec("lenet", {"channels": 3, "size": 20})
    rows = Rows(torch.zeros(2, 3, 24, 24), torch.zeros(2, dtype=torch.long))
    assert input_shape(lenet, Bench(rows)) == (3, 24, 24)
    assert input_shape(lenet, Bench(unlabelled=rows.x)) == (3, 24, 24)
    assert input_shape(lenet, Bench(inputs=InputForm((3, 22, 22)))) == (3, 22, 22)
    assert input_shape(lenet, Bench()) == (3, 20, 20)
    assert input_shape(Spec("lenet"), Bench()) == (1, 28, 28)
    assert input_shape(Spec("resnet18", {"widths": 0.1}), Bench()) == (3, 32, 32)
    assert input_shape(Spec("bayesian", {"of": lenet.to_json()}), Bench()) == (3, 20, 20)
    assert input_shape(Spec.of(nn.Sequential(nn.Linear(7, 3))), Bench()) == (7,)
    with pytest.raises(ConfigError, match="nobody says what its inputs look like; give the server some rows"):
        input_shape(Spec.of(nn.Sequential(nn.Conv2d(1, 2, 3))), Bench())


class Odd(nn.Module):
    """Two branches joined, and a grouped convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Conv2d(2, 4, 1), nn.Conv2d(2, 3, 1)
        self.both, self.grouped = nn.Conv2d(7, 6, 1), nn.Conv2d(6, 4, 1, groups=2)
        self.out = nn.Linear(4 * 4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.both(torch.cat([self.left(x), self.right(x)], 1).relu()).relu()
        return self.out(self.grouped(x).flatten(1))


def test_blends_of_single_units_are_orders() -> None:
    spec = Spec.of(Odd())
    groups = channel_groups(spec, (2, 2, 2))
    draw = torch.Generator().manual_seed(0)
    params = {n: torch.randn(t.shape, generator=draw) for n, t in spec.build().state_dict().items()}
    orders = {}
    for group in groups:
        room = group.size // group.rooms
        orders[group] = torch.cat([k * room + torch.randperm(room, generator=draw) for k in range(group.rooms)])
    want = placed(params, orders)
    for soft in (False, True):
        eye = {g.name: torch.eye(g.size)[o] if soft else o for g, o in orders.items()}
        moves = {n: Coupling(m, m) if soft else m for n, m in eye.items()}
        got = blended(params, groups, moves)
        assert all(torch.allclose(got[n], want[n]) for n in want)

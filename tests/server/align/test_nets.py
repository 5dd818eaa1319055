"""What is aligned: units of grouped convolutions and concatenations blended."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedfuse.core.spec import Spec
from fedfuse.nets.channels import channel_groups, move_units
from fedfuse.server.align.nets import Coupling, blend_units


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
        room = group.size // group.sections
        orders[group] = torch.cat([k * room + torch.randperm(room, generator=draw) for k in range(group.sections)])
    want = move_units(params, orders)
    for soft in (False, True):
        eye = {g.name: torch.eye(g.size)[o] if soft else o for g, o in orders.items()}
        moves = {n: Coupling(m, m) if soft else m for n, m in eye.items()}
        got = blend_units(params, groups, moves)
        assert all(torch.allclose(got[n], want[n]) for n in want)

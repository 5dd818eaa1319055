"""The line between two networks: its ends are the networks, its barrier what a permutation can take away."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fedfuse.core.rows import Rows
from fedfuse.core.spec import Spec
from fedfuse.errors import ConfigError
from fedfuse.nets.channels import channel_groups, placed
from fedfuse.server.align.line import Line, straight_line

SPEC = Spec("vgg11", {"widths": 0.05, "hidden": [], "norm": True, "classes": 3})
ROWS = Rows(torch.randn(24, 3, 32, 32, generator=torch.Generator().manual_seed(0)), torch.arange(24) % 3)


def test_ends_are_the_networks_and_copies_are_apart_until_they_are_moved_back() -> None:
    torch.manual_seed(1)
    one = {
        n: t + 0.1 * torch.rand_like(t) if t.is_floating_point() else t for n, t in SPEC.build().state_dict().items()
    }
    draw = torch.Generator().manual_seed(2)
    groups = channel_groups(SPEC, (3, 32, 32))
    copy = placed(one, {g: torch.randperm(g.size, generator=draw) for g in groups})
    line = straight_line(SPEC, one, copy, ROWS, points=5)
    loss = float(F.cross_entropy(SPEC.forward(one, ROWS.x), ROWS.y))
    assert line.loss[[0, -1]].tolist() == pytest.approx([loss, loss], rel=1e-4)
    assert abs(float(line.loss[2]) - loss) > 1e-4
    assert straight_line(SPEC, one, one, ROWS, points=3).barrier == pytest.approx(0, abs=1e-6)
    assert straight_line(SPEC, one, copy, ROWS, 3, norms=ROWS).loss.isfinite().all()


def test_the_barrier_is_measured_from_the_chord() -> None:
    places = torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64)
    assert Line(places, torch.tensor([1.0, 2.5, 2.0], dtype=torch.float64), places).barrier == pytest.approx(1.0)
    with pytest.raises(ConfigError, match="a line of 1 points"):
        straight_line(SPEC, {}, {}, ROWS, points=1)

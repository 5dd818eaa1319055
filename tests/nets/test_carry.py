"""Remembered tensors follow a pruning, or nobody says they do."""

from __future__ import annotations

import pytest
import torch

from fedfuse.core.spec import Spec
from fedfuse.nets.channels import carry_over, channel_groups, keep_channels

SHAPE = (1, 8, 8)
NETS = [
    Spec("lenet", {"size": 8, "maps": [6, 8], "hidden": [10], "classes": 3}),
    Spec("resnet18", {"channels": 1, "widths": 0.1, "classes": 3}),
]


def some(size: int, share: float, seed: int) -> list[int]:
    count = max(1, int(size * share))
    return sorted(torch.randperm(size, generator=torch.Generator().manual_seed(seed))[:count].tolist())


@pytest.mark.parametrize("spec", NETS, ids=lambda spec: spec.factory)
def test_it_is_the_same_surgery_once_or_twice(spec: Spec) -> None:
    params = dict(spec.build().state_dict())
    first = {g: some(g.size, 0.7, i) for i, g in enumerate(channel_groups(spec, SHAPE))}
    small, weights = keep_channels(spec, params, first)
    second = {g: some(g.size, 0.7, i) for i, g in enumerate(channel_groups(small, SHAPE))}
    smaller, expected = keep_channels(small, weights, second)
    for remembered, before in ((params, {}), (weights, small.kept), (expected, smaller.kept)):
        moved = carry_over(remembered, before, smaller, SHAPE)
        assert moved is not None
        assert all(moved[n].equal(t) for n, t in expected.items())


def test_what_was_not_there_before_cannot_be_carried() -> None:
    spec = NETS[0]
    params = dict(spec.build().state_dict())
    (conv, *_) = channel_groups(spec, SHAPE)
    small, weights = keep_channels(spec, params, {conv: [0, 1]})
    other, _ = keep_channels(spec, params, {conv: [1, 2]})
    assert carry_over(weights, small.kept, other, SHAPE) is None
    assert carry_over(weights, {}, other, SHAPE) is None
    assert carry_over({"elsewhere": torch.ones(1)}, {}, small, SHAPE) is None
    assert carry_over(params, {}, small, (9, 9)) is None

"""What an input looks like."""

from __future__ import annotations

import torch

from fedfuse.core.inputs import InputForm


def test_any_numbers_are_brought_into_the_range_of_their_channel() -> None:
    form = InputForm((2, 3, 3), low=(-1.0, 10.0), high=(1.0, 14.0))
    x = form.squash(torch.randn(50, 2, 3, 3, generator=torch.Generator().manual_seed(0)) * 9)
    for channel, (low, high) in enumerate([(-1, 1), (10, 14)]):
        assert x[:, channel].min() >= low
        assert x[:, channel].max() <= high
    assert form.squash(torch.zeros(1, 2, 3, 3))[0, :, 0, 0].tolist() == [0.0, 12.0]


def test_features_have_ranges_too() -> None:
    form = InputForm((3,), low=(0.0, 0.0, -2.0), high=(1.0, 2.0, 0.0))
    assert form.squash(torch.zeros(1, 3)).tolist() == [[0.5, 1.0, -1.0]]


def test_noise_is_uniform_over_the_range() -> None:
    x = InputForm((1, 20, 20), (2.0,), (4.0,)).noise(20, torch.Generator().manual_seed(0))
    assert x.shape == (20, 1, 20, 20)
    assert abs(float(x.mean()) - 3) < 0.02
    assert abs(float(x.var()) - 4 / 12) < 0.01

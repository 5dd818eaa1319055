"""Elementwise kernels: tanh to the last bits, and dropout's masks."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from plain_training import by_chain, rows, seeded
from torch import nn

from fedfuse.kernels.chain.pointwise import draw_mask, tanh
from fedfuse.kernels.target import LANES, Floats


def test_tanh_is_exact_to_a_few_units_in_the_last_place() -> None:
    x = np.concatenate([np.linspace(-12, 12, 100_001), np.logspace(-30, 0, 1000)]).astype(np.float32)
    y = np.empty_like(x)
    tanh(x, y, (1, 1, x.size, 0, 0, 0, 0, 0, 0))
    exact = np.tanh(x.astype(np.float64))
    assert np.max(np.abs(y - exact) / np.maximum(np.abs(exact), 1e-30)) < 5 * 2**-24
    assert np.abs(y).max() <= 1


def mask(examples: int, features: int, key: int, keep: float, across: int = 0) -> Floats:
    room = -(-examples // across) * across if across else examples
    drawn = np.full(room * features, -1, np.float32)
    draw_mask(drawn, examples, features, across, key, keep)
    return drawn


@pytest.mark.parametrize("keep", [0.1, 0.5, 0.8])
def test_a_mask_keeps_its_share_everywhere_and_independently(keep: float) -> None:
    drawn = mask(400, 500, 77, keep).reshape(400, 500)
    assert set(np.unique(drawn)) == {np.float32(0), np.float32(1 / keep)}
    kept = drawn > 0
    spread = np.sqrt(keep * (1 - keep))
    assert abs(kept.mean() - keep) < 5 * spread / np.sqrt(kept.size)
    for axis, count in ((0, 400), (1, 500)):
        assert np.abs(kept.mean(axis) - keep).max() < 5 * spread / np.sqrt(count)
    for other in (np.roll(kept, 1, 0), np.roll(kept, 1, 1), mask(400, 500, 78, keep).reshape(400, 500) > 0):
        assert abs(np.corrcoef(kept.ravel(), other.ravel())[0, 1]) < 5 / np.sqrt(kept.size)


def test_a_mask_depends_on_key_example_and_feature_alone() -> None:
    whole = mask(21, 30, 5, 0.5).reshape(21, 30)
    assert np.array_equal(mask(9, 30, 5, 0.5).reshape(9, 30), whole[:9])
    lanes = mask(21, 30, 5, 0.5, across=LANES).reshape(-1, 30, LANES).transpose(0, 2, 1).reshape(-1, 30)
    assert np.array_equal(lanes[:21], whole)


class Masked(nn.Module):
    """Dropout with a given mask."""

    def __init__(self, given: torch.Tensor) -> None:
        super().__init__()
        self.given = given

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.given.to(x)


def test_gradients_pass_through_the_mask_that_was_drawn() -> None:
    net, data = seeded(lambda: nn.Sequential(nn.Linear(6, 40), nn.Dropout(0.4), nn.Linear(40, 3))), rows((6,), 19)
    key = int(torch.randint(2**32, (1, 1), generator=torch.Generator().manual_seed(0)))
    drawn = torch.from_numpy(mask(19, 48, key, 0.6).reshape(19, 48)[:, :40])
    other = copy.deepcopy(net).double()
    other[1] = Masked(drawn)
    F.cross_entropy(other(data.x.double()), data.y).backward()
    mine = by_chain(net, data, 19)
    for name, p in other.named_parameters():
        step = p.detach() - p.grad  # type: ignore[operator]
        assert torch.allclose(mine[name].double(), step, rtol=0, atol=2e-7)


def test_dropout_of_images_is_drawn_for_every_pixel() -> None:
    make = lambda: nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.Dropout(0.5), nn.Conv2d(4, 4, 3, padding=1), nn.Flatten(), nn.Linear(64, 3)
    )
    net, data = seeded(make), rows((1, 6, 6), 40)
    assert torch.equal(by_chain(net, data, 20)["4.weight"], by_chain(net, data, 20)["4.weight"])
    without = seeded(lambda: nn.Sequential(*(m for m in make() if not isinstance(m, nn.Dropout))))
    assert not torch.equal(by_chain(net, data, 20)["4.weight"], by_chain(without, data, 20)["3.weight"])

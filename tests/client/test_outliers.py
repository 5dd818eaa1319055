"""Destroyed images: each way does what it says, to each image by itself, and only by the generator given."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from fedfuse.errors import RecipeError
from fedfuse.methods import fedov
from fedfuse.methods.fedov import FEATURE_CORRUPTIONS, IMAGE_CORRUPTIONS, make_outliers


def draw(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def images() -> Tensor:
    return torch.rand(60, 2, 9, 12, generator=draw(9)) + 0.1


@pytest.mark.parametrize("way", [*dict.fromkeys(IMAGE_CORRUPTIONS)], ids=lambda w: w.__name__)
def test_every_way_changes_images_and_keeps_their_range(images: Tensor, way: fedov.Corruption) -> None:
    out = way(images, draw())
    assert out.shape == images.shape
    assert out.equal(way(images, draw())), "same generator, same images"
    assert not out.equal(way(images, draw(1)))
    assert out.min() >= 0
    assert out.max() <= images.max() + 1e-4
    assert ((out - images).abs().flatten(1).amax(1) > 1e-3).double().mean() > 0.95


def test_a_tight_crop_magnifies() -> None:
    ramp = torch.arange(32.0).view(1, 1, 1, 32).expand(50, 1, 32, 32)
    out = fedov.tight_crop(ramp, draw())
    steps = out.diff(dim=-1)[:, 0, 16, 8:24]
    magnified = 1 / steps.mean(-1)  # how many pixels one old pixel became
    assert ((magnified > 1.3) & (magnified < 4)).all(), "windows of a tenth to a third, of ratio 3:4 to 4:3"


def test_blur_is_a_mean_over_a_window() -> None:
    spot = torch.zeros(80, 1, 21, 21)
    spot[:, :, 10, 10] = 1.0
    out = fedov.blur(spot, draw())
    assert torch.allclose(out.sum((1, 2, 3)), torch.ones(80), atol=1e-4)
    sides = [(int((o[0] > 1e-6).any(1).sum()), int((o[0] > 1e-6).any(0).sum())) for o in out]
    for tall, wide in sides:
        assert max(tall, wide) in (3, 5, 7, 9)
        assert min(tall, wide) in (1, 3, 5)
    assert len(set(sides)) > 10
    assert torch.allclose(fedov.blur(torch.ones(5, 1, 8, 8), draw()), torch.ones(5, 1, 8, 8), atol=1e-5)


def test_erasing_leaves_half_to_two_thirds(images: Tensor) -> None:
    out = fedov.erase(images, draw())
    gone = (out[:, 0] == 0).double().mean((1, 2))
    assert gone.min() > 0.2
    assert gone.max() < 0.62
    assert out[out != 0].equal(images[out != 0])
    for hole in out[:, 0] == 0:
        rows, columns = hole.any(1).nonzero()[:, 0], hole.any(0).nonzero()[:, 0]
        assert hole[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1].all(), "one rectangle"


def test_cutting_moves_whole_rows_or_columns(images: Tensor) -> None:
    out = fedov.cut_and_paste(images, draw())
    kinds = set()
    for old, new in zip(images[:, 0], out[:, 0], strict=True):
        by_column = (
            [int((old == column[:, None]).all(0).nonzero()[0, 0]) for column in new.T] if _columns(old, new) else []
        )
        by_row = [int((old == row).all(1).nonzero()[0, 0]) for row in new] if not by_column else []
        places = by_column or by_row
        length = len(places)
        moved = [p for i, p in enumerate(places) if p != i]
        kinds.add((bool(by_column), sorted(places) == list(range(length))))
        assert len(moved) >= length // 2
    assert kinds == {(True, True), (True, False), (False, True), (False, False)}, "pasted and swapped, both ways"


def _columns(old: Tensor, new: Tensor) -> bool:
    return all(bool((old == column[:, None]).all(0).any()) for column in new.T)


def test_quarters_are_turned_as_numpy_turns_them() -> None:
    x = torch.rand(40, 1, 8, 8, generator=draw(3))
    out = fedov.rotate_quarters(x, draw())
    turns = set()
    for old, new in zip(x[:, 0].numpy(), out[:, 0].numpy(), strict=True):
        found = [(top, k) for top in range(5) for k in (1, 2, 3) if np.array_equal(_turned(old, top, k), new)]
        assert len(found) == 1
        turns.add(found[0][1])
    assert turns == {1, 2, 3}


def _turned(image: np.ndarray, top: int, k: int) -> np.ndarray:
    out = image.copy()
    for left in (0, 4):
        out[top : top + 4, left : left + 4] = np.rot90(image[top : top + 4, left : left + 4], -k)
    return out


def test_every_image_is_destroyed_in_one_way_of_its_own(images: Tensor) -> None:
    out = make_outliers(images, draw())
    assert out.equal(make_outliers(images, draw()))
    assert not out.equal(images)
    assert images.equal(torch.rand(60, 2, 9, 12, generator=draw(9)) + 0.1), "the rows themselves stay as they are"
    assert IMAGE_CORRUPTIONS.count(fedov.cut_and_paste) == IMAGE_CORRUPTIONS.count(fedov.rotate_quarters) == 2


def test_features_are_erased_or_shuffled() -> None:
    x = torch.rand(50, 10, generator=draw()) + 1
    erased = fedov.erase_features(x, draw())
    assert set((erased == 0).sum(1).tolist()) <= {4, 5}
    shuffled = fedov.shuffle_features(x, draw())
    assert shuffled.sort(1).values.allclose(x.sort(1).values)
    assert ((shuffled != x).sum(1) == 5).all()
    assert make_outliers(x, draw()).shape == x.shape
    assert len(FEATURE_CORRUPTIONS) == 2


@pytest.mark.parametrize("shape", [(3, 5, 4), (3, 1, 3, 3)])
def test_other_rows_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(RecipeError, match="outliers are made of features or of images"):
        make_outliers(torch.zeros(shape), draw())

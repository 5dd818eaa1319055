from __future__ import annotations

import pickle  # noqa: TID251 (our own values, on their way to our own workers)

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import ndimage
from torch import Tensor
from torch.nn import functional

from fedfuse.data.transforms import (
    AUGMENTATIONS,
    Compose,
    CropFlip,
    Grayscale,
    Rotate,
    Standardize,
    augmentation,
    before_standardizing,
    rotate,
    scale01,
    standardize,
)
from fedfuse.errors import ConfigError


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_scaling_is_division_by_255_and_leaves_floats():
    every = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(scale01(every), torch.arange(256, dtype=torch.float32) / 255)
    assert scale01(torch.tensor([7.5], dtype=torch.float64)).tolist() == [7.5]


@pytest.mark.parametrize("shape", [(500, 3, 4, 5), (500, 7)])
def test_standardizing_gives_mean_zero_and_deviation_one(shape):
    x = torch.rand(shape, generator=generator()) * 3 + 10
    fitted = standardize(x, block=64)
    axes = [a for a in range(x.ndim) if a != 1]
    assert fitted.mean == pytest.approx(x.double().mean(axes).tolist(), rel=1e-12)
    assert fitted.std == pytest.approx(x.double().std(axes, correction=0).tolist(), rel=1e-12)
    done = fitted(x)
    assert done.dtype == torch.float32
    assert torch.allclose(done.mean(axes), torch.zeros(shape[1]), atol=1e-4)
    assert torch.allclose(done.std(axes, correction=0), torch.ones(shape[1]), atol=1e-4)


def test_statistics_come_from_training_rows_alone_and_constants_survive():
    train, test = torch.tensor([[0.0, 5.0], [2.0, 5.0]]), torch.tensor([[100.0, 6.0]])
    assert standardize(train)(test).tolist() == [[99.0, 1.0]]


# --- crop and flip ---------------------------------------------------------------------------------------


def windows(image: Tensor, pad: int, flip: bool) -> set[bytes]:
    """Every image that padding, cropping and flipping can give, the slow way."""
    _, h, w = image.shape
    padded = functional.pad(image[None], (pad,) * 4, mode="reflect")[0]
    cuts = [padded[:, i : i + h, j : j + w] for i in range(2 * pad + 1) for j in range(2 * pad + 1)]
    if flip:
        cuts += [cut.flip(2) for cut in cuts]
    return {cut.contiguous().numpy().tobytes() for cut in cuts}


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 3), st.integers(5, 9), st.integers(5, 9), st.integers(0, 4), st.booleans(), st.integers(0, 999))
def test_every_crop_is_a_window_of_the_reflected_image(channels, height, width, pad, flip, seed):
    x = torch.rand(6, channels, height, width, generator=generator(seed))
    out = CropFlip(pad, flip)(x, generator(seed + 1))
    for image, cut in zip(x, out, strict=True):
        assert cut.numpy().tobytes() in windows(image, pad, flip)


def test_every_window_comes_up_equally_often():
    x = torch.rand(1, 1, 6, 6, generator=generator()).expand(20_000, 1, 6, 6)
    out = CropFlip(pad=1)(x, generator(1))
    _, counts = out.flatten(1).unique(dim=0, return_counts=True)
    assert len(counts) == 18  # nine windows, each also mirrored
    assert counts.float().mean() == pytest.approx(20_000 / 18)
    assert (counts - 20_000 / 18).abs().max() < 5 * (20_000 / 18) ** 0.5


def test_images_of_a_batch_are_drawn_apart_and_the_input_is_left_alone():
    x = torch.rand(1, 3, 8, 8, generator=generator()).repeat(32, 1, 1, 1)
    before = x.clone()
    out = CropFlip()(x, generator())
    assert torch.equal(x, before)
    assert len(out.flatten(1).unique(dim=0)) > 16


def test_no_pad_and_no_flip_is_no_change():
    x = torch.rand(4, 3, 8, 8, generator=generator())
    assert torch.equal(CropFlip(pad=0, flip=False)(x, generator()), x)
    assert len(CropFlip()(x[:0], generator())) == 0


def test_a_pad_wider_than_the_image_is_refused():
    with pytest.raises(ConfigError, match="pad is 8, expected less than the image's 8x9"):
        CropFlip(pad=8)(torch.zeros(1, 1, 8, 9), generator())


# --- turning ---------------------------------------------------------------------------------------------


def test_a_quarter_turn_is_rot90():
    x = torch.rand(3, 2, 7, 7, generator=generator())
    for quarter in (1, 2, 3):
        angle = torch.full((3,), quarter * torch.pi / 2, dtype=torch.float64)
        assert torch.allclose(rotate(x, angle, "bilinear"), torch.rot90(x, quarter, (2, 3)), atol=1e-5)


@pytest.mark.parametrize("shape", [(9, 9), (8, 13)])
def test_turning_agrees_with_scipy(shape):
    x = torch.rand(1, 1, *shape, generator=generator(), dtype=torch.float64)
    for degrees in (-15.0, 4.0, 30.0):
        ours = rotate(x, torch.tensor([np.deg2rad(degrees)]), "bilinear")[0, 0]
        theirs = ndimage.rotate(x[0, 0].numpy(), degrees, reshape=False, order=1, mode="grid-constant")
        assert torch.allclose(ours, torch.from_numpy(theirs), atol=1e-9)


def test_angles_stay_in_range_and_differ():
    ramp = torch.linspace(-1, 1, 33)
    x = ramp.view(1, 1, 1, -1).expand(64, 1, 33, 33)  # a plane rising to the right
    out = Rotate(15, mode="bilinear")(x, generator())[:, 0, 12:21, 12:21]
    right = (out[:, 4, 8] - out[:, 4, 0]) / (ramp[20] - ramp[12])
    down = (out[:, 8, 4] - out[:, 0, 4]) / (ramp[20] - ramp[12])
    angle = torch.rad2deg(torch.atan2(down, right))
    assert angle.abs().max() <= 15.01
    assert angle.min() < -8
    assert angle.max() > 8
    assert torch.allclose(right.square() + down.square(), torch.ones(64), atol=1e-3)


# --- grey ------------------------------------------------------------------------------------------------


def test_grey_is_the_weighted_sum_in_all_channels():
    x = torch.rand(400, 3, 4, 4, generator=generator())
    out = Grayscale(0.25)(x, generator(1))
    grey = (out == out[:, :1]).flatten(1).all(1)
    assert 60 < int(grey.sum()) < 140
    expected = 0.2989 * x[:, 0] + 0.587 * x[:, 1] + 0.114 * x[:, 2]
    assert torch.allclose(out[grey, 1], expected[grey])
    assert torch.equal(out[~grey], x[~grey])
    one = torch.rand(3, 1, 4, 4)
    assert torch.equal(Grayscale(1.0)(one, generator()), one)
    with pytest.raises(ConfigError, match="2 channels"):
        Grayscale()(torch.zeros(1, 2, 4, 4), generator())


# --- all of them -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_augmentations_are_values_that_repeat_and_travel(name):
    augment = AUGMENTATIONS[name]
    x = torch.rand(16, 3, 12, 12, generator=generator())
    out = augment(x, generator(5))
    assert out.shape == x.shape
    assert out.dtype == x.dtype
    assert not torch.equal(out, x)
    assert torch.equal(pickle.loads(pickle.dumps(augment))(x, generator(5)), out)
    assert repr(augment) == repr(pickle.loads(pickle.dumps(augment)))
    state = torch.random.get_rng_state()
    augment(x, generator(6))
    assert torch.equal(torch.random.get_rng_state(), state)
    with pytest.raises(ConfigError, match=r"shape \(4, 9\), expected \(n, channels, height, width\)"):
        augment(torch.zeros(4, 9), generator())


def test_a_chain_is_one_after_another():
    x = torch.rand(8, 3, 10, 10, generator=generator())
    both = augmentation(["crop-flip", "rotate"])
    assert both == Compose((CropFlip(), Rotate()))
    g = generator(3)
    assert torch.equal(both(x, generator(3)), Rotate()(CropFlip()(x, g), g))
    assert torch.equal(augmentation([])(x, generator()), x)
    with pytest.raises(ConfigError, match=r"'cropflip' is unknown.*did you mean 'crop-flip'"):
        augmentation(["cropflip"])


@pytest.mark.parametrize("names", [["grayscale"], ["rotate"], ["crop-flip", "grayscale"], ["flip"]])
def test_standardized_rows_are_augmented_as_pixels(names):
    """The published order: augment the picture, then standardize it."""
    pixels = torch.rand(64, 3, 8, 8, generator=generator())
    scale, change = Standardize((0.49, 0.48, 0.45), (0.25, 0.24, 0.26)), augmentation(names)
    published = scale(change(pixels, generator(4)))
    assert torch.allclose(before_standardizing(change, scale)(scale(pixels), generator(4)), published, atol=1e-5)
    after = change(scale(pixels), generator(4))
    assert torch.allclose(after, published, atol=1e-5) == change.moves_only


def test_standardize_is_a_value():
    fitted = Standardize((0.5,), (0.25,))
    assert pickle.loads(pickle.dumps(fitted)) == fitted
    assert repr(fitted) == "Standardize(mean=(0.5,), std=(0.25,))"

"""What happens to pixels between the file and the network: scaling, standardizing, augmenting.

Augmentations work on a whole batch at once and draw from the generator they are given, so the same seed
gives the same batch. They expect pixels before standardizing, as the published pipelines do: `before_standardizing`
puts them there where rows are standardized once and for all.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from fedfuse.errors import ConfigError


class Augment(Protocol):
    """Changes a batch of images at random, and its labels never."""

    @property
    def moves_only(self) -> bool:
        """Whether it only moves pixels, so that it gives the same before and after standardizing."""
        ...

    def __call__(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """The batch, changed by what the generator draws."""
        ...


def scale01(x: Tensor) -> Tensor:
    """Bytes 0 to 255 as float32 in [0, 1]; numbers that are no bytes keep their value.

    Example:
        >>> scale01(torch.tensor([0, 51, 255], dtype=torch.uint8))
        tensor([0.0000, 0.2000, 1.0000])
    """
    return x.to(torch.float32).div_(255) if x.dtype == torch.uint8 else x.to(torch.float32)


@dataclass(frozen=True, slots=True)
class Standardize:
    """Shifts and scales each channel (or feature): (x − mean) / std.

    Example:
        >>> Standardize((1.0,), (2.0,))(torch.tensor([[5.0]]))
        tensor([[2.]])
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, x: Tensor) -> Tensor:
        """The standardized batch."""
        shape = (1, -1) + (1,) * (x.ndim - 2)
        mean = torch.tensor(self.mean, dtype=x.dtype, device=x.device).view(shape)
        std = torch.tensor(self.std, dtype=x.dtype, device=x.device).view(shape)
        return (x - mean) / std

    def undo(self, x: Tensor) -> Tensor:
        """The batch as it was before.

        Example:
            >>> Standardize((1.0,), (2.0,)).undo(torch.tensor([[2.0]]))
            tensor([[5.]])
        """
        std = tuple(1 / s for s in self.std)
        return Standardize(tuple(-m / s for m, s in zip(self.mean, self.std, strict=True)), std)(x)


def standardize(train: Tensor, block: int = 4096) -> Standardize:
    """The standardization that gives these training rows mean 0 and standard deviation 1 per channel.

    Give it training rows only: statistics of test rows must not reach a model. A channel that never
    changes is only shifted. Sums run in float64 over blocks, so a large set needs no second copy.

    Example:
        >>> standardize(torch.tensor([[1.0, 5.0], [3.0, 5.0]]))
        Standardize(mean=(2.0, 5.0), std=(1.0, 1.0))
    """
    axes = [axis for axis in range(train.ndim) if axis != 1]
    shape = (1, -1) + (1,) * (train.ndim - 2)
    count = train.numel() / train.shape[1]
    total = torch.zeros(train.shape[1], dtype=torch.float64)
    for start in range(0, len(train), block):
        total += train[start : start + block].double().sum(axes)
    mean, squares = total / count, torch.zeros_like(total)
    for start in range(0, len(train), block):
        squares += (train[start : start + block].double() - mean.view(shape)).square().sum(axes)
    std = (squares / count).sqrt()
    std = torch.where(std > 0, std, torch.ones_like(std))
    return Standardize(tuple(mean.tolist()), tuple(std.tolist()))


@dataclass(frozen=True, slots=True)
class CropFlip:
    """Pads by reflection, cuts out a random window of the old size, and mirrors half of the images.

    Padding is never built: a window position is folded back into the image, and one gather per batch
    fetches every pixel.

    Example:
        >>> CropFlip(pad=1)(torch.rand(5, 3, 8, 8), torch.Generator().manual_seed(0)).shape
        torch.Size([5, 3, 8, 8])
    """

    pad: int = 4
    flip: bool = True
    moves_only: ClassVar[bool] = True

    def __call__(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """The batch, each image cropped and perhaps mirrored."""
        n, channels, height, width = _image_shape(x, "crop and flip")
        if self.pad >= min(height, width):
            raise ConfigError(
                f"crop and flip: pad is {self.pad}, expected less than the image's {height}x{width}; "
                "reflection needs a wider image, so lower pad"
            )
        rows = self._window(n, height, generator)
        columns = self._window(n, width, generator)
        if self.flip:
            mirrored = torch.rand(n, 1, generator=generator, device=generator.device) < 0.5
            columns = torch.where(mirrored, columns.flip(1), columns)
        at = (rows[:, :, None] * width + columns[:, None, :]).view(n, 1, height * width).to(x.device)
        return x.flatten(2).gather(2, at.expand(n, channels, -1)).view_as(x)

    def _window(self, n: int, size: int, generator: torch.Generator) -> Tensor:
        """Per image, the `size` source positions along one axis."""
        device = generator.device
        start = torch.randint(-self.pad, self.pad + 1, (n, 1), generator=generator, device=device)
        at = (start + torch.arange(size, device=device)).abs()
        return (size - 1) - (size - 1 - at).abs()


@dataclass(frozen=True, slots=True)
class Rotate:
    """Turns each image about its centre by a random angle in [−degrees, degrees]; corners become 0.

    Example:
        >>> Rotate(15)(torch.rand(5, 1, 8, 8), torch.Generator().manual_seed(0)).shape
        torch.Size([5, 1, 8, 8])
    """

    degrees: float = 15.0
    mode: Literal["nearest", "bilinear"] = "nearest"
    moves_only: ClassVar[bool] = False  # its corners are black, which is not 0 after standardizing

    def __call__(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """The batch, each image turned by its own angle."""
        n, _, _, _ = _image_shape(x, "rotate")
        draw = torch.rand(n, generator=generator, device=generator.device, dtype=torch.float64)
        angle = ((2 * draw - 1) * math.radians(self.degrees)).to(x.device)
        return rotate(x, angle, self.mode)


def rotate(x: Tensor, angle: Tensor, mode: Literal["nearest", "bilinear"] = "nearest") -> Tensor:
    """Each image turned counter-clockwise by its angle in radians, seen with the first row on top."""
    _, _, height, width = x.shape
    cos, sin, zero = angle.cos(), angle.sin(), torch.zeros_like(angle)
    # The grid runs over [−1, 1] on both axes, so an oblong image needs its aspect ratio put back.
    first = torch.stack((cos, -sin * height / width, zero), dim=1)
    second = torch.stack((sin * width / height, cos, zero), dim=1)
    theta = torch.stack((first, second), dim=1).to(x.dtype)
    grid = functional.affine_grid(theta, list(x.shape), align_corners=False)
    return functional.grid_sample(x, grid, mode=mode, padding_mode="zeros", align_corners=False)


@dataclass(frozen=True, slots=True)
class Grayscale:
    """Takes the colour out of some images: 0.2989 R + 0.587 G + 0.114 B in all three channels.

    Example:
        >>> Grayscale(probability=1.0)(torch.ones(1, 3, 1, 1), torch.Generator()).flatten()
        tensor([0.9999, 0.9999, 0.9999])
    """

    probability: float = 0.1
    moves_only: ClassVar[bool] = False  # its weights are of colours, not of numbers of deviations

    def __call__(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """The batch, some of its images without colour; images of one channel stay as they are."""
        n, channels, _, _ = _image_shape(x, "grayscale")
        if channels == 1:
            return x
        if channels != 3:
            raise ConfigError(f"grayscale: images have {channels} channels, expected 1 or 3; leave it out")
        weights = torch.tensor((0.2989, 0.587, 0.114), dtype=x.dtype, device=x.device).view(1, 3, 1, 1)
        chosen = torch.rand(n, generator=generator, device=generator.device) < self.probability
        return torch.where(chosen.view(-1, 1, 1, 1).to(x.device), (x * weights).sum(1, keepdim=True), x)


@dataclass(frozen=True, slots=True)
class Compose:
    """Several augmentations, one after another."""

    steps: tuple[Augment, ...]

    @property
    def moves_only(self) -> bool:
        """Whether every step only moves pixels."""
        return all(step.moves_only for step in self.steps)

    def __call__(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """The batch after every step."""
        for step in self.steps:
            x = step(x, generator)
        return x


@dataclass(frozen=True, slots=True)
class BeforeStandardizing:
    """An augmentation of standardized rows that acts on their pixels: x ↦ standardize(augment(pixels of x))."""

    augment: Augment
    scale: Standardize
    moves_only: ClassVar[bool] = False

    def __call__(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """The batch, changed as pixels."""
        return self.scale(self.augment(self.scale.undo(x), generator))


def before_standardizing(augment: Augment, scale: Standardize) -> Augment:
    """The augmentation for rows that were standardized: the same where it only moves pixels.

    Example:
        >>> scale = Standardize((0.5,), (0.25,))
        >>> before_standardizing(augmentation(["crop-flip"]), scale).steps
        (CropFlip(pad=4, flip=True),)
        >>> black = before_standardizing(Rotate(180.0), scale)(torch.zeros(40, 1, 9, 9), torch.Generator())
        >>> black.amin().item()
        -2.0
    """
    return augment if augment.moves_only else BeforeStandardizing(augment, scale)


AUGMENTATIONS: Mapping[str, Augment] = MappingProxyType(
    {
        "crop-flip": CropFlip(),
        "crop": CropFlip(flip=False),
        "flip": CropFlip(pad=0),
        "rotate": Rotate(),
        "grayscale": Grayscale(),
    }
)
"""What an experiment file may name: the settings of NIID-Bench, MOON and SWA."""


def augmentation(names: Sequence[str]) -> Compose:
    """The augmentations of these names, in this order.

    Example:
        >>> augmentation(["crop-flip", "rotate"]).steps[1]
        Rotate(degrees=15.0, mode='nearest')
    """
    for name in names:
        if name not in AUGMENTATIONS:
            close = difflib.get_close_matches(name, AUGMENTATIONS, n=1)
            hint = f"did you mean {close[0]!r}?" if close else "choose one of these."
            raise ConfigError(f"augmentation {name!r} is unknown, expected one of {', '.join(AUGMENTATIONS)}; {hint}")
    return Compose(tuple(AUGMENTATIONS[name] for name in names))


def _image_shape(x: Tensor, who: str) -> tuple[int, int, int, int]:
    if x.ndim != 4:
        raise ConfigError(
            f"{who}: the batch has shape {tuple(x.shape)}, expected (n, channels, height, width); "
            "leave this augmentation out for data that are no images"
        )
    n, channels, height, width = x.shape
    return n, channels, height, width

"""VGG-11 and VGG-16 for small images, with and without BatchNorm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from fedfuse.models.layers import (
    convolutions,
    default_init,
    draw_he,
    draw_normal,
    flag,
    he_convolutions,
    initialize,
    least_size,
    linear_layers,
    one_of,
    scale_widths,
    share,
    stack,
    whole,
    wholes,
    with_head,
)


@dataclass(frozen=True, slots=True)
class _Plan:
    """The convolutions of a VGG: their published widths, and after which of them the image is halved."""

    name: str
    widths: tuple[int, ...]
    pooled: tuple[bool, ...]


_VGG11 = _Plan(
    "vgg11",
    (64, 128, 256, 256, 512, 512, 512, 512),
    (True, True, False, True, False, True, False, True),
)
# SWA's VGG-16 leaves out the last max-pooling: the mean over the image takes its place.
_VGG16 = _Plan(
    "vgg16",
    (64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512),
    (False, True, False, True, False, False, True, False, False, True, False, False, False),
)


def vgg11(
    channels: int = 3,
    size: int = 32,
    classes: int = 10,
    widths: float | Sequence[int] = 1.0,
    hidden: Sequence[int] = (512, 512),
    norm: bool = True,
    bias: str = "all",
    dropout: float = 0.0,
    head: int = 0,
) -> nn.Module:
    """VGG-11: eight 3×3 convolutions, their mean over the image, and a 512-512-classes classifier.

    The VGG-11 of SWA's comparisons is `hidden=(), head=256`; GAMF's is `hidden=(), norm=False, bias="none"`.
    He's initial values N(0, 2 / (k·k·out)) for convolutions, PyTorch's for linear layers.

    Args:
        channels: colours of an image.
        size: side of an image, at least 32.
        classes: how many classes it tells apart, or how many outputs it has for another task.
        widths: a multiplier of the published feature maps, or all eight numbers.
        hidden: units of each hidden layer of the classifier.
        norm: BatchNorm after every convolution.
        bias: which layers have biases: "all", "linear" or "none".
        dropout: share of hidden units dropped in training.
        head: length of a projection before the classifier, 0 for none.

    Example:
        >>> vgg11(widths=0.25, hidden=()).classifier
        Linear(in_features=128, out_features=10, bias=True)
    """
    net = _vgg(_VGG11, channels, size, classes, widths, hidden, norm, bias, dropout, head)
    return initialize(net, he_convolutions)


def vgg16(
    channels: int = 3,
    size: int = 32,
    classes: int = 10,
    widths: float | Sequence[int] = 1.0,
    hidden: Sequence[int] = (4096, 4096),
    norm: bool = True,
    bias: str = "auto",
    dropout: float = 0.5,
    head: int = 0,
) -> nn.Module:
    """VGG-16 as in SWA's ablation: thirteen 3×3 convolutions, then a 512-4096-4096-classes classifier.

    Initial values: N(0, 2 / (k·k·out)) for convolutions, N(0, 0.01²) for linear layers, BatchNorm's scale
    0.5, biases 0.

    Args:
        channels: colours of an image.
        size: side of an image, at least 16.
        classes: how many classes it tells apart, or how many outputs it has for another task.
        widths: a multiplier of the published feature maps, or all thirteen numbers.
        hidden: units of each hidden layer of the classifier.
        norm: BatchNorm after every convolution.
        bias: which layers have biases: "all", "linear", "none", or "auto" for "linear" where BatchNorm's
            shift makes those of the convolutions idle, else "all".
        dropout: share of hidden units dropped in training.
        head: length of a projection before the classifier, 0 for none.

    Example:
        >>> vgg16(widths=0.125, hidden=(64, 32)).classifier
        Linear(in_features=32, out_features=10, bias=True)
    """
    if bias == "auto":
        bias = "linear" if norm else "all"
    net = _vgg(_VGG16, channels, size, classes, widths, hidden, norm, bias, dropout, head)
    return initialize(net, _swa)


def _vgg(
    plan: _Plan,
    channels: int,
    size: int,
    classes: int,
    widths: float | Sequence[int],
    hidden: Sequence[int],
    norm: bool,
    bias: str,
    dropout: float,
    head: int,
) -> nn.Module:
    """The layers of a plan on the meta device, their options checked."""
    who = plan.name
    maps = scale_widths(who, widths, plan.widths)
    whole(who, "size", size, least_size(plan.pooled, kernel=3, padding=1))
    classes, head = whole(who, "classes", classes), whole(who, "head", head, 0)
    one_of(who, "bias", bias, ("all", "linear", "none"))
    inputs = whole(who, "channels", channels)
    with torch.device("meta"):
        body = convolutions((inputs, *maps), plan.pooled, norm=flag(who, "norm", norm), bias=bias == "all")
        tail = linear_layers(
            (maps[-1], *wholes(who, "hidden", hidden)),
            classes,
            dropout=share(who, "dropout", dropout),
            bias=bias != "none",
        )
        return with_head(stack(*body, ("mean", nn.AdaptiveAvgPool2d(1)), *tail), head)


def _swa(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d):
        draw_he(module)
    elif isinstance(module, nn.Linear):
        draw_normal(module, 0.01)
    elif isinstance(module, nn.BatchNorm2d):
        default_init(module)
        nn.init.constant_(module.weight, 0.5)

"""VGG-11 and VGG-16, ResNet-18 and ResNet-50, all for small images."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

from fedfuse.models.layers import (
    Named,
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
class _VggPlan:
    """The convolutions of a VGG: their published widths, and after which of them the image is halved."""

    name: str
    widths: tuple[int, ...]
    pooled: tuple[bool, ...]


_VGG11 = _VggPlan(
    "vgg11",
    (64, 128, 256, 256, 512, 512, 512, 512),
    (True, True, False, True, False, True, False, True),
)
# SWA's VGG-16 leaves out the last max-pooling: the mean over the image takes its place.
_VGG16 = _VggPlan(
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
    plan: _VggPlan,
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


# The convolutions of one block: (kernel, output channels per unit of width).
BlockPlan: TypeAlias = tuple[tuple[int, int], ...]
_BASIC: BlockPlan = ((3, 1), (3, 1))
_BOTTLENECK: BlockPlan = ((1, 1), (3, 1), (1, 4))
_WIDTHS = (64, 128, 256, 512)


class Residual(nn.Module):
    """A block that adds what its body finds to what its shortcut kept: ReLU(body(x) + shortcut(x))."""

    def __init__(self, body: nn.Module, shortcut: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.shortcut = shortcut
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Run the block."""
        out: Tensor = self.relu(self.body(x) + self.shortcut(x))
        return out


def resnet18(
    channels: int = 3,
    size: int = 32,
    classes: int = 10,
    widths: float | Sequence[int] = 1.0,
    bias: bool = False,
    head: int = 0,
) -> nn.Module:
    """ResNet-18 for small images: a 3×3 stem without max-pooling, two basic blocks in each of four stages.

    He et al., "Deep Residual Learning for Image Recognition", 2016, with the stem that MOON and FedDUAP use;
    11,173,962 parameters for ten classes. He's initial values N(0, 2 / (k·k·out)) for convolutions.

    Args:
        channels: colours of an image.
        size: side of an image, at least 8; the mean over the image makes any larger one fit.
        classes: how many classes it tells apart, or how many outputs it has for another task.
        widths: a multiplier of the published stage widths (64, 128, 256, 512), or all four numbers.
        bias: biases in the convolutions, as FedDUAP has them.
        head: length of a projection before the classifier, 0 for none.

    Example:
        >>> resnet18(widths=0.25)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """
    return _resnet("resnet18", _BASIC, (2, 2, 2, 2), channels, size, classes, widths, bias, head)


def resnet50(
    channels: int = 3,
    size: int = 32,
    classes: int = 10,
    widths: float | Sequence[int] = 1.0,
    bias: bool = False,
    head: int = 0,
) -> nn.Module:
    """ResNet-50 for small images: a 3×3 stem without max-pooling, 3, 4, 6 and 3 bottlenecks in four stages.

    As MOON and SWA use it, the stride on the 3×3 convolution of a bottleneck; 23,520,842 parameters for ten
    classes. He's initial values N(0, 2 / (k·k·out)) for convolutions.

    Args:
        channels: colours of an image.
        size: side of an image, at least 8; the mean over the image makes any larger one fit.
        classes: how many classes it tells apart, or how many outputs it has for another task.
        widths: a multiplier of the published stage widths (64, 128, 256, 512), or all four numbers; a
            block's output is four times as wide.
        bias: biases in the convolutions.
        head: length of a projection before the classifier, 0 for none.

    Example:
        >>> resnet50(widths=(4, 4, 8, 8)).classifier
        Linear(in_features=32, out_features=10, bias=True)
    """
    return _resnet("resnet50", _BOTTLENECK, (3, 4, 6, 3), channels, size, classes, widths, bias, head)


def _resnet(
    who: str,
    plan: BlockPlan,
    blocks: Sequence[int],
    channels: int,
    size: int,
    classes: int,
    widths: float | Sequence[int],
    bias: bool,
    head: int,
) -> nn.Module:
    stages = scale_widths(who, widths, _WIDTHS)
    bias, channels = flag(who, "bias", bias), whole(who, "channels", channels)
    classes, head = whole(who, "classes", classes), whole(who, "head", head, 0)
    whole(who, "size", size, 8)
    with torch.device("meta"):
        stem = (*_unit("conv1", channels, stages[0], 3, 1, bias), ("conv1_relu", nn.ReLU()))
        body = _stages(plan, blocks, stages, bias)
        tail = linear_layers((stages[-1] * plan[-1][1],), classes)
        net = with_head(stack(*stem, *body, ("mean", nn.AdaptiveAvgPool2d(1)), *tail), head)
    return initialize(net, he_convolutions)


def _stages(plan: BlockPlan, blocks: Sequence[int], widths: Sequence[int], bias: bool) -> Iterator[Named]:
    """Stages of blocks; every stage but the first halves the image in its first block."""
    inputs = widths[0]
    for i, (count, width) in enumerate(zip(blocks, widths, strict=True), 1):
        outputs = width * plan[-1][1]
        first = _block(plan, inputs, width, 1 if i == 1 else 2, bias)
        others = (_block(plan, outputs, width, 1, bias) for _ in range(count - 1))
        yield f"stage{i}", nn.Sequential(first, *others)
        inputs = outputs


def _block(plan: BlockPlan, inputs: int, width: int, stride: int, bias: bool) -> Residual:
    outputs = width * plan[-1][1]
    body = stack(*_body(plan, inputs, width, stride, bias))
    if stride == 1 and inputs == outputs:
        return Residual(body, nn.Identity())
    return Residual(body, stack(*_unit("conv", inputs, outputs, 1, stride, bias)))


def _body(plan: BlockPlan, inputs: int, width: int, stride: int, bias: bool) -> Iterator[Named]:
    """The convolutions of a block; its first 3×3 carries the stride, no ReLU follows the last."""
    for i, (kernel, factor) in enumerate(plan, 1):
        step, stride = (stride, 1) if kernel == 3 else (1, stride)
        yield from _unit(f"conv{i}", inputs, width * factor, kernel, step, bias)
        if i < len(plan):
            yield f"conv{i}_relu", nn.ReLU()
        inputs = width * factor


def _unit(name: str, inputs: int, outputs: int, kernel: int, stride: int, bias: bool) -> Iterator[Named]:
    """A convolution that keeps the image's size but for its stride, and its BatchNorm."""
    yield name, nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=bias)
    yield f"{name}_norm", nn.BatchNorm2d(outputs)

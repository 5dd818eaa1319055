"""Fully connected networks, and plain convolutional ones: the small networks of the papers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from fedfuse.models.layers import (
    ACTIVATIONS,
    Rule,
    convolutions,
    default_init,
    draw_he,
    draw_normal,
    initialize,
    least_size,
    linear_layers,
    one_of,
    reject,
    side_after,
    stack,
    whole,
    wholes,
    with_head,
)


def mlp(
    inputs: int = 784,
    hidden: Sequence[int] = (100,),
    classes: int = 10,
    init: str = "default",
    head: int = 0,
    activation: str = "relu",
    output_bias: bool = True,
) -> nn.Module:
    """A fully connected network with an activation between its layers.

    Args:
        inputs: features of one example; images are flattened, whatever their shape.
        hidden: units of each hidden layer; none gives softmax regression.
        classes: how many classes it tells apart, or how many outputs it has for another task.
        init: "default" for PyTorch's initial values, "pfnm" for those of PFNM's networks
            (Yurochkin et al., 2019): weights from N(0, 0.1²), biases 0.1.
        head: length of a projection before the classifier, 0 for none.
        activation: "relu", "leaky_relu" or "tanh".
        output_bias: whether the classifier has a bias.

    Example:
        >>> mlp(inputs=64, hidden=(32,)).fc1
        Linear(in_features=64, out_features=32, bias=True)
    """
    widths = (whole("mlp", "inputs", inputs), *wholes("mlp", "hidden", hidden))
    classes, head = whole("mlp", "classes", classes), whole("mlp", "head", head, 0)
    rule = _MLP_RULES[one_of("mlp", "init", init, tuple(_MLP_RULES))]
    with torch.device("meta"):
        if (make := ACTIVATIONS.get(activation)) is None:
            reject("mlp", "activation", activation, f"one of {', '.join(ACTIVATIONS)}")
        if not isinstance(output_bias, bool):
            reject("mlp", "output_bias", output_bias, "true or false")
        layers = linear_layers(widths, classes, activation=make, output_bias=output_bias)
        net = with_head(stack(*layers), head)
    return initialize(net, rule)


def _pfnm(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        draw_normal(module, 0.1, bias=0.1)


_MLP_RULES: Mapping[str, Rule] = {"default": default_init, "pfnm": _pfnm}


def lenet(
    channels: int = 1,
    size: int = 28,
    classes: int = 10,
    maps: Sequence[int] = (6, 16),
    hidden: Sequence[int] = (120, 84),
    head: int = 0,
) -> nn.Module:
    """The "simple CNN" of FedLPA, BA-BFL, SWA, MOON, NIID-Bench and FedOV.

    Two 5×5 convolutions without padding, each with 2×2 max-pooling and ReLU, then fully connected layers:
    62,006 parameters for 3×32×32 images and 44,426 for 1×28×28. Images smaller than 28×28, which the
    published kernels do not fit, are seen through 3×3 kernels with padding 1 instead.

    Args:
        channels: colours of an image.
        size: side of an image.
        classes: how many classes it tells apart, or how many outputs it has for another task.
        maps: feature maps of each convolution.
        hidden: units of each hidden layer.
        head: length of a projection before the classifier, 0 for none.

    Example:
        >>> sum(p.numel() for p in lenet(channels=3, size=32).parameters())
        62006
    """
    maps = wholes("lenet", "maps", maps, 1)
    kernel, padding = (5, 0) if whole("lenet", "size", size) >= 28 else (3, 1)
    return plain_cnn("lenet", channels, size, classes, maps, hidden, head, kernel=kernel, padding=padding)


def convnet_ams(
    channels: int = 3,
    size: int = 32,
    classes: int = 10,
    widths: Sequence[int] = (32, 64, 64),
    hidden: Sequence[int] = (128,),
    head: int = 0,
) -> nn.Module:
    """The "3-2" ConvNet of AMS: three 3×3 convolutions and two fully connected layers.

    The paper gives the number of layers only. Widths, padding 1, a 2×2 max-pooling after every convolution
    and PyTorch's initial values are our reading of it: 188,810 parameters for 3×32×32 images.

    Args:
        channels: colours of an image.
        size: side of an image.
        classes: how many classes it tells apart, or how many outputs it has for another task.
        widths: feature maps of each convolution.
        hidden: units of each hidden layer.
        head: length of a projection before the classifier, 0 for none.

    Example:
        >>> convnet_ams(channels=1, size=8).fc1
        Linear(in_features=64, out_features=128, bias=True)
    """
    return plain_cnn("convnet_ams", channels, size, classes, widths, hidden, head, padding=1)


def convnet_feddu(
    channels: int = 3,
    size: int = 32,
    classes: int = 10,
    widths: Sequence[int] = (32, 64, 64),
    hidden: Sequence[int] = (64,),
    head: int = 0,
) -> nn.Module:
    """The CNN of FedDU and FedDUAP: three 3×3 convolutions without padding, the last one not pooled.

    122,570 parameters for 3×32×32 images. He's initial values, N(0, 2 / (k·k·out)) for convolutions as in
    the released code and N(0, 2 / in) for linear layers; biases 0.

    Args:
        channels: colours of an image.
        size: side of an image.
        classes: how many classes it tells apart, or how many outputs it has for another task.
        widths: feature maps of each convolution.
        hidden: units of each hidden layer.
        head: length of a projection before the classifier, 0 for none.

    Example:
        >>> sum(p.numel() for p in convnet_feddu().parameters())
        122570
    """
    with torch.device("meta"):
        net = plain_cnn("convnet_feddu", channels, size, classes, widths, hidden, head, pool_last=False)
    return initialize(net, _he)


def plain_cnn(
    who: str,
    channels: int,
    size: int,
    classes: int,
    widths: Sequence[int],
    hidden: Sequence[int],
    head: int,
    *,
    kernel: int = 3,
    padding: int = 0,
    pool_last: bool = True,
) -> nn.Module:
    """Convolutions of one kernel size, each pooled (but perhaps the last), then fully connected layers."""
    widths = (whole(who, "channels", channels), *wholes(who, "widths", widths, 1))
    hidden = wholes(who, "hidden", hidden)
    classes, head = whole(who, "classes", classes), whole(who, "head", head, 0)
    pooled = (*(True,) * (len(widths) - 2), pool_last)
    size = whole(who, "size", size, least_size(pooled, kernel, padding))
    features = widths[-1] * side_after(size, pooled, kernel, padding) ** 2
    layers = convolutions(widths, pooled, kernel=kernel, padding=padding)
    return with_head(stack(*layers, *linear_layers((features, *hidden), classes)), head)


def _he(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d):
        draw_he(module)
    elif isinstance(module, nn.Linear):
        draw_normal(module, math.sqrt(2.0 / module.in_features))

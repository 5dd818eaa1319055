"""The LeNet-like network most of the papers share."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from fedfuse.models.convnet import plain_cnn
from fedfuse.models.layers import whole, wholes


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

"""Networks whose features are drawn once from a seed and never trained: only the classifier is to be fitted."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from fedfuse.models.layers import reject, stack, whole, with_head


class Cosine(nn.Module):
    """√(2/D) cos(z) of D numbers z, whose products approximate a Gaussian kernel (Rahimi and Recht, 2007).

    Example:
        >>> Cosine(2)(torch.zeros(1, 2))
        tensor([[1., 1.]])
    """

    def __init__(self, features: int) -> None:
        super().__init__()
        self.scale = math.sqrt(2.0 / features)

    def forward(self, z: Tensor) -> Tensor:
        """The features, one per number."""
        return self.scale * torch.cos(z)


def random_convolution(
    channels: int = 1,
    size: int = 28,
    classes: int = 10,
    filters: int = 29,
    kernel: int = 6,
    pool: int = 4,
    bias: float = -0.03,
    seed: int = 0,
    head: int = 0,
) -> nn.Module:
    """Random convolution features of pictures: filters of zero mean and unit norm, ReLU, average pooling.

    29 filters and 4×4 pooling give 464 features. The filters follow from the seed, whatever machine draws them, and
    are frozen; what is learnt is the classifier, which begins at zero.

    Args:
        channels: colours of an image.
        size: side of an image.
        classes: how many classes it tells apart, or how many outputs it has for another task.
        filters: how many; each gives `pool` × `pool` features.
        kernel: side of a filter; smaller pictures get the largest that fits.
        pool: how many averages are taken along each side.
        bias: added to what a filter gives before the ReLU: below 0, it passes strong answers only.
        seed: which filters.
        head: length of a projection before the classifier, 0 for none.

    Example:
        >>> random_convolution().classifier
        Linear(in_features=464, out_features=10, bias=True)
    """
    who = "random_convolution"
    channels, size, filters = whole(who, "channels", channels), whole(who, "size", size), whole(who, "filters", filters)
    kernel, pool = min(whole(who, "kernel", kernel), size), whole(who, "pool", pool)
    pool = min(pool, size - kernel + 1)
    conv, passed = nn.Conv2d(channels, filters, kernel), _number(who, "bias", bias)

    def draw(numbers: torch.Generator) -> tuple[Tensor, Tensor]:
        drawn = torch.randn(filters, channels, kernel, kernel, generator=numbers)
        if channels * kernel * kernel > 1:
            drawn = drawn - drawn.mean((1, 2, 3), keepdim=True)
        return drawn / drawn.flatten(1).norm(dim=1).view(-1, 1, 1, 1), torch.full((filters,), passed)

    _freeze(conv, draw, seed)
    net = stack(
        ("filters", conv),
        ("relu", nn.ReLU()),
        ("pool", nn.AdaptiveAvgPool2d(pool)),
        ("flatten", nn.Flatten()),
        ("classifier", _blank(nn.Linear(filters * pool * pool, whole(who, "classes", classes, 1)))),
    )
    return with_head(net, whole(who, "head", head, 0))


def random_fourier(
    inputs: int = 784, classes: int = 10, features: int = 500, width: float = 1.0, seed: int = 0, head: int = 0
) -> nn.Module:
    """Random Fourier features of a table's rows: cos(ωᵀx + b) with Gaussian ω, a Gaussian kernel in short.

    Distances are measured in `width` · √inputs, which suits features of unit variance. The frequencies follow from the
    seed and are frozen; what is learnt is the classifier, which begins at zero.

    Args:
        inputs: numbers of one example; images are flattened, whatever their shape.
        classes: how many classes it tells apart, or how many outputs it has for another task.
        features: how many cosines.
        width: of the kernel: how far apart two rows may be and still count as alike.
        seed: which frequencies.
        head: length of a projection before the classifier, 0 for none.

    Example:
        >>> random_fourier(inputs=13, classes=2, features=100).classifier
        Linear(in_features=100, out_features=2, bias=True)
    """
    who = "random_fourier"
    inputs, features = whole(who, "inputs", inputs), whole(who, "features", features)
    if not _number(who, "width", width) > 0:
        reject(who, "width", width, "a number above 0")
    project, distance = nn.Linear(inputs, features), width * math.sqrt(inputs)

    def draw(numbers: torch.Generator) -> tuple[Tensor, Tensor]:
        frequencies = torch.randn(features, inputs, generator=numbers) / distance
        return frequencies, 2 * math.pi * torch.rand(features, generator=numbers)

    _freeze(project, draw, seed)
    net = stack(
        ("flatten", nn.Flatten()),
        ("frequencies", project),
        ("cosine", Cosine(features)),
        ("classifier", _blank(nn.Linear(features, whole(who, "classes", classes, 1)))),
    )
    return with_head(net, whole(who, "head", head, 0))


def _number(who: str, option: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        reject(who, option, value, "a number")
    return float(value)


@torch.no_grad()
def _freeze(
    layer: nn.Conv2d | nn.Linear, draw: Callable[[torch.Generator], tuple[Tensor, Tensor]], seed: object
) -> None:
    """Give a layer numbers that follow from the seed alone, and freeze it; one without memory gets none."""
    numbers = torch.Generator().manual_seed(whole("random features", "seed", seed, 0))
    if not layer.weight.is_meta:
        weight, bias = draw(numbers)
        layer.load_state_dict({"weight": weight, "bias": bias})
    layer.requires_grad_(False)


@torch.no_grad()
def _blank(layer: nn.Linear) -> nn.Linear:
    """The layer at zero, so that the whole network follows from its options."""
    layer.weight.zero_()
    layer.bias.zero_()
    return layer

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedfuse.errors import ConfigError
from fedfuse.models import lenet


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def published(weights: dict[str, Tensor], x: Tensor) -> Tensor:
    """The net as printed: convolution, ReLU, then pooling."""
    for name in ("conv1", "conv2"):
        x = functional.max_pool2d(
            functional.relu(functional.conv2d(x, weights[f"{name}.weight"], weights[f"{name}.bias"])), 2
        )
    x = x.flatten(1)
    for name in ("fc1", "fc2"):
        x = functional.relu(functional.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"]))
    return functional.linear(x, weights["classifier.weight"], weights["classifier.bias"])


@pytest.mark.parametrize(("channels", "size", "parameters"), [(3, 32, 62_006), (1, 28, 44_426)])
def test_published_parameter_counts(channels: int, size: int, parameters: int) -> None:
    assert count(lenet(channels=channels, size=size)) == parameters


@pytest.mark.parametrize(("channels", "size"), [(3, 32), (1, 28)])
def test_it_is_the_published_function_with_its_gradients(channels: int, size: int) -> None:
    torch.manual_seed(0)
    model = lenet(channels=channels, size=size).double()
    x, y = torch.randn(4, channels, size, size, dtype=torch.float64), torch.arange(4)
    names, values = zip(*model.named_parameters(), strict=True)
    ours = torch.autograd.grad(functional.cross_entropy(model(x), y), values)
    theirs = torch.autograd.grad(
        functional.cross_entropy(published(dict(zip(names, values, strict=True)), x), y), values
    )
    torch.testing.assert_close(model(x), published(dict(model.named_parameters()), x), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_small_images_get_padded_3x3_kernels() -> None:
    model = lenet(size=8)
    assert model.conv1.kernel_size == (3, 3)
    assert model.conv1.padding == (1, 1)
    assert count(model) == (9 * 6 + 6) + (6 * 9 * 16 + 16) + (64 * 120 + 120) + (120 * 84 + 84) + (84 * 10 + 10)


def test_widths_are_options() -> None:
    model = lenet(maps=[3, 5, 7], hidden=[11], size=36, classes=4)
    assert [m.out_channels for m in model if isinstance(m, nn.Conv2d)] == [3, 5, 7]
    assert model(torch.zeros(2, 1, 36, 36)).shape == (2, 4)


def test_bad_options() -> None:
    with pytest.raises(ConfigError, match="model lenet: size is 28, expected a whole number of at least 36"):
        lenet(maps=(3, 5, 7))
    with pytest.raises(ConfigError, match="model lenet: maps"):
        lenet(maps=())
    with pytest.raises(ConfigError, match="model lenet: size is '28'"):
        lenet(size="28")  # type: ignore[arg-type]

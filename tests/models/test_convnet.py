from __future__ import annotations

import math

import pytest
import torch
from scipy import stats
from torch import Tensor, nn
from torch.nn import functional

from fedfuse.errors import ConfigError
from fedfuse.models import convnet_ams, convnet_feddu


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def published(weights: dict[str, Tensor], x: Tensor) -> Tensor:
    """FedDU's CNN as printed: conv-ReLU-pool, conv-ReLU-pool, conv-ReLU, fc-ReLU, fc."""
    for name in ("conv1", "conv2", "conv3"):
        x = functional.relu(functional.conv2d(x, weights[f"{name}.weight"], weights[f"{name}.bias"]))
        x = x if name == "conv3" else functional.max_pool2d(x, 2)
    x = functional.relu(functional.linear(x.flatten(1), weights["fc1.weight"], weights["fc1.bias"]))
    return functional.linear(x, weights["classifier.weight"], weights["classifier.bias"])


def test_parameter_counts() -> None:
    assert count(convnet_feddu()) == 122_570
    assert count(convnet_feddu(classes=100)) == 122_570 + 90 * 65
    assert count(convnet_ams()) == 896 + 18_496 + 36_928 + (1024 * 128 + 128) + 1_290


def test_feddu_is_the_published_function() -> None:
    model, x = convnet_feddu().double(), torch.randn(3, 3, 32, 32, dtype=torch.float64)
    torch.testing.assert_close(model(x), published(dict(model.named_parameters()), x), rtol=1e-12, atol=1e-12)


def test_feddu_starts_from_hes_values() -> None:
    torch.manual_seed(0)
    model = convnet_feddu()
    for layer in model:
        if isinstance(layer, nn.Conv2d | nn.Linear):
            fan = 9 * layer.out_channels if isinstance(layer, nn.Conv2d) else layer.in_features
            drawn = layer.weight.detach().flatten().numpy()
            assert stats.kstest(drawn, "norm", (0, math.sqrt(2 / fan))).pvalue > 1e-3
            assert not layer.bias.any()


@pytest.mark.parametrize("make", [convnet_ams, convnet_feddu])
@pytest.mark.parametrize(("channels", "size"), [(3, 32), (1, 28), (3, 64)])
def test_sizes(make: type[nn.Module], channels: int, size: int) -> None:
    assert make(channels=channels, size=size)(torch.zeros(2, channels, size, size)).shape == (2, 10)


def test_widths_are_options() -> None:
    model = convnet_ams(widths=[4, 5], hidden=[], size=8)
    assert [type(m).__name__ for m in model if isinstance(m, nn.Conv2d | nn.Linear)] == [
        "Conv2d",
        "Conv2d",
        "Linear",
    ]
    with pytest.raises(ConfigError, match="model convnet_feddu: widths is 5, expected a list"):
        convnet_feddu(widths=5)  # type: ignore[arg-type]

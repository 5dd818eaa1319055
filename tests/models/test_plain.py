"""Fully connected networks and plain convolutional ones: counts, functions and starts as published."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from scipy import stats
from torch import Tensor, nn
from torch.nn import functional

from fedfuse.errors import ConfigError
from fedfuse.kernels.chain.trace import chain_of
from fedfuse.models import convnet_ams, convnet_feddu, lenet, mlp


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def published_lenet(weights: dict[str, Tensor], x: Tensor) -> Tensor:
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
        functional.cross_entropy(published_lenet(dict(zip(names, values, strict=True)), x), y), values
    )
    torch.testing.assert_close(model(x), published_lenet(dict(model.named_parameters()), x), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_small_images_get_padded_3x3_kernels() -> None:
    model = lenet(size=8)
    assert model.conv1.kernel_size == (3, 3)
    assert model.conv1.padding == (1, 1)
    assert count(model) == (9 * 6 + 6) + (6 * 9 * 16 + 16) + (64 * 120 + 120) + (120 * 84 + 84) + (84 * 10 + 10)


def test_lenets_widths_are_options() -> None:
    model = lenet(maps=[3, 5, 7], hidden=[11], size=36, classes=4)
    assert [m.out_channels for m in model if isinstance(m, nn.Conv2d)] == [3, 5, 7]
    assert model(torch.zeros(2, 1, 36, 36)).shape == (2, 4)


def test_bad_options_of_lenet_are_named() -> None:
    with pytest.raises(ConfigError, match="model lenet: size is 28, expected a whole number of at least 36"):
        lenet(maps=(3, 5, 7))
    with pytest.raises(ConfigError, match="model lenet: maps"):
        lenet(maps=())
    with pytest.raises(ConfigError, match="model lenet: size is '28'"):
        lenet(size="28")  # type: ignore[arg-type]


def published_feddu(weights: dict[str, Tensor], x: Tensor) -> Tensor:
    """FedDU's CNN as printed: conv-ReLU-pool, conv-ReLU-pool, conv-ReLU, fc-ReLU, fc."""
    for name in ("conv1", "conv2", "conv3"):
        x = functional.relu(functional.conv2d(x, weights[f"{name}.weight"], weights[f"{name}.bias"]))
        x = x if name == "conv3" else functional.max_pool2d(x, 2)
    x = functional.relu(functional.linear(x.flatten(1), weights["fc1.weight"], weights["fc1.bias"]))
    return functional.linear(x, weights["classifier.weight"], weights["classifier.bias"])


def test_parameter_counts_of_convnets() -> None:
    assert count(convnet_feddu()) == 122_570
    assert count(convnet_feddu(classes=100)) == 122_570 + 90 * 65
    assert count(convnet_ams()) == 896 + 18_496 + 36_928 + (1024 * 128 + 128) + 1_290


def test_feddu_is_the_published_function() -> None:
    model, x = convnet_feddu().double(), torch.randn(3, 3, 32, 32, dtype=torch.float64)
    torch.testing.assert_close(model(x), published_feddu(dict(model.named_parameters()), x), rtol=1e-12, atol=1e-12)


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


def linears(model: nn.Module) -> list[nn.Linear]:
    return [m for m in model.modules() if isinstance(m, nn.Linear)]


@pytest.mark.parametrize("hidden", [(), (100,), (200, 100), (100,) * 5])
def test_parameter_count(hidden: tuple[int, ...]) -> None:
    widths = (784, *hidden, 10)
    expected = sum(a * b + b for a, b in pairwise(widths))
    assert sum(p.numel() for p in mlp(hidden=hidden).parameters()) == expected


def test_the_function_is_affine_maps_with_relu_between() -> None:
    model = mlp(inputs=12, hidden=[5, 4], classes=3)
    x = torch.randn(6, 3, 2, 2)
    a, b, c = linears(model)
    expected = c(functional.relu(b(functional.relu(a(x.reshape(6, 12))))))
    torch.testing.assert_close(model(x), expected, rtol=0, atol=0)


def test_pfnm_starts_from_its_normal() -> None:
    torch.manual_seed(0)
    model = mlp(init="pfnm", head=16)
    for layer in linears(model):
        assert torch.equal(layer.bias, torch.full_like(layer.bias, 0.1))
        assert stats.kstest(layer.weight.detach().flatten().numpy(), "norm", (0, 0.1)).pvalue > 1e-3


def test_default_start_is_pytorchs() -> None:
    """U(−1/√in, 1/√in) for weights and biases."""
    torch.manual_seed(0)
    for layer in linears(mlp()):
        bound = 1 / math.sqrt(layer.in_features)
        for values in (layer.weight, layer.bias):
            drawn = values.detach().flatten().numpy()
            assert stats.kstest(drawn, "uniform", (-bound, 2 * bound)).pvalue > 1e-3


def test_bad_options_of_mlps_are_named() -> None:
    with pytest.raises(ConfigError, match="init is 'he', expected one of default, pfnm"):
        mlp(init="he")
    with pytest.raises(ConfigError, match=r"hidden\[1\] is 0"):
        mlp(hidden=(3, 0))
    with pytest.raises(ConfigError, match="inputs is 0"):
        mlp(inputs=0)


@pytest.mark.parametrize(("name", "function"), [("leaky_relu", nn.LeakyReLU()), ("tanh", nn.Tanh())])
def test_other_activations_and_no_output_bias(name: str, function: nn.Module) -> None:
    net = mlp(inputs=3, hidden=(4, 5), classes=2, activation=name, output_bias=False)
    x = torch.randn(6, 3)
    h = function(net.fc2(function(net.fc1(x))))
    assert torch.allclose(net(x), h @ net.classifier.weight.T)
    assert net.classifier.bias is None
    assert "classifier.bias" not in net.state_dict()
    with pytest.raises(ConfigError, match="activation is 'step'"):
        mlp(activation="step")


@pytest.mark.parametrize("activation", ["relu", "leaky_relu", "tanh"])
def test_compiled_kernels_know_them(activation: str) -> None:
    net = mlp(inputs=3, hidden=(4,), classes=2, activation=activation, output_bias=False)
    assert [type(layer).__name__ for layer in chain_of(net, (3,))] == ["Linear", "Activation", "Linear"]

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from scipy import stats
from torch import nn
from torch.nn import functional

from fedfuse.errors import ConfigError
from fedfuse.kernels.chain.trace import chain_of
from fedfuse.models import mlp


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


def test_bad_options() -> None:
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

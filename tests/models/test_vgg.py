from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor, nn
from torch.nn import functional

from fedfuse.errors import ConfigError
from fedfuse.models import vgg11, vgg16

SWA = [64, 64, "M", 128, 128, "M", 256, 256, 256, "M", 512, 512, 512, "M", 512, 512, 512]


def count(make: Any, **options: Any) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in make(**options).parameters())


def published(model: nn.Module, x: Tensor) -> Tensor:
    """SWA's VGG-16 in evaluation, as printed: conv, norm, ReLU, then 2×2 pooling where the list says M."""
    number = 0
    for entry in SWA:
        if entry == "M":
            x = functional.max_pool2d(x, 2)
            continue
        number += 1
        norm = model.get_submodule(f"conv{number}_norm")
        x = functional.conv2d(x, model.get_submodule(f"conv{number}").weight, padding=1)
        x = functional.relu(functional.batch_norm(x, norm.running_mean, norm.running_var, norm.weight, norm.bias))
    x = functional.avg_pool2d(x, 2).flatten(1)
    return model.classifier(functional.relu(model.fc2(functional.relu(model.fc1(x)))))


def convolutions(widths: list[int], bias: bool, norm: bool) -> int:
    return sum(9 * a * b + b * (bias + 2 * norm) for a, b in zip([3, *widths], widths, strict=False))


def test_parameter_counts() -> None:
    deep = [64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512]
    shallow = [64, 128, 256, 256, 512, 512, 512, 512]
    swa_tail = 512 * 4096 + 4096 + 4096 * 4096 + 4096 + 4096 * 10 + 10
    assert count(vgg16) == convolutions(deep, False, True) + swa_tail
    assert count(vgg16, norm=False) == convolutions(deep, True, False) + swa_tail
    assert count(vgg11) == convolutions(shallow, True, True) + 2 * (512 * 512 + 512) + 5130
    assert count(vgg11, hidden=(), norm=False, bias="none") == convolutions(shallow, False, False) + 5120
    head = 512 * 512 + 512 + 512 * 256 + 256 + 256 * 10 + 10
    assert count(vgg11, hidden=(), head=256) == convolutions(shallow, True, True) + head


def test_vgg16_is_the_published_function() -> None:
    torch.manual_seed(0)
    model = vgg16(widths=0.125, hidden=(32, 16)).double().eval()
    for norm in (m for m in model if isinstance(m, nn.BatchNorm2d)):
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2)
        nn.init.normal_(norm.weight)  # a negative scale turns minima into maxima: the order must not matter
        nn.init.normal_(norm.bias)
    x = torch.randn(3, 3, 32, 32, dtype=torch.float64)
    torch.testing.assert_close(model(x), published(model, x), rtol=1e-12, atol=1e-12)


def test_vgg16_starts_from_swas_values() -> None:
    torch.manual_seed(0)
    for layer in vgg16(widths=0.25, hidden=(256, 256)):
        if isinstance(layer, nn.BatchNorm2d):
            assert torch.equal(layer.weight, torch.full_like(layer.weight, 0.5))
            assert not layer.bias.any()
            assert not layer.running_mean.any()
            assert (layer.running_var == 1).all()
            assert layer.num_batches_tracked == 0
        elif isinstance(layer, nn.Conv2d | nn.Linear):
            std = math.sqrt(2 / (9 * layer.out_channels)) if isinstance(layer, nn.Conv2d) else 0.01
            assert stats.kstest(layer.weight.detach().flatten().numpy(), "norm", (0, std)).pvalue > 1e-3


def test_dropout_acts_in_training_only() -> None:
    torch.manual_seed(0)
    model, x = vgg16(widths=0.0625, hidden=(64, 64)), torch.randn(4, 3, 32, 32)
    assert [m.p for m in model if isinstance(m, nn.Dropout)] == [0.5, 0.5]
    assert not torch.equal(model(x), model(x))
    model.eval()
    assert torch.equal(model(x), model(x))
    assert not any(isinstance(m, nn.Dropout) for m in vgg11(widths=0.0625).modules())


@pytest.mark.parametrize("size", [32, 64])
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("make", [vgg11, vgg16])
def test_sizes(make: Any, norm: bool, size: int) -> None:
    model = make(size=size, widths=0.0625, hidden=(16,), norm=norm, classes=200)
    assert model(torch.zeros(2, 3, size, size)).shape == (2, 200)


def test_biases_are_where_they_were_asked_for() -> None:
    def biased(**options: Any) -> tuple[set[bool], set[bool]]:
        model = vgg16(widths=0.0625, hidden=(8,), **options)
        kinds = ([m for m in model if isinstance(m, kind)] for kind in (nn.Conv2d, nn.Linear))
        convs, linears = ({m.bias is not None for m in layers} for layers in kinds)
        return convs, linears

    assert biased() == biased(bias="linear") == ({False}, {True})
    assert biased(norm=False) == biased(bias="all") == ({True}, {True})
    assert biased(bias="none") == ({False}, {False})


def test_explicit_widths() -> None:
    model = vgg11(widths=list(range(1, 9)), hidden=[])
    assert [m.out_channels for m in model if isinstance(m, nn.Conv2d)] == list(range(1, 9))


@pytest.mark.parametrize(
    "options",
    [{"widths": [4]}, {"norm": "no"}, {"bias": "some"}, {"bias": True}, {"dropout": 1.0}, {"hidden": 512}],
)
@pytest.mark.parametrize("make", [vgg11, vgg16])
def test_bad_options_are_named(make: Any, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"model {make.__name__}: {next(iter(options))} is"):
        make(**options)

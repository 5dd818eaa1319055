"""VGGs and ResNets: counts, functions and starts as published, and how their channels hang together."""

from __future__ import annotations

import copy
import itertools
import math
from typing import Any

import pytest
import torch
import torch_pruning
from scipy import stats
from torch import Tensor, fx, nn
from torch.nn import functional

from fedfuse.errors import ConfigError
from fedfuse.models import resnet18, resnet50, vgg11, vgg16
from fedfuse.models.deep import Residual

SWA = [64, 64, "M", 128, 128, "M", 256, 256, 256, "M", 512, 512, 512, "M", 512, 512, 512]


def count(make: Any, **options: Any) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in make(**options).parameters())


def published_vgg16(model: nn.Module, x: Tensor) -> Tensor:
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


def test_parameter_counts_of_vggs() -> None:
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
    torch.testing.assert_close(model(x), published_vgg16(model, x), rtol=1e-12, atol=1e-12)


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


def blocks(model: nn.Module) -> list[Residual]:
    return [m for m in model.modules() if isinstance(m, Residual)]


def settled(model: nn.Module) -> nn.Module:
    """The model in evaluation, its BatchNorms far from their trivial start."""
    torch.manual_seed(5)
    for norm in (m for m in model.modules() if isinstance(m, nn.BatchNorm2d)):
        norm.running_mean.normal_(0, 0.3)
        norm.running_var.uniform_(0.5, 2)
        nn.init.uniform_(norm.weight, 0.5, 1.5)
        nn.init.normal_(norm.bias, 0, 0.3)
    return model.eval()


def test_parameter_counts_of_resnets() -> None:
    """The counts of He et al.'s networks with a 3×3 stem; ImageNet's has 7×7."""
    assert count(resnet18) == 11_173_962
    assert count(resnet50) == 23_520_842
    assert count(resnet50, classes=1000) == 25_557_032 - 64 * 3 * (49 - 9)
    biases = sum(m.out_channels for m in resnet18(widths=0.25).modules() if isinstance(m, nn.Conv2d))
    assert count(resnet18, bias=True, widths=0.25) == count(resnet18, widths=0.25) + biases


def test_depths_are_in_the_names() -> None:
    """18 and 50 count the convolutions outside shortcuts, and the classifier."""
    for make, depth in ((resnet18, 18), (resnet50, 50)):
        convs = [n for n, m in make(widths=0.0625).named_modules() if isinstance(m, nn.Conv2d) and "shortcut" not in n]
        assert len(convs) + 1 == depth


@pytest.mark.parametrize("make", [resnet18, resnet50])
@pytest.mark.parametrize("size", [32, 64])
def test_stages_halve_the_image(make: Any, size: int) -> None:
    model = make(widths=0.0625, size=size).eval()
    sides: list[int] = []
    for i in range(1, 5):
        model.get_submodule(f"stage{i}").register_forward_hook(lambda *call: sides.append(call[2].shape[-1]))
    assert model(torch.zeros(2, 3, size, size)).shape == (2, 10)
    assert sides == [size, size // 2, size // 4, size // 8]


def test_the_stride_of_a_bottleneck_sits_on_its_3x3() -> None:
    first = resnet50(widths=0.0625).stage2[0]
    assert [first.body.get_submodule(f"conv{i}").stride for i in (1, 2, 3)] == [(1, 1), (2, 2), (1, 1)]
    assert first.shortcut.conv.stride == (2, 2)


def test_a_block_is_its_formula() -> None:
    torch.manual_seed(0)
    model = settled(resnet18(widths=0.0625))
    for block in blocks(model):
        x = torch.randn(2, block.body.conv1.in_channels, 8, 8)
        keep = x if isinstance(block.shortcut, nn.Identity) else block.shortcut.conv_norm(block.shortcut.conv(x))
        inner = torch.relu(block.body.conv1_norm(block.body.conv1(x)))
        expected = torch.relu(block.body.conv2_norm(block.body.conv2(inner)) + keep)
        torch.testing.assert_close(block(x), expected, rtol=0, atol=0)


def test_shortcuts_project_only_where_shapes_change() -> None:
    small, large = resnet18(widths=0.0625), resnet50(widths=0.0625)
    projections = [[not isinstance(b.shortcut, nn.Identity) for b in blocks(m)] for m in (small, large)]
    assert projections[0] == [False, False, True, False, True, False, True, False]
    assert [i for i, is_projection in enumerate(projections[1]) if is_projection] == [0, 3, 7, 13]


def test_start_is_hes() -> None:
    torch.manual_seed(0)
    model = resnet18(widths=0.25, bias=True)
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):
            std = math.sqrt(2 / (math.prod(layer.kernel_size) * layer.out_channels))
            assert stats.kstest(layer.weight.detach().flatten().numpy(), "norm", (0, std)).pvalue > 1e-3
            assert not layer.bias.any()
        elif isinstance(layer, nn.BatchNorm2d):
            assert (layer.weight == 1).all()
            assert (layer.running_var == 1).all()
            assert not layer.running_mean.any()


def test_fx_sees_every_addition() -> None:
    graph = fx.symbolic_trace(resnet50(widths=0.0625)).graph
    assert sum(node.op == "call_function" and node.target.__name__ == "add" for node in graph.nodes) == 16


@pytest.mark.parametrize("make", [resnet18, resnet50])
def test_removing_inner_channels_equals_silencing_them(make: Any) -> None:
    model, x = settled(make(widths=0.125)), torch.randn(2, 3, 32, 32)
    silent = copy.deepcopy(model)
    norm, gone = silent.stage2[1].body.conv1_norm, [0, 3]
    with torch.no_grad():
        norm.weight[gone], norm.bias[gone] = 0.0, 0.0
    expected: Tensor = silent(x)
    _remove(model, model.stage2[1].body.conv1, gone, x)
    assert model.stage2[1].body.conv1.out_channels == norm.num_features - 2
    assert model.stage2[1].body.conv2.in_channels == norm.num_features - 2
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)


def test_channels_joined_by_additions_go_together() -> None:
    model, x = settled(resnet18(widths=0.125)), torch.randn(2, 3, 32, 32)
    _remove(model, model.stage1[0].body.conv2, [1], x)
    joined = [model.conv1, model.stage1[0].body.conv2, model.stage1[1].body.conv2]
    assert [conv.out_channels for conv in joined] == [7, 7, 7]
    assert [conv.in_channels for conv in (model.stage2[0].body.conv1, model.stage2[0].shortcut.conv)] == [
        7,
        7,
    ]
    assert model(x).shape == (2, 10)


def _remove(model: nn.Module, conv: nn.Module, channels: list[int], x: Tensor) -> None:
    graph = torch_pruning.DependencyGraph().build_dependency(model, example_inputs=x)
    graph.get_pruning_group(conv, torch_pruning.prune_conv_out_channels, idxs=channels).prune()


BAD_VGG = [{"widths": [4]}, {"norm": "no"}, {"bias": "some"}, {"bias": True}, {"dropout": 1.0}, {"hidden": 512}]
BAD_RESNET = [{"widths": [4, 4]}, {"widths": 0}, {"bias": 1}, {"size": 4}, {"channels": 0}]


@pytest.mark.parametrize(
    ("make", "options"),
    [*itertools.product((vgg11, vgg16), BAD_VGG), *itertools.product((resnet18, resnet50), BAD_RESNET)],
)
def test_bad_options_are_named(make: Any, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"model {make.__name__}: {next(iter(options))} is"):
        make(**options)

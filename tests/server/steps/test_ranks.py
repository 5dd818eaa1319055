"""Ranks of feature maps, against numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedfuse.core.model import Single
from fedfuse.core.spec import Spec
from fedfuse.server.steps.prune import feature_ranks, map_ranks


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ranks_are_numpys(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    low = torch.randn(6, 5, 9, 2, generator=draw).to(dtype) @ torch.randn(6, 5, 2, 7, generator=draw).to(dtype)
    maps = torch.cat(
        [low, torch.randn(6, 5, 9, 7, generator=draw).to(dtype).relu(), torch.zeros(6, 1, 9, 7).to(dtype)], 1
    )
    assert map_ranks(maps).tolist() == np.linalg.matrix_rank(maps.numpy()).tolist()


def test_a_coarser_tolerance_sees_less() -> None:
    almost = torch.diag(torch.tensor([1.0, 0.5, 1e-4]))
    assert int(map_ranks(almost)) == 3
    assert int(map_ranks(almost, tolerance=1e-3)) == 2


def test_maps_are_taken_after_the_relu_and_before_pooling() -> None:
    torch.manual_seed(0)
    spec, x = Spec("lenet"), torch.rand(130, 1, 28, 28)
    model = Single.of(spec.build(), spec)
    found = feature_ranks(model, x, ["conv1"])["conv1"]
    w = model.posterior.mean
    maps = F.conv2d(x, w["conv1.weight"], w["conv1.bias"]).relu()
    want = np.linalg.matrix_rank(maps.numpy()).mean(0) / 24
    assert np.allclose(found.numpy(), want)


def test_a_norm_belongs_to_its_layer() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(3 * 36, 2))
    with torch.no_grad():
        net[1].bias.copy_(torch.tensor([-100.0, 100.0, 0.0]))  # dead, all lit, half lit
    spec = Spec.of(net)
    model, x = Single.of(net, spec), torch.rand(9, 1, 8, 8)
    found = feature_ranks(model, x, ["0"])["0"]
    maps = net.eval()[1](net[0](x)).relu().detach().numpy()
    assert np.allclose(found.numpy(), np.linalg.matrix_rank(maps).mean(0) / 6)
    assert found[0] == 0


def test_a_units_rank_is_how_often_it_is_lit() -> None:
    torch.manual_seed(0)
    spec = Spec("mlp", {"inputs": 4, "hidden": [5], "classes": 2})
    model, x = Single.of(spec.build(), spec), torch.randn(50, 4)
    lit = (x @ model.posterior.mean["fc1.weight"].T + model.posterior.mean["fc1.bias"] > 0).double().mean(0)
    assert torch.allclose(feature_ranks(model, x, ["fc1"])["fc1"], lit)

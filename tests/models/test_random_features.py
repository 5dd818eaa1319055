"""Networks of random features: what the papers ask of the filters, and that they follow from the seed."""

from __future__ import annotations

import pytest
import torch

from fedfuse.core.spec import Spec
from fedfuse.errors import ConfigError
from fedfuse.models import random_convolution, random_fourier


def test_filters_have_zero_mean_and_unit_norm_and_are_frozen() -> None:
    net = random_convolution(channels=3, size=32, filters=5, seed=4)
    weight = net.filters.weight
    assert torch.allclose(weight.mean((1, 2, 3)), torch.zeros(5), atol=1e-6)
    assert torch.allclose(weight.flatten(1).norm(dim=1), torch.ones(5), atol=1e-6)
    assert [n for n, p in net.named_parameters() if p.requires_grad] == ["classifier.weight", "classifier.bias"]
    assert net(torch.rand(2, 3, 32, 32)).shape == (2, 10)


def test_the_seed_is_all_there_is_to_it() -> None:
    for make in (random_convolution, random_fourier):
        torch.manual_seed(0)
        one = make(seed=1).state_dict()
        torch.manual_seed(5)
        same, other = make(seed=1).state_dict(), make(seed=2).state_dict()
        assert all(one[n].equal(same[n]) for n in one)
        assert not all(one[n].equal(other[n]) for n in one)


def test_cosines_approximate_a_gaussian_kernel() -> None:
    net = random_fourier(inputs=4, features=20_000, width=0.8)
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    features = net[:-1](x)
    kernel = (-torch.cdist(x, x).square() / (2 * 0.8**2 * 4)).exp()
    assert torch.allclose(features @ features.T, kernel, atol=0.03)


def test_small_pictures_get_smaller_kernels_and_pools() -> None:
    net = random_convolution(size=5, filters=2)
    assert net(torch.rand(1, 1, 5, 5)).shape == (1, 10)
    assert random_convolution(size=1, filters=2)(torch.rand(1, 1, 1, 1)).isfinite().all()


def test_shapes_are_known_without_memory_and_options_are_checked() -> None:
    assert Spec("random_convolution", {"filters": 10**11}).shapes()["filters.weight"][0] == (10**11, 1, 6, 6)
    with pytest.raises(ConfigError, match="model random_fourier: width is -1"):
        random_fourier(width=-1)
    with pytest.raises(ConfigError, match="seed is -1"):
        random_convolution(seed=-1)

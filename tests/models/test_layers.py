from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from fedfuse.errors import ConfigError
from fedfuse.models import layers


def test_numbers_of_numpy_are_whole_numbers() -> None:
    assert layers.whole("m", "size", np.int64(8)) == 8


@pytest.mark.parametrize("value", [0, -1, 2.0, True, "2", None])
def test_what_is_not_a_whole_number_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match=r"^model m: size is .*, expected a whole number of at least 1; .*$"):
        layers.whole("m", "size", value)


@pytest.mark.parametrize("value", [3, "12", None, [], [4, 0], [4, "x"]])
def test_what_is_no_list_of_widths_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="model m: hidden"):
        layers.wholes("m", "hidden", value, 1)


@pytest.mark.parametrize("value", [0, -0.5, float("nan"), float("inf"), 1e308, True, "1", "12", [8], [8, 8, 8], [8, 0]])
def test_what_does_not_scale_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="model m: widths"):
        layers.scale_widths("m", value, (64, 128))


def test_a_small_multiplier_leaves_one_channel() -> None:
    assert layers.scale_widths("m", 0.001, (64, 128)) == (1, 1)
    assert layers.scale_widths("m", 2, (64, 128)) == (128, 256)


@pytest.mark.parametrize("value", [-0.1, 1, 1.5, float("nan"), True, "0.5"])
def test_what_is_no_share_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="model m: dropout"):
        layers.share("m", "dropout", value)


def test_words_are_not_flags_and_unknown_words_are_refused() -> None:
    with pytest.raises(ConfigError, match="model m: norm is 'no', expected true or false"):
        layers.flag("m", "norm", "no")
    with pytest.raises(ConfigError, match="model m: init is 'he', expected one of a, b"):
        layers.one_of("m", "init", "he", ("a", "b"))


def test_a_message_cannot_be_flooded() -> None:
    with pytest.raises(ConfigError) as caught:
        layers.whole("m", "size", "x" * 10_000)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("pooled", [(True,), (False,), (True, True), (True, True, False), (False, True, False, True)])
@pytest.mark.parametrize(("kernel", "padding"), [(3, 0), (3, 1), (5, 0), (5, 2)])
def test_sides_are_those_of_the_layers(pooled: tuple[bool, ...], kernel: int, padding: int) -> None:
    least = layers.least_size(pooled, kernel, padding)
    assert layers.side_after(least, pooled, kernel, padding) == 1
    net = layers.stack(*layers.convolutions((1,) * (len(pooled) + 1), pooled, kernel=kernel, padding=padding))
    for size in range(least, least + 9):
        side = layers.side_after(size, pooled, kernel, padding)
        assert net(torch.zeros(1, 1, size, size)).shape[-2:] == (side, side)
    if least > 1:
        assert layers.side_after(least - 1, pooled, kernel, padding) < 1


def test_pooling_before_the_relu_changes_neither_values_nor_gradients() -> None:
    x = torch.randn(4, 3, 12, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ours = nn.Sequential(nn.MaxPool2d(2), nn.ReLU())
    usual = nn.Sequential(nn.ReLU(), nn.MaxPool2d(2))
    grads = []
    for net in (ours, usual):
        at = x.clone().requires_grad_()
        (net(at) ** 2).sum().backward()
        grads.append(at.grad)
    assert torch.equal(ours(x), usual(x))
    assert torch.equal(*grads)


def test_filled_draws_each_value_once() -> None:
    """The generator has moved exactly as far as the weights need."""
    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(40, 30))
    torch.manual_seed(0)
    layers.initialize(net, lambda m: layers.draw_normal(m, 0.5) if isinstance(m, nn.Linear) else None)
    after = torch.get_rng_state()
    torch.manual_seed(0)
    expected = torch.empty(30, 40).normal_(0, 0.5)
    assert torch.equal(net[0].weight, expected)
    assert torch.equal(torch.get_rng_state(), after)
    assert not net[0].bias.any()


def test_filled_respects_the_default_dtype() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            net = nn.Sequential(nn.Linear(2, 2))
    finally:
        torch.set_default_dtype(torch.float32)
    assert layers.initialize(net, layers.default_init)[0].weight.dtype == torch.float64

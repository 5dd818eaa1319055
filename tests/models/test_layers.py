"""What model factories share: checked options, named stacks, initial values, and heads."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from fedfuse.errors import ConfigError
from fedfuse.models import add_projection, layers, lenet


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


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


class Custom(nn.Module):
    """A user's model whose classifier hides two levels deep and has no bias."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 5)
        self.tail = nn.ModuleDict({"out": nn.Sequential(nn.ReLU(), nn.Linear(5, 3, bias=False))})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tail["out"](self.body(x))


def test_moons_lenet() -> None:
    """84 → 84 → 256 → 10 after the encoder of 62,006 − 850 parameters."""
    model = lenet(channels=3, size=32, head=256)
    assert count(model) == 62_006 - 850 + (84 * 84 + 84) + (84 * 256 + 256) + (256 * 10 + 10)


def test_the_function_is_the_formula() -> None:
    model = add_projection(Custom().double(), hidden=4, out=7)
    x = torch.randn(9, 6, dtype=torch.float64)
    inner, projection, logits = (model.tail["out"][1].get_submodule(n) for n in ("inner", "projection", "logits"))
    h = functional.relu(model.body(x))
    expected = functional.relu(h @ inner.weight.T) @ projection.weight.T @ logits.weight.T
    torch.testing.assert_close(model(x), expected)


def test_the_head_lives_where_the_classifier_lived() -> None:
    model = add_projection(Custom().double().eval())
    head = model.tail["out"][1]
    assert {p.dtype for p in head.parameters()} == {torch.float64}
    assert [p.shape for p in head.parameters()] == [(5, 5), (256, 5), (3, 256)]  # no biases: there was none
    assert not any(m.training for m in head.modules())
    assert list(model.state_dict())[:2] == ["body.weight", "body.bias"]


def test_the_model_itself_is_changed() -> None:
    model = Custom()
    body = model.body.weight
    assert add_projection(model) is model
    assert model.body.weight is body


def test_a_bare_linear_layer_becomes_the_head() -> None:
    head = add_projection(nn.Linear(4, 2), out=8)
    assert head(torch.zeros(3, 4)).shape == (3, 2)
    assert [type(m) for m in head] == [nn.Linear, nn.ReLU, nn.Linear, nn.Linear]


def test_bad_heads_are_refused() -> None:
    with pytest.raises(ConfigError, match="Sequential has no linear layer"):
        add_projection(nn.Sequential(nn.Conv2d(1, 1, 1)))
    with pytest.raises(ConfigError, match="out is 0"):
        add_projection(Custom(), out=0)
    with pytest.raises(ConfigError, match="hidden is -3"):
        add_projection(Custom(), hidden=-3)

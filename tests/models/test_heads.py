from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from fedfuse.errors import ConfigError
from fedfuse.models import add_projection, lenet


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

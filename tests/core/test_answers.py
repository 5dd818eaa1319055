"""Which of a network's outputs are its logits."""

from __future__ import annotations

import copy
from collections import namedtuple

import pytest
import torch
from torch import Tensor, nn

from fedfuse.core.spec import ChooseOutput, Spec, choose_output, logits_in, output_of, validate_output
from fedfuse.errors import ConfigError

Two = namedtuple("Two", ["features", "logits"])


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Two:
        return Two(x, self.fc(x))


@pytest.mark.parametrize(
    ("out", "output"),
    [
        ((1, torch.ones(1)), 1),
        ([torch.ones(1), 2], 0),
        ([3, torch.ones(1)], -1),
        ({"logits": torch.ones(1)}, "logits"),
        ({0: torch.ones(1)}, 0),
        (Two(None, torch.ones(1)), "logits"),
        (Two(None, torch.ones(1)), 1),
    ],
)
def test_a_place_a_key_or_an_attribute(out: object, output: int | str) -> None:
    assert ChooseOutput(output)(nn.Identity(), (), out).equal(torch.ones(1))


@pytest.mark.parametrize(
    ("out", "output", "sentence"),
    [
        ((torch.ones(1),), 1, r"output = 1 is not there: the network gives a tuple of \(Tensor\); choose another one"),
        ((torch.ones(1), 5), 1, "output = 1 is no tensor: .*: output = 0"),
        ({"a": torch.ones(1)}, "b", "output = 'b' is not there: the network gives a dict with 'a'; .*: output = 'a'"),
        (torch.ones(1), "T", "output = 'T' is not there: the network gives a Tensor; leave `output` out"),
        (None, 0, "the network gives a NoneType; it gives no tensor"),
    ],
)
def test_what_is_not_there_is_told_with_what_is(out: object, output: int | str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        ChooseOutput(output)(nn.Identity(), (), out)


def test_a_new_choice_takes_the_place_of_the_old_one() -> None:
    net = choose_output(choose_output(Both(), 0), "logits")
    assert output_of(net) == output_of(copy.deepcopy(net)) == "logits"
    assert net(torch.ones(4, 2)).shape == (4, 3)
    assert list(net.state_dict()) == ["fc.weight", "fc.bias"]
    assert output_of(Both()) is None


def test_a_spec_carries_the_choice() -> None:
    spec = Spec.of(Both(), "logits")
    assert spec.to_json() == {"factory": f"{__name__}:Both", "options": {}, "output": "logits"}
    assert Spec.from_json(spec.to_json(), {spec.factory}).output == "logits"
    assert (hash(spec) != hash(Spec.of(Both())), "output" in Spec("mlp").to_json()) == (True, False)
    assert Spec.of(spec.build()).output == "logits"
    x = torch.ones(2, 2)
    weights = spec.build().state_dict()
    assert spec.forward(weights, x).equal(spec.build()(x))
    with pytest.raises(ConfigError, match=r"gives a Two of \(Tensor, Tensor\), expected logits; say which: output = 0"):
        Spec.of(Both()).forward(weights, x)


@pytest.mark.parametrize("output", [True, 1.5, "", [0], 10**6])
def test_a_choice_is_a_place_or_a_name(output: object) -> None:
    with pytest.raises(ConfigError, match="expected a place such as 0 or a name such as 'logits'"):
        validate_output(output)
    with pytest.raises(ConfigError, match="expected a place"):
        Spec.from_json({"factory": "mlp", "output": output})


def test_logits_are_a_tensor() -> None:
    assert logits_in(torch.ones(1), "mlp").equal(torch.ones(1))
    with pytest.raises(ConfigError, match="model 'mlp' gives a dict with 'a', expected logits; it gives no tensor"):
        logits_in({"a": 1}, "mlp")

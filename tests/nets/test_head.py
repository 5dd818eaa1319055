"""Networks with more or fewer outputs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedfuse.core.messages import Start
from fedfuse.core.model import Single, outputs
from fedfuse.core.spec import Spec
from fedfuse.errors import ConfigError
from fedfuse.nets.head import UnknownClass, with_outputs

SPECS = [Spec("mlp", {"inputs": 16, "classes": 3}), Spec("lenet", {"size": 4, "classes": 3})]


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.factory)
def test_more_outputs_leave_the_others_as_they_were(spec: Spec) -> None:
    start, x = Start(spec, spec.build().state_dict()), torch.randn(4, 1, 4, 4)
    wide = with_outputs(start, 5, seed=0)
    answer = wide.spec.forward(wide.params, x)
    assert answer.shape == (4, 5)
    assert torch.allclose(answer[:, :3], spec.forward(start.params, x), atol=1e-6)
    again = with_outputs(start, 5, seed=0)
    assert all(again.params[n].equal(wide.params[n]) for n in wide.params), "same seed, same numbers"
    back = with_outputs(wide, 3, seed=0)
    assert back.spec == spec
    assert all(back.params[n].equal(t) for n, t in start.params.items())
    assert with_outputs(start, 3, seed=0) is start


def test_new_outputs_begin_as_pytorch_begins_a_linear_layer() -> None:
    spec = Spec("mlp", {"inputs": 4, "hidden": [400], "classes": 2})
    wide = with_outputs(Start(spec, spec.build().state_dict()), 102, seed=1)
    fresh = wide.params["classifier.weight"][2:]
    assert fresh.abs().max() <= 1 / 20
    assert abs(float(fresh.var()) - (1 / 10) ** 2 / 12) < 5e-5


def test_the_unknown_class_is_one_more_and_only_once() -> None:
    spec = SPECS[0]
    plain = Single.of(spec.build(), spec)
    dress = UnknownClass()
    wide = dress(plain, classes=3, seed=0)
    assert outputs(wide) == 4
    assert dress(wide, classes=3, seed=0) is wide
    assert outputs(dress(plain, classes=0, seed=0)) == 4, "where the classes are not told"
    assert dress(wide, classes=0, seed=0) is wide


def test_a_network_without_a_linear_layer_cannot_change_its_outputs() -> None:
    spec = Spec.of(nn.Conv2d(1, 2, 3))
    with pytest.raises(ConfigError, match="no linear layer at its end"):
        with_outputs(Start(spec, spec.build().state_dict()), 3, seed=0)

"""What inputs look like, wherever that is known."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedfuse.core.inputs import InputForm
from fedfuse.core.rows import Rows
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench
from fedfuse.errors import RecipeError
from fedfuse.server.inputs import input_form


def test_the_shape_of_an_input_is_found_wherever_it_is_known() -> None:
    lenet = Spec("lenet", {"channels": 3, "size": 20})
    rows = Rows(torch.zeros(2, 3, 24, 24), torch.zeros(2, dtype=torch.long))
    assert input_form(Bench(rows), lenet).shape == (3, 24, 24)
    assert input_form(Bench(unlabelled=rows.x), lenet).shape == (3, 24, 24)
    assert input_form(Bench(inputs=InputForm((3, 22, 22))), lenet).shape == (3, 22, 22)
    assert input_form(Bench(), lenet).shape == (3, 20, 20)
    assert input_form(Bench(), Spec("lenet")).shape == (1, 28, 28)
    assert input_form(Bench(), Spec("resnet18", {"widths": 0.1})).shape == (3, 32, 32)
    assert input_form(Bench(), Spec("bayesian", {"of": lenet.to_json()})).shape == (3, 20, 20)
    assert input_form(Bench(), Spec.of(nn.Sequential(nn.Linear(7, 3)))).shape == (7,)
    with pytest.raises(RecipeError, match="nobody says what its inputs look like; give the server some rows"):
        input_form(Bench(), Spec.of(nn.Sequential(nn.Conv2d(1, 2, 3))))


def test_the_form_of_inputs_is_found_where_it_is_said() -> None:
    spec = Spec("mlp", {"inputs": 4, "classes": 2})
    rows = Rows(torch.randn(10, 4), torch.zeros(10, dtype=torch.int64))
    said = InputForm((3, 9, 9), (-1.0,), (2.0,))
    assert input_form(Bench(rows=rows, inputs=said), spec) is said
    assert input_form(Bench(rows=rows), Spec("lenet")).shape == (4,)
    assert input_form(Bench(unlabelled=torch.ones(2, 1, 5, 5)), spec).shape == (1, 5, 5)
    assert input_form(Bench(), spec).shape == (4,)
    assert input_form(Bench(), Spec("lenet", {"channels": 3})).shape == (3, 28, 28)
    assert input_form(Bench(), Spec.of(nn.Linear(3, 2))).shape == (3,)

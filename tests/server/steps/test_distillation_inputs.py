"""Where inputs come from."""

from __future__ import annotations

import pytest
import torch

from fedfuse.core.model import Single
from fedfuse.core.rows import Rows
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench
from fedfuse.errors import RecipeError
from fedfuse.server.steps.synthesize import ServerInputs, UnlabelledInputs, server_inputs

SPEC = Spec("mlp", {"inputs": 4, "classes": 2})
ROWS = Rows(torch.randn(10, 4), torch.zeros(10, dtype=torch.int64))


def test_given_inputs_come_once() -> None:
    teacher, student = Single.of(SPEC.build(), SPEC), SPEC.build()
    bench = Bench(rows=ROWS, unlabelled=torch.ones(3, 4))
    assert ServerInputs()(0, teacher, student, bench).equal(ROWS.x)
    assert len(ServerInputs()(1, teacher, student, bench)) == 0
    assert UnlabelledInputs()(0, teacher, student, bench).equal(torch.ones(3, 4))
    assert len(UnlabelledInputs()(5, teacher, student, bench)) == 0
    with pytest.raises(RecipeError, match=r"set data\.unlabelled"):
        UnlabelledInputs()(0, teacher, student, Bench())
    with pytest.raises(RecipeError, match=r"set data\.server_fraction"):
        ServerInputs()(0, teacher, student, Bench())


def test_held_inputs_are_a_seeded_sample_of_the_servers_own() -> None:
    found = server_inputs(Bench(rows=ROWS, unlabelled=torch.ones(3, 4)), 6, "probe")
    assert found is not None
    x, source = found
    assert source == "server"
    assert len(x) == 6
    assert all(bool((ROWS.x == row).all(1).any()) for row in x)
    again = server_inputs(Bench(rows=ROWS), 6, "probe")
    assert again is not None
    assert again[0].equal(x)
    bare = server_inputs(Bench(unlabelled=torch.ones(3, 4)), 6, "probe")
    assert bare is not None
    assert (len(bare[0]), bare[1]) == (3, "unlabelled")
    assert server_inputs(Bench(), 6, "probe") is None

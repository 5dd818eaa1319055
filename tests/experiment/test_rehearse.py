"""One step before the first: what a network cannot do for a method is said before anybody trains."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fedfuse
from fedfuse.core.inputs import InputForm
from fedfuse.core.messages import Brief
from fedfuse.core.rows import Rows
from fedfuse.core.settings import LocalSettings
from fedfuse.core.spec import Spec
from fedfuse.data import outline
from fedfuse.errors import FuseError
from fedfuse.experiment.config import Experiment
from fedfuse.experiment.prepare import prepare, rehearse, some_rows

Tiny = Callable[..., Experiment]

NETS = """
import torch
from torch import nn

class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.top = nn.Conv2d(1, 2, 3), nn.Linear(72, 10)

    def forward(self, x):
        h = self.conv(x)
        return self.top(h.view(h.size(0), -1))

class OnlyAsked(Plain):
    def forward(self, x):
        if self.training:
            raise ValueError("I was written to be asked\\nand not to learn")
        return super().forward(x)

class Pair(Plain):
    def forward(self, x):
        return {"features": x, "logits": super().forward(x)}

class Waves(Plain):
    def __init__(self):
        super().__init__()
        self.register_buffer("wave", torch.ones(1, dtype=torch.complex64))

class Frozen(Plain):
    def __init__(self):
        super().__init__()
        self.requires_grad_(False)

class Convolved(nn.Module):
    def __init__(self):
        super().__init__()
        self.top = nn.Conv2d(1, 10, 8)

    def forward(self, x):
        return self.top(x).flatten(1)

class Named(Plain):
    def __init__(self, output=3):
        super().__init__()
        self.output = output
"""


@pytest.fixture(autouse=True)
def _nets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "her_nets.py").write_text(NETS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "her_nets", raising=False)


def complaint(experiment: Experiment) -> str:
    with pytest.raises(FuseError) as caught:
        prepare(experiment).check()
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("model", "method", "expected"),
    [
        ("OnlyAsked", "fedavg", "cannot train by 'fedavg': one step on two rows ends in ValueError: I was written"),
        ("Waves", "fedavg", "tensor 'wave' is torch.complex64, which safetensors files do not carry"),
        ("Frozen", "fedavg", "has nothing to train: all its parameters are frozen"),
        ("Convolved", "moon", "has no linear layer, so it has no representation"),
        (
            "Pair",
            "fedavg",
            "gives a dict with 'features', 'logits', expected logits; say which: output = 'features' or",
        ),
    ],
)
def test_what_cannot_train_is_said_before_training(tiny: Tiny, model: str, method: str, expected: str) -> None:
    assert expected in complaint(tiny(method, model={"name": f"her_nets:{model}"}))


def test_networks_that_can_are_sound(tiny: Tiny) -> None:
    methods = ("fedavg", "scaffold", "moon", "fedlpa", "laplace")
    prepare(tiny(*methods, model={"name": "her_nets:Plain"})).check()
    prepare(tiny(*methods, model={"name": "her_nets:Pair", "output": "logits"})).check()


def test_a_file_chooses_the_output_unless_the_network_has_such_an_option(tiny: Tiny) -> None:
    chosen = prepare(tiny(model={"name": "her_nets:Pair", "output": "logits"})).spec
    assert (chosen.output, chosen.options) == ("logits", {})
    assert prepare(tiny(model={"name": "her_nets:Named", "output": 4})).spec == Spec("her_nets:Named", {"output": 4})
    assert "output is '1.5', expected a place such as 0" in complaint(tiny(model={"name": "mlp", "output": 1.5}))


def test_checking_moves_no_random_stream(tiny: Tiny) -> None:
    prepared = prepare(tiny("fedavg", "fedlpa"))
    prepared.check()
    stirred = torch.random.get_rng_state()
    prepared.check()
    assert torch.random.get_rng_state().equal(stirred)


MLP = Spec("mlp", {"inputs": 4, "hidden": [3], "classes": 2})


def step(method: str, rounds: int = 1, spec: Spec = MLP, x: Any = None, **options: Any) -> None:
    torch.manual_seed(0)
    rows = Rows(torch.randn(2, 4) if x is None else x, torch.arange(2))
    brief = Brief(0, spec, dict(spec.build().state_dict()), classes=2)
    rehearse(fedfuse.recipe(method, **options), brief, rows, LocalSettings(), rounds)


def test_evidence_of_later_rounds_is_asked_for_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise ArithmeticError("no gradient here")

    monkeypatch.setattr("fedfuse.methods.prunefl.squared_gradients", fails)
    step("prunefl", rounds=2, every=3)
    with pytest.raises(FuseError, match=r"cannot train by 'prunefl\(every=3\)': .*ArithmeticError: no gradient here"):
        step("prunefl", rounds=3, every=3)


def test_a_method_that_takes_over_is_rehearsed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise ArithmeticError("no factor here")

    monkeypatch.setattr("fedfuse.client.kfac.kronecker_factors", fails)
    brief = Brief(0, MLP, dict(MLP.build().state_dict()), classes=2)
    handed = fedfuse.recipe("fedavg").then(2, fedfuse.recipe("fedlpa"))
    rows = Rows(torch.randn(2, 4), torch.arange(2))
    rehearse(handed, brief, rows, LocalSettings(), rounds=2)
    with pytest.raises(FuseError, match="no factor here"):
        rehearse(handed, brief, rows, LocalSettings(), rounds=3)


def test_what_is_remembered_is_used_in_a_second_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise ArithmeticError("no likeness")

    monkeypatch.setattr("torch.nn.functional.cosine_similarity", fails)
    with pytest.raises(FuseError, match="no likeness"):
        step("moon")


def test_a_step_the_door_would_refuse_is_told() -> None:
    with pytest.raises(FuseError, match=r"cannot train by 'fedavg': after one step .* is not finite"):
        step("fedavg", x=torch.full((2, 4), torch.inf))


def test_rows_are_the_datas_own_or_noise_of_their_form() -> None:
    blank = outline("cifar10", train_limit=10)
    noise = some_rows(blank, InputForm((3, 32, 32)))
    assert noise.x.shape == (2, 3, 32, 32)
    assert len(noise.x.unique()) > 1000
    own = some_rows(fedfuse.data.load("digits", train_limit=9), InputForm((1, 8, 8)))
    assert own.x.equal(fedfuse.data.load("digits", train_limit=9).train.x[:2])

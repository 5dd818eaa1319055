"""From words to things: what fits, what is filled in, and what is refused before any training."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedfuse.core.spec import Spec
from fedfuse.errors import ConfigError, FuseError, RecipeError
from fedfuse.experiment.config import Experiment
from fedfuse.experiment.prepare import prepare

Tiny = Callable[..., Experiment]

NETS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, classes, inputs, width=4):
        super().__init__()
        if width == 13:
            raise RuntimeError("thirteen brings no luck\\nand more words")
        self.body, self.top = nn.Linear(inputs, width), nn.Linear(width, classes)

    def forward(self, x):
        return self.top(self.body(x.flatten(1)).relu())

class Silent(nn.Module):
    def forward(self, x):
        raise KeyError

class Pair(nn.Module):
    def forward(self, x):
        return x, x

def anything(**options):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, options.get("outputs", 10)))
"""


@pytest.fixture
def nets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's own networks, in a module of the folder at hand."""
    (tmp_path / "my_nets.py").write_text(NETS)
    (tmp_path / "my_typo.py").write_text("class = 3")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("my_nets", "my_typo"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def check(experiment: Experiment) -> None:
    prepare(experiment).check()


def complaint(experiment: Experiment) -> str:
    with pytest.raises(FuseError) as caught:
        check(experiment)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_data_fill_in_what_the_model_leaves_open(tiny: Tiny) -> None:
    assert prepare(tiny()).spec == Spec("mlp", {"classes": 10, "inputs": 64, "hidden": [4]})
    assert prepare(tiny(model={"name": "lenet"})).spec.options == {"classes": 10, "channels": 1, "size": 8}
    assert prepare(tiny(model={"name": "mlp", "classes": 11})).spec.options["classes"] == 11


@pytest.mark.usefixtures("nets")
def test_a_network_of_ones_own(tiny: Tiny) -> None:
    prepared = prepare(tiny(model={"name": "my_nets:Net", "width": 6}))
    prepared.check()
    assert prepared.spec.options == {"classes": 10, "inputs": 64, "width": 6}
    assert prepared.setting(0).plan.rules.trusted == {"my_nets:Net"}
    check(tiny(model={"name": "my_nets:anything", "colour": "red"}))


@pytest.mark.usefixtures("nets")
@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ({"name": "mpl"}, "model 'mpl' is unknown, expected one of mlp, lenet"),
        ({"name": "mlp", "hiden": [3]}, "model 'mlp' has no option 'hiden'; did you mean 'hidden'?"),
        ({"name": "mlp", "hidden": "x"}, "hidden is 'x', expected a list"),
        ({"name": "mlp", "inputs": 5}, "cannot read rows of shape 1×8×8"),
        ({"name": "mlp", "classes": 3}, "gives outputs of shape (2, 3) for two rows, expected (2, 10)"),
        ({"name": "mlp", "classes": 30}, "gives outputs of shape (2, 30) for two rows, expected (2, 10)"),
        ({"name": "my_nets:Net", "widht": 3}, "model 'my_nets:Net' has no option 'widht'; did you mean 'width'?"),
        ({"name": "my_nets:Net", "width": 13}, "cannot be built with {'classes': 10, 'inputs': 64, 'width': 13}"),
        ({"name": "my_nets:Net", "width": "x"}, "cannot be built with"),
        ({"name": "my_nets:Nett"}, "model 'my_nets:Nett' cannot be imported"),
        ({"name": "my_net:Net"}, "model 'my_net:Net' cannot be imported (No module named 'my_net')"),
        ({"name": "my_typo:Net"}, "cannot be imported (SyntaxError: invalid syntax"),
        ({"name": "my_nets:Silent"}, "cannot read rows of shape 1×8×8: KeyError: no reason given"),
        (
            {"name": "my_nets:Pair"},
            "gives a tuple of (Tensor, Tensor), expected logits; say which: output = 0 or output = 1",
        ),
        ({"name": "my_nets:anything", "outputs": 4}, "gives outputs of shape (2, 4)"),
        ({"name": "builtins:dict"}, "gave a dict, expected a torch.nn.Module"),
    ],
)
def test_a_model_that_does_not_fit_is_explained(tiny: Tiny, model: dict[str, Any], expected: str) -> None:
    assert expected in complaint(tiny(model=model))


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({"source": "digitss"}, "the data source 'digitss' is unknown"),
        ({"clients": 91, "train_limit": 90}, "91 clients are to share 90 rows"),
        ({"partition": {"kind": "classes", "per_client": 11}}, "11"),
        ({"server_rows": {"count": 10**6}}, "the server is to hold 1000000 rows"),
        ({"server_fraction": 0.1, "server_rows": {"count": 5}}, "server_fraction and server_rows are both given"),
    ],
)
def test_data_that_cannot_be_are_explained(tiny: Tiny, data: dict[str, Any], expected: str) -> None:
    assert expected in complaint(tiny(data=data))


def test_a_damaged_data_file_is_named(tiny: Tiny, tmp_path: Path) -> None:
    path = tmp_path / "rows.npz"
    rows = {"x_train": np.zeros((20, 4), np.float32), "y_train": np.arange(20) % 2}
    np.savez(path, **rows, x_test=rows["x_train"], y_test=rows["y_train"])
    good = {"source": str(path), "clients": 2}
    check(tiny(data=good))
    path.write_bytes(path.read_bytes()[:-200])
    assert "rows.npz" in complaint(tiny(data=good))


@pytest.mark.parametrize("device", ["cud", "meta", "cuda:99"])
def test_a_device_that_cannot_be_used_is_named(tiny: Tiny, device: str) -> None:
    said = complaint(tiny(local={"device": device}))
    assert f"local.device is {device!r}, which cannot be used here" in said


def test_methods_are_checked_against_rounds_and_server_rows(tiny: Tiny) -> None:
    with pytest.raises(RecipeError, match="mixture"):
        check(tiny("ensemble", rounds=2))
    check(tiny("ensemble", rounds=1))
    assert "select = 'best-on-server'" in complaint(tiny(select="best-on-server"))


def test_every_method_of_a_seed_begins_alike_and_seeds_differ(tiny: Tiny) -> None:
    prepared = prepare(tiny())
    one, again, other = prepared.setting(0), prepared.setting(0), prepared.setting(1)
    mean = one.start.single.posterior.mean
    assert all(torch.equal(t, again.start.single.posterior.mean[n]) for n, t in mean.items())
    assert any(not torch.equal(t, other.start.single.posterior.mean[n]) for n, t in mean.items())
    assert one.population.sizes() == again.population.sizes()


def test_held_out_rows_are_nobodys_training_rows(tiny: Tiny) -> None:
    setting = prepare(tiny(data={"clients": 3, "train_limit": 90, "validation_fraction": 0.2})).setting(0)
    assert sum(map(len, setting.judge.held_out.values())) + sum(setting.population.sizes().values()) == 90
    assert set(setting.judge.held_out) == set(setting.population.clients)


def test_augmentations_of_standardized_rows_act_on_pixels(tiny: Tiny) -> None:
    plain, moved, turned = (
        prepare(tiny(data={"standardize": s, "clients": 2}, local={"augment": [name]})).local.augment
        for s, name in ((False, "rotate"), (True, "flip"), (True, "rotate"))
    )
    assert type(plain) is type(moved)
    assert type(turned).__name__ == "BeforeStandardizing"


def test_standardized_rows_have_mean_zero_and_deviation_one(tiny: Tiny) -> None:
    train = prepare(tiny(data={"standardize": True, "clients": 2})).dataset.train.x
    assert abs(float(train.mean())) < 1e-5
    assert abs(float(train.std()) - 1) < 1e-3


def test_augmentations_by_name(tiny: Tiny) -> None:
    assert prepare(tiny(local={"augment": ["flip"]})).local.augment is not None
    with pytest.raises(ConfigError, match="did you mean 'crop'"):
        prepare(tiny(local={"augment": ["crp"]}))


def test_inputs_from_elsewhere_are_seen_as_ours_are(tiny: Tiny, tmp_path: Path) -> None:
    """Strangers are the test rows of another source, standardized as ours, and must have our shape."""
    data = {"clients": 3, "train_limit": 90, "test_limit": 20, "standardize": True}
    setting = prepare(tiny(data=data, judge={"ood": "digits"})).setting(0)
    assert setting.judge.ood_inputs is not None
    assert setting.judge.ood_inputs.equal(setting.judge.test.x)
    assert prepare(tiny()).setting(0).judge.ood_inputs is None
    x, y = np.zeros((6, 3, 8, 8), np.float32), np.arange(6) % 2
    np.savez(tmp_path / "odd.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    with pytest.raises(ConfigError, match=r"judge\.ood: the inputs of .* are 3×8×8, expected 1×8×8 as here"):
        prepare(tiny(judge={"ood": str(tmp_path / "odd.npz")}))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"clients_per_round": 50}, "clients_per_round is 50 and data.clients is 3; ask at most as many"),
        ({"data": {"clients": 3, "train_limit": 99_999}}, "data.train_limit is 99,999 and digits has 1,438 such rows"),
        ({"data": {"clients": 3, "test_limit": 99_999}}, "data.test_limit is 99,999 and digits has 359 such rows"),
    ],
)
def test_nobody_can_take_more_than_there_is(tiny: Tiny, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        prepare(tiny(**changes)).check()

"""Networks and data that a program gives a run as objects."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedfuse
from fedfuse.core.model import Single
from fedfuse.core.spec import Spec
from fedfuse.data import Dataset, load
from fedfuse.errors import ConfigError
from fedfuse.wire.files import load_model

TINY: dict[str, Any] = {"rounds": 2, "data": {"clients": 2}, "methods": [{"name": "fedavg"}, {"name": "scaffold"}]}


class WideNet(nn.Module):
    """A network that cannot be built without arguments."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(64, width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(self.fc1(x.flatten(1)).relu())
        return out


@pytest.fixture
def network() -> WideNet:
    torch.manual_seed(0)
    return WideNet(5)


@pytest.fixture(scope="module")
def rows() -> Dataset:
    return load("digits", train_limit=60, test_limit=30)


def run(out: Path, values: dict[str, Any] = TINY, **given: Any) -> Any:
    return fedfuse.run(values, out=out, workers=0, memo=False, **given)


def test_a_network_and_arrays_run_like_names(network: WideNet, rows: Dataset, tmp_path: Path) -> None:
    arrays = [np.asarray(part) for part in (rows.train.x, rows.train.y, rows.test.x, rows.test.y)]
    limits = {"clients": 2, "train_limit": 60, "test_limit": 30}
    named = run(tmp_path / "named", TINY | {"data": limits}, model=network)
    given = run(tmp_path / "given", model=network, data=arrays)
    assert given.table() == named.table()
    assert [row["nll"] for row in given.rows] == [row["nll"] for row in named.rows]
    assert run(tmp_path / "dataset", model=network, data=rows).table() == given.table()


def test_every_seed_begins_with_the_given_weights(network: WideNet, rows: Dataset, tmp_path: Path) -> None:
    still = {"local": {"optimizer": {"lr": 1e-30}}, "methods": [{"name": "fedavg"}]}
    run(tmp_path / "run", TINY | {"rounds": 1, "seeds": [0, 1]} | still, model=network, data=rows)
    for seed in (0, 1):
        path = tmp_path / "run" / "models" / f"fedavg-{seed}.safetensors"
        model, _ = load_model(path, {f"{WideNet.__module__}:WideNet"}, Spec.of(network))
        assert isinstance(model, Single)
        torch.testing.assert_close(model.posterior.mean["fc1.weight"], network.fc1.weight.detach())


def test_it_goes_on_with_the_same_objects_and_not_with_others(network: WideNet, rows: Dataset, tmp_path: Path) -> None:
    run(tmp_path / "run", TINY | {"rounds": 1}, model=network, data=rows)
    went_on = run(tmp_path / "run", TINY | {"select": "last"}, model=network, data=rows, resume=True)
    assert [row["round"] for row in went_on.rows] == [1, 2, 1, 2]
    assert went_on.table() == run(tmp_path / "whole", model=network, data=rows).table()
    with pytest.raises(ConfigError, match=r"another run: model.weights was "):
        run(tmp_path / "run", model=WideNet(5), data=rows, resume=True)


def test_the_best_round_may_be_chosen_and_the_run_go_on(network: WideNet, rows: Dataset, tmp_path: Path) -> None:
    chosen = TINY | {"select": "best-on-server", "data": {"clients": 2, "server_fraction": 0.2}}
    run(tmp_path / "run", chosen | {"rounds": 1}, model=network, data=rows)
    went_on = run(tmp_path / "run", chosen, model=network, data=rows, resume=True)
    assert went_on.table() == run(tmp_path / "whole", chosen, model=network, data=rows).table()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"model": WideNet}, "model is a type, expected a torch.nn.Module"),
        ({"data": "digits"}, "data is a str, expected a fedfuse.data.Dataset or"),
        ({"data": (1, 2)}, "data is a tuple, expected"),
    ],
)
def test_anything_else_is_refused(given: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        run(tmp_path / "run", **given)


def test_limits_do_not_cut_what_a_program_gives(rows: Dataset, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="data.train_limit cannot cut a Dataset that a program gives"):
        run(tmp_path / "run", TINY | {"data": {"train_limit": 5}}, data=rows)

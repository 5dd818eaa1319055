"""Rows are read as they are meant through every door: labels from 1 on, channels last, and who holds which row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.conftest import Fedfuse
from torch import nn

from fedfuse.api import local_update
from fedfuse.core.inputs import ArrayForm
from fedfuse.core.rows import Rows
from fedfuse.data import Dataset, load
from fedfuse.data.site import read_site
from fedfuse.errors import ConfigError

RUN = """
methods = [{{ name = "fedavg" }}]
model = {{ name = "mlp", hidden = [] }}
[data]
source = "{source}"
clients = 2
{more}
"""

OWN = """
import torch
from fedfuse.data import Dataset, Rows

def held():
    half = Rows(torch.rand(12, 3), torch.arange(12) % 2)
    return Dataset("held", half, half, ("no", "yes"), owners=["north"] * 6 + ["south"] * 3 + ["east"] * 3)

def last():
    half = Rows(torch.rand(12, 8, 8, 3), torch.arange(12) % 2)
    return Dataset("last", half, half, ("no", "yes"))

def from_one():
    x, y = torch.rand(20, 4), 1 + torch.arange(20) % 10
    return x, y, x, y
"""


def halves(x: Any, y: Any) -> dict[str, Any]:
    return {"x_train": x, "y_train": y, "x_test": x, "y_test": y}


def write_run(source: str, more: str = "") -> None:
    Path("mine.py").write_text(OWN)
    Path("study.toml").write_text(RUN.format(source=source, more=more))


@pytest.mark.parametrize("source", ["one.npz", "mine:from_one"])
def test_a_run_refuses_labels_that_count_from_one(source: str, fedfuse: Fedfuse) -> None:
    np.savez("one.npz", **halves(np.zeros((20, 4), np.float32), 1 + np.arange(20) % 10))
    write_run(source)
    code, _, err = fedfuse("run", "study.toml", "--out", "run", "--workers", "0")
    assert code == 2
    assert "no row has the label 0 and the largest label is 10, which makes 11 classes; number the classes" in err


def test_a_run_with_gaps_tells_what_it_assumed(fedfuse: Fedfuse, caplog: pytest.LogCaptureFixture) -> None:
    np.savez("gaps.npz", **halves(np.zeros((20, 4), np.float32), np.arange(20) % 2 * 3))
    write_run("gaps.npz")
    assert fedfuse("run", "study.toml", "--out", "run", "--workers", "0").code == 0
    assert "no row has the label 1, 2 and the largest label is 3, which makes 4 classes" in caplog.text


def test_names_of_classes_say_that_a_class_without_rows_is_meant(fedfuse: Fedfuse) -> None:
    named = np.array(["none", "cat", "dog"])
    np.savez("named.npz", classes=named, **halves(np.zeros((20, 4), np.float32), 1 + np.arange(20) % 2))
    write_run("named.npz")
    assert fedfuse("run", "study.toml", "--out", "run", "--workers", "0").code == 0


def test_a_site_is_told_what_its_labels_were_taken_for(fedfuse: Fedfuse) -> None:
    np.savez("site.npz", x=np.random.default_rng(0).random((40, 4), np.float32), y=1 + np.arange(40) % 10)
    code, out, err = fedfuse("update", "--data", "site.npz", "--model", "mlp", "--output", "site.safetensors")
    assert code == 0
    assert "no row has the label 0" in out + err
    code, _, err = fedfuse("init", "home", "--data", "site.npz", "--model", "mlp")
    assert (code, "no row has the label 0" in err) == (2, True)
    digits = tuple(map(str, range(11)))
    assert read_site("site.npz", classes=digits).remarks == ()


def test_labels_from_one_do_not_fit_a_networks_outputs() -> None:
    rows = torch.rand(20, 4), 1 + torch.arange(20) % 10
    with pytest.raises(ConfigError, match="from 1 to 10 .* 10 outputs.* subtract 1"):
        local_update(nn.Linear(4, 10), rows)
    assert local_update(nn.Linear(4, 11), rows).num_examples == 20


def test_pictures_with_channels_last_are_refused_where_none_are_expected(fedfuse: Fedfuse) -> None:
    x, y = torch.rand(12, 8, 8, 3), torch.arange(12) % 2
    with pytest.raises(ConfigError, match=r"8×8×3.*permute\(0, 3, 1, 2\)"):
        local_update(nn.Sequential(nn.Flatten(), nn.Linear(192, 2)), (x, y))
    with pytest.raises(ConfigError, match="^mine: .*channels last"):
        Dataset("mine", Rows(x, y), Rows(x, y), ("no", "yes"))
    write_run("mine:last")
    code, _, err = fedfuse("run", "study.toml", "--out", "run", "--workers", "0")
    assert (code, "channels last" in err) == (2, True)


def test_channels_last_that_are_declared_are_as_the_network_reads_them() -> None:
    rows = torch.rand(12, 8, 8, 3), torch.arange(12) % 2
    form = ArrayForm(shape=(8, 8, 3))
    update = local_update(nn.Sequential(nn.Flatten(), nn.Linear(192, 2)), rows, inputs=form)
    assert update.about.inputs == form


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_an_archive_may_have_its_channels_last(channels: int, tmp_path: Path) -> None:
    x = np.random.default_rng(0).random((12, 8, 9, channels), np.float32)
    np.savez(tmp_path / "last.npz", **halves(x, np.arange(12) % 2))
    first = torch.from_numpy(x).permute(0, 3, 1, 2)
    assert torch.equal(load(str(tmp_path / "last.npz")).train.x, first)
    assert torch.equal(read_site(str(tmp_path / "last.npz")).rows.x, first)
    again = read_site(str(tmp_path / "last.npz"), form=ArrayForm(shape=(8, 9, channels))).rows.x
    assert torch.equal(again, torch.from_numpy(x)), "a model that reads channels last gets them so"


def test_a_functions_owners_deal_the_rows_as_they_do_in_python(fedfuse: Fedfuse) -> None:
    write_run("mine:held", 'partition = { kind = "natural" }')
    assert fedfuse("run", "study.toml", "--out", "run", "--workers", "0").code == 0
    dealt = json.loads(Path("run/partition.json").read_text())["seeds"]["0"]["clients"]
    assert {name: sum(counts) for name, counts in dealt.items()} == {"north": 6, "south": 3, "east": 3}
    assert len(load("mine:held", train_limit=4).owners) == 4


def test_owners_name_one_holder_for_each_row() -> None:
    rows = Rows(torch.rand(4, 3), torch.arange(4) % 2)
    with pytest.raises(ConfigError, match="owners .*3 .* 4 "):
        Dataset("mine", rows, rows, ("no", "yes"), owners=("a", "b", "c"))

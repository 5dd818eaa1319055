"""The family on a real experiment: files, sizes, resuming."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import fedfuse
from fedfuse.core.model import Single
from fedfuse.core.spec import Spec
from fedfuse.errors import ConfigError, RecipeError
from fedfuse.experiment.callbacks import Callback
from fedfuse.experiment.config import Experiment
from fedfuse.experiment.prepare import prepare
from fedfuse.experiment.run import execute
from fedfuse.wire.files import load_model

METHODS: list[dict[str, Any]] = [
    {"name": "fedavg"},
    {"name": "data_sharing", "most": 20},
    {"name": "hybrid_fl"},
    {"name": "feddu"},
    {"name": "hrank", "at": 1, "rate": 0.5},
    {"name": "fedduap", "at": 2, "lanczos": 6, "sample": 20, "images": 20},
    {"name": "imc", "at": 1, "every": 1, "times": 2, "rule": "fixed", "rate": 0.8},
    {"name": "prunefl", "every": 2, "steps": 3},
]


def experiment(*methods: dict[str, Any], **more: Any) -> Experiment:
    values: dict[str, Any] = {
        "name": "small",
        "rounds": 3,
        "clients_per_round": 2,
        "data": {
            "source": "digits",
            "clients": 4,
            "partition": {"kind": "shards", "per_client": 2},
            "train_limit": 240,
            "test_limit": 60,
            "server_rows": {"count": 40, "classes": 5},
        },
        "model": {"name": "lenet", "maps": [6, 8], "hidden": [12]},
        "local": {"batch_size": 10, "optimizer": {"lr": 0.05}},
        "methods": list(methods) or METHODS,
    }
    return Experiment.model_validate(values | more)


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in (folder / "ledger.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "small"
    execute(experiment(), out, workers=0)
    return out


def of(folder: Path, name: str) -> list[dict[str, Any]]:
    return [line for line in lines(folder) if line["method"] == name]


def test_nobody_is_refused_or_dropped(folder: Path) -> None:
    found = lines(folder)
    assert len(found) == 3 * len(METHODS)
    assert not any(line["refused"] or line["dropped"] for line in found)


def test_flops_fall_with_channels_and_not_with_masks(folder: Path) -> None:
    whole = of(folder, "fedavg")
    pruned, masked = of(folder, "hrank"), of(folder, "imc")
    assert pruned[0]["flops"] == whole[0]["flops"]
    assert pruned[1]["flops"] < 0.7 * whole[1]["flops"]
    assert pruned[1]["parameters"] < whole[1]["parameters"]
    assert [line["flops"] for line in masked] == [line["flops"] for line in whole]
    assert masked[-1]["parameters"] == whole[-1]["parameters"]
    assert masked[-1]["weights"] < 0.4 * whole[-1]["weights"]
    assert masked[-1]["bytes_up"] < whole[-1]["bytes_up"]


def test_channels_kept_are_told_layer_by_layer(folder: Path) -> None:
    assert of(folder, "hrank")[0]["channels"] == {"conv1": [3, 6], "conv2": [4, 8]}
    assert "channels" not in of(folder, "fedavg")[0]
    assert set(of(folder, "fedduap")[-1]["channels"]) == {"conv1", "conv2"}


def test_the_spectrums_work_is_told_apart_once(folder: Path) -> None:
    pruned, whole = of(folder, "fedduap"), of(folder, "fedavg")
    looked = [line["curvature_flops"] for line in pruned]
    assert sum(1 for flops in looked if flops) == 1
    at = looked.index(max(looked))
    assert pruned[at]["flops"] - pruned[at]["curvature_flops"] == whole[at]["flops"]
    assert pruned[at]["evidence_flops"] >= pruned[at]["curvature_flops"] > 0 == whole[at]["curvature_flops"]


def test_more_rows_are_more_work(folder: Path) -> None:
    assert of(folder, "data_sharing")[0]["flops"] > of(folder, "fedavg")[0]["flops"]
    assert of(folder, "hybrid_fl")[0]["flops"] == of(folder, "fedavg")[0]["flops"]
    assert of(folder, "hybrid_fl")[0]["server_flops"] > 0 == of(folder, "fedavg")[0].get("server_flops", 0)
    assert "20 labelled rows of the server, given to each of 4 clients" in of(folder, "data_sharing")[0]["reveals"]


def test_a_pruned_model_is_a_file_that_any_process_can_load(folder: Path) -> None:
    (path,) = (folder / "models").glob("fedduap*")
    model, _ = load_model(path)
    assert isinstance(model, Single)
    assert math.isfinite(float(model.logits(torch.rand(2, 1, 8, 8)).sum()))
    assert sum(t.numel() for t in model.posterior.mean.values()) == of(folder, "fedduap")[-1]["parameters"]


def test_sites_with_files_can_use_the_servers_rows_too() -> None:
    draw = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    net = Spec("lenet", {"size": 8, "maps": [4, 6], "hidden": [8], "classes": 3}).build()

    def some(*labels: int) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.tensor(labels).repeat(12 // len(labels))
        return torch.rand(12, 1, 8, 8, generator=draw) + y[:, None, None, None], y

    sites = [fedfuse.local_update(net, some(k), "feddu", client=f"site-{k}", classes=3) for k in range(2)]
    fused = fedfuse.fuse(sites, "feddu", model=net, server_rows=some(0, 1))
    assert fused.facts["server_step"]["taken"], "sites and server have everybody's labels: rows alone decide"
    apart = fedfuse.fuse(sites, "feddu", model=net, server_rows=some(0, 1, 2))
    assert apart.facts["server_step"]["alpha"] == 0, "sites that are everybody need no server with other labels"
    pruned = fedfuse.fuse(sites, fedfuse.recipe("hrank", at=1, rate=0.5), model=net, server_rows=some(0, 1))
    assert fused.module()[0].weight.shape[0] == 4
    assert pruned.module()[0].weight.shape[0] == 2
    with pytest.raises(ConfigError, match="pruned after round 30 and the run ends after 1"):
        fedfuse.fuse(sites, "hrank", model=net, server_rows=some(0, 1))


class Crash(Exception):
    """Power failure."""


class DiesAfter(Callback):
    """A watcher that ends the run after a round."""

    def __init__(self, round_: int) -> None:
        self.round = round_

    def round_done(self, label: str, seed: int, round_: int, scores: Mapping[str, Any]) -> None:
        if round_ == self.round:
            raise Crash


@pytest.mark.parametrize("at", [5, 7], ids=["fedduap", "prunefl"])
def test_after_a_crash_it_goes_on_as_if_undisturbed(at: int, folder: Path, tmp_path: Path) -> None:
    chosen = METHODS[at]
    with pytest.raises(Crash):
        execute(experiment(chosen), tmp_path / "cut", workers=0, watch=DiesAfter(2))
    execute(experiment(chosen), tmp_path / "cut", workers=0, resume=True)
    (whole,), (mended,) = (list((f / "models").glob(f"{chosen['name']}*")) for f in (folder, tmp_path / "cut"))
    assert whole.read_bytes() == mended.read_bytes()


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"data": {"source": "digits", "clients": 2, "train_limit": 60, "test_limit": 20}}, "there are none"),
        ({"model": {"name": "mlp"}}, "has no convolution whose channels could be removed"),
        ({"rounds": 1}, "pruned after round 2 and the run ends after 1"),
        ({"data": {"source": "digits", "server_rows": {"count": 40, "classes": [3, 99]}}}, "names class 99"),
    ],
)
def test_what_cannot_be_is_said_before_training(said: dict[str, Any], words: str) -> None:
    with pytest.raises((ConfigError, RecipeError), match=words):
        prepare(experiment(METHODS[5], **said)).check()

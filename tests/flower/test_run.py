"""An experiment file over a grid of real messages, and none of Flower's own processes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr")

from fake_grid import App, FakeGrid, grid_of, site_files
from flwr.app import Array, Context, Message, RecordDict

from fedfuse.errors import ConfigError, QuorumLost
from fedfuse.experiment.config import Experiment
from fedfuse.experiment.results import Ledger, Results
from fedfuse.experiment.run import execute
from fedfuse.flower.records import PARAMS
from fedfuse.flower.run import ExperimentServer
from fedfuse.flower.site import FileSite, site_app

Tiny = Callable[..., Experiment]
TIMES = ("train_seconds", "server_seconds", "diagnostic_seconds")


@pytest.fixture
def _simulation(monkeypatch: pytest.MonkeyPatch) -> None:
    """As inside Flower's simulation engine, where ray is at work."""
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: True))  # type: ignore[arg-type]


def written(experiment: Experiment, folder: Path) -> Path:
    path = folder / "experiment.toml"
    path.write_text(experiment.to_toml())
    return path


def conduct(grid: FakeGrid, path: Path, out: Path, **config: Any) -> Results:
    experiment_server = ExperimentServer(path)
    experiment_server(grid, Context(1, 1, {}, RecordDict(), {"out": str(out), "deadline": 20.0, **config}))
    assert experiment_server.results is not None
    return experiment_server.results


def plain(results: Results) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k not in TIMES} for row in results.rows]


def models(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "models").iterdir()}


@pytest.mark.usefixtures("_simulation")
def test_the_run_directory_is_the_one_of_fedfuse_run(tiny: Tiny, tmp_path: Path) -> None:
    experiment = tiny("fedavg", "scaffold", seeds=[0, 3])
    path = written(experiment, tmp_path)
    theirs = conduct(grid_of(site_app(path), 3), path, tmp_path / "flower")
    ours = execute(experiment, tmp_path / "here", workers=0)
    assert plain(theirs) == plain(ours)
    assert models(tmp_path / "flower") == models(tmp_path / "here")
    assert (tmp_path / "flower" / "partition.json").read_text() == (tmp_path / "here" / "partition.json").read_text()
    assert (tmp_path / "flower" / "report.html").exists()


@pytest.mark.usefixtures("_simulation")
def test_every_round_is_a_line_of_the_servers_output(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tiny("fedavg", seeds=[0]), tmp_path)
    results = conduct(grid_of(site_app(path), 3), path, tmp_path / "run")
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 3
    assert str(tmp_path / "run") in said[0]
    for row, line in zip(results.rows, said[1:], strict=True):
        assert line.startswith(
            f"tiny: run 1 of 1, fedavg, seed 0, round {row['round']} of 2, accuracy {row['accuracy']:.2%}"
        )


@pytest.mark.usefixtures("_simulation")
def test_a_server_that_starts_again_goes_on_where_it_stopped(tiny: Tiny, tmp_path: Path) -> None:
    path = written(tiny(rounds=1), tmp_path)
    grid = grid_of(site_app(path), 3)
    conduct(grid, path, tmp_path / "run")
    path = written(tiny(rounds=3), tmp_path)
    conduct(grid, path, tmp_path / "run", resume=True)
    conduct(grid_of(site_app(path), 3), path, tmp_path / "whole")
    assert models(tmp_path / "run") == models(tmp_path / "whole")
    with pytest.raises(ConfigError, match="run"):
        conduct(grid, path, tmp_path / "run")


def deployed(path: Path, files: dict[str, Path], registered: bool = True) -> FakeGrid:
    grid = FakeGrid()
    for name, file in files.items():
        node = grid.nodes[grid.add(site_app(path), name if registered else "")]
        node.context.node_config = {"data": str(file), "name": name}
    return grid


def test_sites_train_on_their_own_rows_and_the_partition_is_theirs(tiny: Tiny, tmp_path: Path) -> None:
    experiment = tiny(data={"clients": 3, "train_limit": 90, "test_limit": 60})
    path = written(experiment, tmp_path)
    files = site_files(tmp_path, {"north": 40, "east": 25, "south": 60})
    results = conduct(deployed(path, files), path, tmp_path / "run")
    clients = results.rows[-1]["clients"]
    assert {name: told["num_examples"] for name, told in clients.items()} == {
        "east": 25.0,
        "north": 40.0,
        "south": 60.0,
    }
    assert not (tmp_path / "run" / "partition.json").exists()  # nobody knows who holds which labels
    again = conduct(deployed(path, dict(reversed(files.items())), registered=False), path, tmp_path / "again")
    assert plain(again) == plain(results)  # names decide, not node ids nor the order of arrival


def test_a_site_without_data_says_so_and_takes_no_part(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FEDFUSE_SITE_DATA", raising=False)
    path = written(tiny(data={"clients": 3, "train_limit": 90}), tmp_path)
    grid = deployed(path, site_files(tmp_path, {"north": 40, "east": 25}))
    poor = grid.add(site_app(path), **{"partition-id": 0})  # a number is no leave to read the file's data set
    grid.nodes[poor].name = "south"
    results = conduct(grid, path, tmp_path / "run", wait=0.5)
    dropped = results.rows[-1]["dropped"]
    assert [told["client"] for told in dropped] == [f"node {poor}"]
    assert "--node-config" in dropped[0]["reason"]
    for node in grid.nodes.values():
        node.context.node_config = {}
    with pytest.raises(QuorumLost, match="no data"):
        conduct(grid, path, tmp_path / "none", wait=0.5)


def test_a_sites_data_may_be_named_by_its_environment(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = site_files(tmp_path, {"north": 33})
    monkeypatch.setenv("FEDFUSE_SITE_DATA", str(files["north"]))
    monkeypatch.setenv("FEDFUSE_SITE_NAME", "north")
    site = FileSite(written(tiny(), tmp_path))
    assert site.enrol(Context(1, 1, {}, RecordDict(), {})) == ("north", 33, -1)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"x": torch.rand(8, 3)}, "RuntimeError"),
        ({"y": torch.full((8,), 12)}, "12 to 12, expected 0 to 9"),
    ],
)
def test_rows_that_do_not_fit_drop_their_site_alone(
    changes: dict[str, torch.Tensor], why: str, tiny: Tiny, tmp_path: Path
) -> None:
    path = written(tiny(rounds=1, data={"clients": 3, "train_limit": 90}), tmp_path)
    files = site_files(tmp_path, {"north": 40, "east": 25, "south": 30})
    rows = {"x": torch.rand(8, 1, 8, 8), "y": torch.zeros(8, dtype=torch.int64), **changes}
    x, y = rows["x"].numpy(), rows["y"].numpy()
    np.savez(files["south"], x_train=x, y_train=y, x_test=x, y_test=y)
    (line,) = conduct(deployed(path, files), path, tmp_path / "run").rows
    assert list(line["clients"]) == ["east", "north"]
    assert [told["client"] for told in line["dropped"]] == ["south"]
    assert why in line["dropped"][0]["reason"]


def test_what_cannot_be_in_a_federation_is_said_before_any_round(tiny: Tiny, tmp_path: Path) -> None:
    files = site_files(tmp_path, {"north": 40, "east": 25, "south": 30})
    data = {"clients": 3, "train_limit": 90, "server_fraction": 0.2}
    path = written(tiny(data=data | {"standardize": True}), tmp_path)
    with pytest.raises(ConfigError, match="data.standardize"):
        conduct(deployed(path, files), path, tmp_path / "run")
    path = tmp_path / "other.toml"
    path.write_text(tiny("data_sharing", data=data).to_toml())
    with pytest.raises(ConfigError, match="'data_sharing'"):
        conduct(deployed(path, files), path, tmp_path / "run")
    assert not Ledger(tmp_path / "run" / "ledger.jsonl").lines()


def test_a_site_with_another_file_is_told(tiny: Tiny, tmp_path: Path) -> None:
    path, other = written(tiny(rounds=1), tmp_path), tmp_path / "other.toml"
    other.write_text(tiny("fedprox").to_toml())
    grid = deployed(path, site_files(tmp_path, {"north": 40, "east": 25, "south": 30}))
    next(iter(grid.nodes.values())).app = site_app(other)
    (line,) = conduct(grid, path, tmp_path / "run").rows
    assert "'fedavg'; it has fedprox" in line["dropped"][0]["reason"]


def test_whom_the_door_refused_or_clipped_is_told_in_flowers_log(
    tiny: Tiny, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def scaled(app: App, factor: float) -> App:
        def answer(message: Message, context: Context) -> Message:
            reply = app(message, context)
            for name, array in dict(reply.content.array_records.get(PARAMS, {})).items():
                weights = np.asarray(factor * array.numpy(), dtype=array.dtype)
                reply.content.array_records[PARAMS][name] = Array(weights)
            return reply

        return answer

    path = written(tiny(rounds=1, data={"clients": 3, "train_limit": 90}), tmp_path)
    grid = deployed(path, site_files(tmp_path, {"north": 40, "east": 35, "south": 30}))
    for node in grid.nodes.values():
        node.app = scaled(node.app, {"north": 1e4, "east": 1.0, "south": float("nan")}[node.name])
    (line,) = conduct(grid, path, tmp_path / "run").rows
    assert ([r["client"] for r in line["refused"]], {c["client"] for c in line["clipped"]}) == (["south"], {"north"})
    told = [record.getMessage() for record in caplog.records if record.name == "flwr"]
    for what, who in (("refused", "south"), ("clipped", "north")):
        (words,) = (each for each in told if f"{what} {who}" in each)
        assert line[what][0]["field"] in words
        assert line[what][0]["expected"] in words

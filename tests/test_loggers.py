"""Loggers write what the real libraries read back, offline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import fedfuse
from fedfuse.errors import ConfigError
from fedfuse.loggers import LOGGERS, MLflow, TensorBoard, find_logger

TINY: dict[str, Any] = {
    "name": "logged",
    "rounds": 2,
    "seeds": [3],
    "data": {"clients": 2, "train_limit": 60, "test_limit": 30},
    "model": {"name": "mlp", "hidden": [4]},
    "methods": [{"name": "fedavg"}, {"name": "fedprox", "mu": 0.1}],
}


def run(out: Path, logger: Any) -> Any:
    return fedfuse.run(TINY, out=out, workers=0, memo=False, progress=False, callbacks=[logger])


@pytest.mark.filterwarnings("ignore")  # what the library says of its own dependencies
def test_tensorboard_reads_a_curve_for_each_method_and_seed(tmp_path: Path) -> None:
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    results = run(tmp_path / "run", TensorBoard())
    folder = tmp_path / "run" / "tensorboard"
    assert {path.name for path in folder.iterdir()} == {"fedavg-3", "fedprox_mu_0.1-3"}
    events = reading.EventAccumulator(str(folder / "fedavg-3")).Reload()
    curve = [(event.step, event.value) for event in events.Scalars("accuracy")]
    assert curve == [(row["round"], pytest.approx(row["accuracy"])) for row in results.rows if row["label"] == "fedavg"]
    assert "bytes_up" in events.Tags()["scalars"]


@pytest.mark.filterwarnings("ignore")
def test_mlflows_file_store_has_a_run_for_each_method_and_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracking = pytest.importorskip("mlflow.tracking")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    results = run(tmp_path / "run", MLflow())
    client = tracking.MlflowClient(tracking_uri=(tmp_path / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("logged")
    found = {entry.info.run_name: entry for entry in client.search_runs([experiment.experiment_id])}
    assert found.keys() == {"fedavg, seed 3", "fedprox(mu=0.1), seed 3"}
    first = found["fedavg, seed 3"]
    assert first.info.status == "FINISHED"
    assert first.data.params["data.clients"] == "2"
    history = client.get_metric_history(first.info.run_id, "nll")
    wanted = [(row["round"], pytest.approx(row["nll"])) for row in results.rows if row["label"] == "fedavg"]
    assert sorted((point.step, point.value) for point in history) == wanted


def test_a_logger_is_found_by_name_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(find_logger(f"tensorboard={tmp_path}"), TensorBoard)
    assert LOGGERS.keys() == {"tensorboard", "mlflow", "wandb"}
    with pytest.raises(ConfigError, match="'tensorbord'.*'tensorboard'"):
        find_logger("tensorbord")
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    with pytest.raises(ConfigError, match="wandb"):
        find_logger("wandb")

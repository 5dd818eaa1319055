"""Loggers of runs: thin callbacks for TensorBoard, MLflow and Weights & Biases, each an extra of its own.

Give one to `fedfuse.run(..., callbacks=[TensorBoard("logs")])`, or name it on the command line: `--log tensorboard`.
Every method on every seed becomes one run of the logger's, with the ledger's numbers at each round. A callback of yours
inherits `Callback` and overrides what it wants to know of.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedfuse.errors import ConfigError, suggest
from fedfuse.experiment.callbacks import Callback, Watcher
from fedfuse.experiment.config import file_name, flatten_keys

__all__ = ["LOGGERS", "Callback", "MLflow", "TensorBoard", "Watcher", "WeightsAndBiases", "find_logger"]


def numbers_in(facts: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a ledger's line that are worth a curve.

    Example:
        >>> numbers_in({"label": "fedavg", "seed": 0, "round": 2, "accuracy": 0.5, "refused": [], "nll": None})
        {'accuracy': 0.5}
    """
    kept = {key: value for key, value in facts.items() if key not in ("seed", "round")}
    return {key: float(value) for key, value in kept.items() if type(value) in (int, float)}


class TensorBoard(Callback):
    """Writes TensorBoard's event files, one folder for each method and seed.

    Args:
        folder: where; by default `tensorboard` in the run directory.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as why:
            raise _missing("TensorBoard", "tensorboard") from why
        self._make: Callable[..., Any] = SummaryWriter
        self._folder, self._given = Path(folder or "tensorboard"), folder is not None
        self._writer: Any = None

    def run_started(self, name: str, folder: Path, config: Mapping[str, Any]) -> None:
        """Choose the folder."""
        self._folder = self._folder / file_name(name) if self._given else folder / "tensorboard"

    def method_started(self, label: str, seed: int, done: int, rounds: int, clients: int) -> None:
        """Begin a curve of its own."""
        self._close()
        self._writer = self._make(str(self._folder / f"{file_name(label)}-{seed}"))

    def round_done(self, label: str, seed: int, round_: int, scores: Mapping[str, Any]) -> None:
        """Add a point to every curve."""
        for key, value in numbers_in(scores).items():
            self._writer.add_scalar(key, value, round_)
        self._writer.flush()

    def run_done(self) -> None:
        """Close the last file."""
        self._close()

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class MLflow(Callback):
    """Logs every method on every seed as a run of MLflow's, with the experiment's settings as parameters.

    Args:
        uri: the tracking server or store; by default MLFLOW_TRACKING_URI, or a file store `mlruns` here, which needs
            neither a server nor a database.
    """

    def __init__(self, uri: str | None = None) -> None:
        try:
            from mlflow.tracking import MlflowClient
        except ImportError as why:
            raise _missing("MLflow", "mlflow-skinny") from why
        if uri is None and "MLFLOW_TRACKING_URI" not in os.environ:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # newer versions want to be asked for it
            uri = Path("mlruns").absolute().as_uri()
        self._client: Any = MlflowClient(tracking_uri=uri)
        self._experiment = self._run = ""
        self._config: dict[str, str] = {}

    def run_started(self, name: str, folder: Path, config: Mapping[str, Any]) -> None:
        """Find the experiment of that name, or make it."""
        found = self._client.get_experiment_by_name(name)
        self._experiment = found.experiment_id if found else self._client.create_experiment(name)
        settings = {key: value for key, value in config.items() if key != "methods"}
        self._config = {key: str(value)[:250] for key, value in flatten_keys(settings)} | {"folder": str(folder)}

    def method_started(self, label: str, seed: int, done: int, rounds: int, clients: int) -> None:
        """Begin a run."""
        self._end()
        run = self._client.create_run(self._experiment, run_name=f"{label}, seed {seed}")
        self._run = run.info.run_id
        for key, value in {**self._config, "method": label, "seed": str(seed)}.items():
            self._client.log_param(self._run, key, value)

    def round_done(self, label: str, seed: int, round_: int, scores: Mapping[str, Any]) -> None:
        """Log the round's numbers."""
        for key, value in numbers_in(scores).items():
            self._client.log_metric(self._run, key, value, step=round_)

    def run_done(self) -> None:
        """End the last run."""
        self._end()

    def _end(self) -> None:
        if self._run:
            self._client.set_terminated(self._run)
            self._run = ""


class WeightsAndBiases(Callback):
    """Logs every method on every seed as a run of Weights & Biases, grouped by experiment.

    Args:
        project: its project there.
    """

    def __init__(self, project: str | None = None) -> None:
        try:
            import wandb
        except ImportError as why:
            raise _missing("Weights & Biases", "wandb") from why
        self._wandb: Any = wandb
        self._project, self._group = project or "fedfuse", ""
        self._config: Mapping[str, Any] = {}
        self._run: Any = None

    def run_started(self, name: str, folder: Path, config: Mapping[str, Any]) -> None:
        """Remember the group and its settings."""
        self._group, self._config = name, {key: value for key, value in config.items() if key != "methods"}

    def method_started(self, label: str, seed: int, done: int, rounds: int, clients: int) -> None:
        """Begin a run."""
        self.run_done()
        config = {**self._config, "method": label, "seed": seed}
        self._run = self._wandb.init(
            project=self._project, group=self._group, name=f"{label}, seed {seed}", config=config, reinit=True
        )

    def round_done(self, label: str, seed: int, round_: int, scores: Mapping[str, Any]) -> None:
        """Log the round's numbers."""
        self._run.log(numbers_in(scores), step=round_)

    def run_done(self) -> None:
        """End the last run."""
        if self._run is not None:
            self._run.finish()
            self._run = None


LOGGERS: Mapping[str, Callable[[str | None], Watcher]] = {
    "tensorboard": TensorBoard,
    "mlflow": MLflow,
    "wandb": WeightsAndBiases,
}


def find_logger(words: str) -> Watcher:
    """The logger that a name, or name=where, stands for: "tensorboard=logs", "mlflow=http://…", "wandb=project".

    Raises:
        ConfigError: if there is none of that name, or if what it needs is not installed.
    """
    name, _, where = words.partition("=")
    if name not in LOGGERS:
        raise ConfigError(f"there is no logger {name!r}{suggest(name, LOGGERS)} there are {', '.join(LOGGERS)}")
    return LOGGERS[name](where or None)


def _missing(who: str, package: str) -> ConfigError:
    return ConfigError(f"the logger for {who} needs the package {package}; install it, or fedfuse[loggers]")

"""The same experiment file on a Flower federation: its server, and a simulation of server and sites.

`ExperimentServer` runs the experiment as it runs anywhere, with `FlowerBackend` in the place of worker processes.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from fedfuse.core.messages import Brief, Envelope
from fedfuse.core.recipe import Recipe
from fedfuse.core.seams import Terms, Work
from fedfuse.core.state import Bench
from fedfuse.data import client_ids
from fedfuse.errors import ConfigError, FuseError
from fedfuse.experiment.callbacks import Callback, Several, Watcher, lines
from fedfuse.experiment.config import Experiment, load_experiment
from fedfuse.experiment.prepare import PreparedExperiment, Setting
from fedfuse.experiment.results import Results
from fedfuse.experiment.run import execute_with
from fedfuse.flower.engine import Federation, FlowerEngine, log_incidents
from fedfuse.flower.parts import stages
from fedfuse.flower.records import fingerprint
from fedfuse.flower.site import site_app
from fedfuse.report import write_page
from fedfuse.server.judge import AskModels, ask_here

from flwr.app import Context  # isort: skip - after records has checked that it is there
from flwr.serverapp import Grid, ServerApp  # isort: skip

# By default Ray runs its workers at low priority, and warns about accelerators that are not used here.
_RAY = {"RAY_worker_niceness": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FlowerBackend:
    """A federation as the backend of an experiment."""

    federation: Federation
    workers: int = 0

    def sites(self, prepared: PreparedExperiment) -> Mapping[str, int] | None:
        """Wait for the sites; those of a simulation hold the rows that the file's partition gives them."""
        self.federation.gather()
        row_counts = None
        if not self.federation.is_simulated:
            if prepared.experiment.data.standardize:
                raise ConfigError(
                    "data.standardize takes the mean of all training rows, which nobody may see in a federation; "
                    "set it to false and let every site bring rows that are scaled alike"
                )
            row_counts = {name: member.rows for name, member in self.federation.members.items()}
        setting = prepared.setting(prepared.experiment.seeds[0], row_counts)
        for label, recipe in prepared.recipes.items():
            for now in stages(recipe):
                _check_work(label, now, setting)
        return row_counts

    @property
    def ask(self) -> AskModels:
        """The server asks models itself: its clients' machines are not its own."""
        return ask_here

    def engine(self, setting: Setting, label: str, recipe: Recipe, watch: Watcher) -> FlowerEngine:
        """The clients of one method on one seed."""
        among = setting.population.clients if self.federation.is_simulated else None
        return FlowerEngine(
            self.federation, label, recipe, setting.bench.local, setting.seed, among, on_client=watch.client_done
        )


def _check_work(label: str, recipe: Recipe, setting: Setting) -> None:
    """A recipe's client half must be what sites can make from the file alone.

    Whether a roster changes the work is seen by letting it exchange with an engine that asks no client.
    """
    bench: Bench = setting.bench
    probe, work = _Probe(setting.population.clients), recipe.work(bench.local)
    recipe.check(1, bench)
    brief = recipe.prepare_models(setting.start, bench).brief(recipe.publishes, bench.classes, bench.task)
    list(recipe.roster(probe, bench).exchange(brief, work, ()))
    fingerprint(work)
    if any(seen != work for seen in probe.seen):
        raise ConfigError(
            f"method {label!r} cannot run on a federation: its server lends rows to the clients, which no message "
            "carries; run it with fedfuse run, or leave it out"
        )


@dataclass(slots=True)
class _Probe:
    """An engine that sends nothing and records how a roster changes the work."""

    clients: tuple[str, ...]
    seen: list[Work] = field(default_factory=list)
    terms: ClassVar[Terms] = Terms()

    def exchange(self, _: Brief, work: Work, __: tuple[str, ...]) -> Iterator[Envelope]:
        self.seen.append(work)
        return iter(())


class _DoorLog(Callback):
    """Says in Flower's log what the door did to clients."""

    def round_done(self, label: str, seed: int, round_: int, scores: Mapping[str, Any]) -> None:
        """A line for every client that was refused, weakened or lost."""
        log_incidents(f"{label}, seed {seed}, round {round_}", scores)


@dataclass(slots=True)
class ExperimentServer:
    """A federation's server: Flower hands it the grid, and the experiment runs as it would anywhere.

    Attributes:
        path: the experiment file.
        out: the run directory; by default `out` of the run's config, or else runs/NAME.
        resume: go on with what is there; by default as the run's config says.
        deadline: seconds a round may take; by default as the run's config says, or else the file.
        watch: notified of progress.
    """

    path: Path
    out: Path | None = None
    resume: bool | None = None
    deadline: float | None = None
    watch: Watcher | None = None
    federation: Federation | None = None
    results: Results | None = None

    def __call__(self, grid: Grid, context: Context) -> None:
        """Run the experiment and write its page."""
        experiment, run_config = load_experiment(self.path), context.run_config
        out = self.out or Path(str(run_config.get("out") or Path("runs") / experiment.name))
        resume = bool(run_config.get("resume", False)) if self.resume is None else self.resume
        server, clients = experiment.server, experiment.data.clients
        self.federation = Federation(
            grid,
            clients,
            server.quorum,
            deadline=self.deadline or _seconds(run_config, "deadline") or server.deadline,
            wait=_seconds(run_config, "wait") or server.wait,
            patience=server.patience,
            names=client_ids(clients),
        )
        # every round is a line of the server's output: that is what `flwr run --stream` shows
        runs = len(experiment.methods) * len(experiment.seeds)
        watch = self.watch or lines(runs, experiment.name, sys.stdout, seconds=0.0, rounds_only=True)
        try:
            self.results = execute_with(
                experiment, out, FlowerBackend(self.federation), resume=resume, watch=Several(watch, _DoorLog())
            )
        except FuseError as why:
            _log.error("%s", why)
            raise
        write_page([out], out / "report.html")

    def close(self) -> None:
        """Stop waiting for answers."""
        if self.federation is not None:
            self.federation.closed = True


def _seconds(run_config: Mapping[str, Any], key: str) -> float:
    """A number of seconds that a run's config gives; 0 leaves it to the experiment file.

    Raises:
        ConfigError: if it is no such number.
    """
    try:
        seconds = float(run_config.get(key, 0.0))
    except (TypeError, ValueError):
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise ConfigError(f"{key} of the run's config is {run_config[key]!r}, expected seconds, or 0 for the file's")
    return seconds


def server_app(path: str | Path) -> ServerApp:
    """Flower's `ServerApp` for an experiment file."""
    app = ServerApp()
    app.main()(ExperimentServer(Path(path)))
    return app


def simulate(
    experiment: Experiment,
    out: Path,
    *,
    resume: bool = False,
    deadline: float | None = None,
    workers: int | None = None,
    watch: Watcher | None = None,
) -> Results:
    """Run an experiment on Flower's simulation engine; the run directory is as in process, to the last bit.

    Args:
        experiment: what to run.
        out: the run directory.
        resume: go on with what is in it.
        deadline: seconds a round may take; by default as the file says.
        workers: how many clients train at a time; by default one per core.
        watch: notified of progress.
    """
    for name, value in _RAY.items():
        os.environ.setdefault(name, value)
    from flwr.simulation import run_simulation

    with _simulation_folder() as home:
        path = home / "experiment.toml"
        path.write_text(experiment.to_toml(), encoding="utf-8")
        experiment_server = ExperimentServer(path, out, resume, deadline, watch)
        server = ServerApp()
        server.main()(experiment_server)
        ray = {"num_cpus": workers or os.cpu_count() or 1, "_temp_dir": str(home / "ray")}
        quiet = {"include_dashboard": False, "log_to_driver": False}  # why a client failed stands in the ledger
        backend: dict[str, Any] = {"init_args": {**ray, **quiet}, "client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
        try:
            run_simulation(server, site_app(path), experiment.data.clients, "ray", backend)
        finally:
            experiment_server.close()
    if experiment_server.results is None:
        raise FuseError("Flower's simulation ended before the experiment did; its own words are above")
    return experiment_server.results


@contextmanager
def _simulation_folder() -> Iterator[Path]:
    """A short-named folder for the simulation's files and sockets, and silence but for errors."""
    home, logger = Path(tempfile.mkdtemp(prefix="ff-")), logging.getLogger("flwr")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield home
    finally:
        logger.setLevel(before)
        shutil.rmtree(home, ignore_errors=True)

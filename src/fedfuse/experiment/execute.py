"""Run an experiment: every seed, every method, every round, recorded as it happens."""

from __future__ import annotations

import json
import re
import signal
import tomllib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, Protocol

from fedfuse.core.files import write_atomically
from fedfuse.core.lock import hold_folder
from fedfuse.core.model import Apart, Model, Single
from fedfuse.core.params import Params
from fedfuse.core.recipe import Recipe
from fedfuse.core.seams import Engine
from fedfuse.core.spec import Spec
from fedfuse.core.state import ServerState
from fedfuse.core.threads import one_thread
from fedfuse.engines.memo import Memo
from fedfuse.engines.pool import Pool
from fedfuse.errors import ConfigError
from fedfuse.experiment.config import Experiment, file_name
from fedfuse.experiment.environment import environment
from fedfuse.experiment.ledger import Ledger, plain, write_json, write_results
from fedfuse.experiment.prepare import PreparedExperiment, Setting, prepare
from fedfuse.experiment.resume import Checkpoints, same_run
from fedfuse.experiment.watch import Quiet, Watcher
from fedfuse.nets.cost import density
from fedfuse.report.tables import markdown, summary
from fedfuse.server.loop import Record, run
from fedfuse.wire.files import load_model, save_model

_PARTIAL_FILE = re.compile(r"\..+\.[0-9a-f]{16}")  # a file that was being written; see `atomic`


class EngineWithMemory(Engine, Protocol):
    """An engine whose clients' memories can be saved and brought back."""

    memories: dict[str, Params]


class Backend(Protocol):
    """Trains an experiment's clients: worker processes on this machine, or sites elsewhere."""

    @property
    def workers(self) -> int:
        """How many processes of this machine train."""
        ...

    def sites(self, prepared: PreparedExperiment) -> Mapping[str, int] | None:
        """The clients and how many rows each holds; None where the experiment's partition decides it."""
        ...

    def engine(self, setting: Setting, label: str, recipe: Recipe, watch: Watcher) -> EngineWithMemory:
        """The clients of one method on one seed."""
        ...


@dataclass(frozen=True, slots=True)
class _LocalBackend:
    """Worker processes of this machine, and a memo of what they did before."""

    pool: Pool
    store: Memo | None

    @property
    def workers(self) -> int:
        return self.pool.workers

    def sites(self, _: PreparedExperiment) -> None:
        return None

    def engine(self, setting: Setting, _: str, __: Recipe, watch: Watcher) -> EngineWithMemory:
        plain = self.pool.engine(setting.population, setting.seed, watch.client_done)
        return self.store.wrap(plain) if self.store else plain


@dataclass(frozen=True, slots=True)
class Results:
    """What a run gives: its rows, and where its files are."""

    name: str
    folder: Path
    rows: tuple[Mapping[str, Any], ...]

    def table(self) -> str:
        """Mean ± standard deviation over seeds, as a markdown table; of a sweep, one table per experiment."""
        names = list(dict.fromkeys(row["experiment"] for row in self.rows))
        if len(names) == 1:
            return markdown(summary(self.rows))
        each = {name: [row for row in self.rows if row["experiment"] == name] for name in names}
        return "\n\n".join(f"### {name}\n\n{markdown(summary(rows))}" for name, rows in each.items())


def execute(
    experiment: Experiment,
    out: Path,
    *,
    resume: bool = False,
    workers: int | None = None,
    memo: Path | None = None,
    watch: Watcher | None = None,
) -> Results:
    """Run an experiment into a directory.

    Args:
        experiment: what to run.
        out: the run directory.
        resume: go on with what is in it.
        workers: worker processes; 0 trains in this one, by default there is one per core.
        memo: where trained updates are kept for reuse; None keeps none.
        watch: notified of progress, for a progress bar.

    Raises:
        ConfigError: before any training, if the directory or the experiment cannot be used.
    """
    prepared = prepare(experiment)
    prepared.check()
    store = _open_memo(memo) if memo else None
    folder = _RunFolder(out)
    with folder.lock():
        folder.open(experiment, resume)
        with one_thread(), _start_pool(workers) as pool:
            return _run(folder, prepared, None, _LocalBackend(pool, store), watch or Quiet())


def execute_with(
    experiment: Experiment, out: Path, backend: Backend, *, resume: bool = False, watch: Watcher | None = None
) -> Results:
    """Run an experiment into a directory with clients that live elsewhere; all else is as in `execute`."""
    prepared = prepare(experiment)
    sites = backend.sites(prepared)
    prepared.check(sites)
    folder = _RunFolder(out)
    with folder.lock():
        folder.open(experiment, resume)
        with one_thread():
            return _run(folder, prepared, sites, backend, watch or Quiet())


def _run(
    folder: _RunFolder, prepared: PreparedExperiment, sites: Mapping[str, int] | None, backend: Backend, watch: Watcher
) -> Results:
    """Every seed, every method."""
    experiment = prepared.experiment
    write_json(folder.path / "environment.json", environment(prepared.dataset, backend.workers))
    for seed in experiment.seeds:
        setting = prepared.setting(seed, sites)
        if sites is None:
            folder.write_partition(prepared, setting)
        for label, recipe in prepared.recipes.items():
            engine, saved = backend.engine(setting, label, recipe, watch), folder.checkpoints(label, seed)
            _MethodRun(folder, prepared, setting, label, recipe, engine, watch, saved).run_rounds()
            folder.publish(experiment)
    rows = ({"experiment": experiment.name, **line} for line in folder.ordered_lines(experiment))
    return Results(experiment.name, folder.path, tuple(rows))


@dataclass(frozen=True, slots=True)
class _RunFolder:
    """A run directory and the names of what is in it."""

    path: Path

    @property
    def ledger(self) -> Ledger:
        return Ledger(self.path / "ledger.jsonl")

    def lock(self) -> AbstractContextManager[None]:
        """The directory, for this run alone."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as why:
            raise ConfigError(f"cannot write {self.path}: {why.strerror or why}; choose another --out") from why
        return hold_folder(self.path, wait=False)

    def open(self, experiment: Experiment, resume: bool) -> None:
        """Make the directory ready, or say why it cannot be used."""
        config, text, rounds = self.path / "config.toml", experiment.to_toml(), experiment.rounds
        if config.exists():
            if not resume:
                raise ConfigError(f"{self.path} holds a run already; continue it with --resume or choose another --out")
            old = _read_toml(config)
            if why := same_run(old, tomllib.loads(text)):
                raise ConfigError(f"{self.path} holds another run: {why}; choose another --out")
            rounds = int(old["rounds"])
        elif self.ledger.path.exists() or (resume and self._has_files()):
            raise ConfigError(f"{self.path} is not a run directory: it has no config.toml; choose another --out")
        if resume:
            self._remove_partial_files()
        if rounds < experiment.rounds:
            self._drop_round(rounds)
        with write_atomically(config) as file:
            file.write(text.encode())

    def _has_files(self) -> bool:
        """Whether anything is there but what a run killed at its very start left behind."""
        return self.path.is_dir() and any(not _PARTIAL_FILE.fullmatch(path.name) for path in self.path.iterdir())

    def _remove_partial_files(self) -> None:
        """Remove what a killed run wrote by half."""
        self.ledger.drop_partial_line()
        for path in self.path.rglob(".*"):
            if _PARTIAL_FILE.fullmatch(path.name):
                path.unlink(missing_ok=True)

    def _drop_round(self, last: int) -> None:
        """A round that was the last one is scored differently, so it is done again when rounds are added."""
        self.ledger.keep(lambda line: line["round"] != last)

    def checkpoints(self, label: str, seed: int) -> Checkpoints:
        """The checkpoints of one method on one seed."""
        return Checkpoints(self.path / "checkpoints" / f"{file_name(label)}-{seed}")

    def model(self, label: str, seed: int) -> Path:
        """The file of the final model of one method on one seed."""
        return self.path / "models" / f"{file_name(label)}-{seed}.safetensors"

    def write_partition(self, prepared: PreparedExperiment, setting: Setting) -> None:
        """Write which client holds how many rows of each class, for the report."""
        path, classes = self.path / "partition.json", len(prepared.dataset.classes)
        labels, parts = prepared.dataset.train.y, setting.partition
        seeds = _seeds_in(path)
        counts = dict(zip(parts.clients, parts.counts(labels, classes).tolist(), strict=True))
        server = labels[parts.server].bincount(minlength=classes).tolist()
        seeds[str(setting.seed)] = {"clients": counts, "server": server, **plain(parts.facts)}
        write_json(path, {"classes": list(prepared.dataset.classes), "seeds": seeds})

    def ordered_lines(self, experiment: Experiment) -> list[dict[str, Any]]:
        """The ledger in the experiment's own order: method, seed, round."""
        labels, seeds = list(experiment.recipes()), list(experiment.seeds)
        known = [line for line in self.ledger.lines() if line["label"] in labels and line["seed"] in seeds]
        return sorted(known, key=lambda r: (labels.index(r["label"]), seeds.index(r["seed"]), r["round"]))

    def publish(self, experiment: Experiment) -> None:
        """Bring results.json up to the ledger."""
        write_results(self.path / "results.json", experiment.name, self.ordered_lines(experiment))


@dataclass(frozen=True, slots=True)
class _MethodRun:
    """One method on one seed, from the round it had reached to its last round."""

    folder: _RunFolder
    prepared: PreparedExperiment
    setting: Setting
    label: str
    recipe: Recipe
    engine: EngineWithMemory
    watch: Watcher
    checkpoints: Checkpoints

    def run_rounds(self) -> None:
        """Run the rounds that are missing and leave the final model."""
        setting, seed = self.setting, self.setting.seed
        state = self._resume_state()
        asked = min(setting.plan.per_round or setting.bench.population, setting.bench.population)
        self.watch.method_started(self.label, seed, state.round, setting.plan.rounds, asked)
        for record in run(self.recipe, self.engine, setting.bench, setting.judge, state, setting.plan):
            state = record.state
            self._record(record)
            self.watch.round_done(self.label, seed, state.round, record.facts.get("accuracy"))
        self._finish(state)

    def _resume_state(self) -> ServerState:
        """The last state that both the ledger and the checkpoints have."""
        mine = {line["round"]: line for line in self.folder.ledger.lines() if self._is_mine(line)}
        done = next(r for r in range(len(mine) + 1) if r + 1 not in mine)
        state, memories = self.setting.start, dict[str, Params]()
        found = self.checkpoints.restore(done, state, self._trusted_factories()) if done else None
        if found is not None and self._has_best(found[0].round, mine):
            state, memories = found
        self.engine.memories = memories
        if any(round_ > state.round for round_ in mine):
            self.folder.ledger.keep(lambda line: not self._is_mine(line) or line["round"] <= state.round)
        return state

    def _has_best(self, done: int, mine: Mapping[int, Mapping[str, Any]]) -> bool:
        """Whether the best model of the rounds done is at hand, where one is to be chosen."""
        if self.prepared.experiment.select == "last":
            return True
        best = max(range(1, done + 1), key=lambda r: (mine[r]["server_accuracy"], -r))
        kept = int(self._best_facts().get("round", 0))
        return kept == best or kept > done  # a later one will be found again

    def _is_mine(self, line: Mapping[str, Any]) -> bool:
        return bool(line["label"] == self.label and line["seed"] == self.setting.seed)

    def _record(self, record: Record) -> None:
        """Ledger first, then the checkpoint: what the ledger has beyond a checkpoint is simply done again."""
        line = {"method": self.recipe.name, "label": self.label, "seed": self.setting.seed, **record.facts}
        line |= _sizes(record.state)
        if self.prepared.experiment.select == "best-on-server":
            line["server_accuracy"] = self._server_accuracy(record.state.model)
            self._keep_best(record.state, line["server_accuracy"])
        self.folder.ledger.append(line)
        self.checkpoints.save(record.state, self.engine.memories)

    def _server_accuracy(self, model: Model) -> float:
        rows = self.setting.bench.need_rows("select = 'best-on-server'")
        members = model.members if isinstance(model, Apart) else (model,)
        return sum(float(self.setting.judge.evaluate(m, rows)["accuracy"]) for m in members) / len(members)

    def _keep_best(self, state: ServerState, accuracy: float) -> None:
        facts = self._best_facts()
        if facts.get("round", 0) >= state.round or accuracy > facts.get("server_accuracy", -1.0):
            save_model(state.model, self._best_path(), {"round": state.round, "server_accuracy": accuracy})

    def _best_path(self) -> Path:
        return self.checkpoints.folder / "best.safetensors"

    def _best_facts(self) -> Mapping[str, Any]:
        """What the best model's file says of it; nothing if there is none that can be read."""
        try:
            return load_model(self._best_path(), self._trusted_factories())[1]
        except ConfigError:
            return {}

    def _trusted_factories(self) -> frozenset[str]:
        return self.setting.plan.rules.trusted

    def _finish(self, state: ServerState) -> None:
        """Save the chosen model; with `best-on-server`, mark the round it came from."""
        facts = {"method": self.recipe.name, "label": self.label, "seed": self.setting.seed, "round": state.round}
        model = state.model
        if self.prepared.experiment.select == "best-on-server":
            model, best = load_model(self._best_path(), self._trusted_factories())
            facts["round"] = best["round"]
            self._mark_selected(int(best["round"]))
        save_model(model, self.folder.model(self.label, self.setting.seed), facts)

    def _mark_selected(self, chosen: int) -> None:
        for line in self.folder.ledger.lines():
            wanted = line["round"] == chosen
            if self._is_mine(line) and line.get("selected") != wanted:
                self.folder.ledger.append(line | {"selected": wanted})


def _open_memo(folder: Path) -> Memo:
    try:
        return Memo(folder)
    except ConfigError as why:
        raise ConfigError(f"{why}, or do without it: --no-memo") from why


def _start_pool(workers: int | None) -> Pool:
    """A pool whose processes ignore Ctrl-C from their start on: this process handles it and ends them."""
    if workers == 0 or not hasattr(signal, "pthread_sigmask"):
        return Pool(workers)
    resource_tracker.ensure_running()  # starting it later would unblock the signal again
    old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return Pool(workers)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)


def free_folder(parent: Path, name: str) -> Path:
    """The first of NAME, NAME-2, NAME-3, … that is not there yet."""
    path, number = parent / file_name(name), 1
    while path.exists():
        number += 1
        path = parent / f"{file_name(name)}-{number}"
    return path


def _sizes(state: ServerState) -> dict[str, Any]:
    """How large the model is: all its numbers, those no mask holds at zero, and the channels its layers have kept."""
    sizes = [(m, sum(t.numel() for t in m.posterior.mean.values())) for m in state.model.members]
    nonzero = sum(round(size * density(m.posterior.mean, state.memory)) for m, size in sizes)
    facts = {"parameters": sum(size for _, size in sizes), "weights": nonzero}
    channels = _channels(state.model.spec) if isinstance(state.model, Single) else {}
    return facts | ({"channels": channels} if channels else {})


def _channels(spec: Spec) -> dict[str, list[int]]:
    """Of each layer that was pruned, how many channels there are and were."""
    whole = replace(spec, surgery={}, kept={}).skeleton().state_dict()
    return {layer: [len(kept), len(whole[f"{layer}.weight"])] for layer, kept in spec.kept.items()}


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as why:
        raise ConfigError(f"{path} cannot be read: {why}") from why


def _seeds_in(path: Path) -> dict[str, Any]:
    """The seeds in a partition.json; none if it is missing or damaged, because every seed writes its own again."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8"))["seeds"])
    except (OSError, ValueError, TypeError, KeyError):
        return {}

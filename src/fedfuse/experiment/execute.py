"""Run an experiment: every seed, every method, every round, recorded as it happens."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from fedfuse.core.model import Model, networks
from fedfuse.core.params import Params
from fedfuse.core.recipe import Engine, Recipe
from fedfuse.core.state import ServerState
from fedfuse.engines.memo import Memo
from fedfuse.engines.pool import Pool
from fedfuse.errors import ConfigError
from fedfuse.experiment.config import Experiment
from fedfuse.experiment.environment import environment
from fedfuse.experiment.ledger import Ledger, plain, write_json, write_results
from fedfuse.experiment.prepare import Prepared, Setting, prepare
from fedfuse.experiment.resume import Checkpoints, same_run
from fedfuse.experiment.watch import Quiet, Watcher
from fedfuse.report.tables import markdown, summary
from fedfuse.server.loop import Record, run
from fedfuse.wire.codec import atomic
from fedfuse.wire.files import load_model, save_model


class Remembering(Engine, Protocol):
    """An engine whose clients' memories can be saved and brought back."""

    memories: dict[str, Params]


@dataclass(frozen=True, slots=True)
class Results:
    """What a run gives: its rows, and where its files are."""

    name: str
    folder: Path
    rows: tuple[Mapping[str, Any], ...]

    def table(self) -> str:
        """Mean ± standard deviation over seeds, as a markdown table."""
        return markdown(summary(self.rows))


def execute(
    experiment: Experiment,
    out: Path,
    *,
    resume: bool = False,
    workers: int = 2,
    memo: Path | None = None,
    watch: Watcher | None = None,
) -> Results:
    """Run an experiment into a directory.

    Args:
        experiment: what to run.
        out: the run directory.
        resume: go on with what is in it.
        workers: worker processes; 0 trains in this one.
        memo: where trained updates are kept for reuse; None keeps none.
        watch: told what happens, for a progress bar.

    Raises:
        ConfigError: before any training, if the directory or the experiment cannot be used.
    """
    watch = watch or Quiet()
    prepared = prepare(experiment)
    prepared.check()
    folder = _Folder(out)
    folder.open(experiment, resume)
    store = Memo(memo) if memo else None
    write_json(out / "environment.json", environment(prepared.dataset, workers))
    with Pool(workers) as pool:
        for seed in experiment.seeds:
            setting = prepared.setting(seed)
            folder.note_partition(prepared, setting)
            for label, recipe in prepared.recipes.items():
                plain_engine = pool.engine(setting.population, seed, watch.client_done)
                engine: Remembering = store.around(plain_engine) if store else plain_engine
                _Course(folder, prepared, setting, label, recipe, engine, watch).go()
                folder.publish(experiment)
    return Results(experiment.name, out, tuple(folder.ordered(experiment)))


@dataclass(frozen=True, slots=True)
class _Folder:
    """A run directory and the names of what is in it."""

    path: Path

    @property
    def ledger(self) -> Ledger:
        return Ledger(self.path / "ledger.jsonl")

    def open(self, experiment: Experiment, resume: bool) -> None:
        """Make the directory ready, or say why it cannot be used."""
        config = self.path / "config.toml"
        text = experiment.to_toml()
        if config.exists():
            old = _read_toml(config)
            if not resume:
                raise ConfigError(f"{self.path} holds a run already; continue it with --resume or choose another --out")
            if why := same_run(old, tomllib.loads(text)):
                raise ConfigError(f"{self.path} holds another run: {why}; choose another --out")
            if old.get("rounds", 1) != experiment.rounds:
                self._reopen_last(int(old.get("rounds", 1)))
        elif resume and self.path.exists() and any(self.path.iterdir()):
            raise ConfigError(f"{self.path} is not a run directory: it has no config.toml")
        with atomic(config) as file:
            file.write(text.encode())

    def _reopen_last(self, last: int) -> None:
        """A round that was the last one is scored differently, so it is done again when rounds are added."""
        self.ledger.keep(lambda line: line["round"] != last)

    def checkpoints(self, label: str, seed: int) -> Checkpoints:
        """Where a course's states are kept."""
        return Checkpoints(self.path / "checkpoints" / f"{file_name(label)}-{seed}")

    def model(self, label: str, seed: int) -> Path:
        """A course's final model."""
        return self.path / "models" / f"{file_name(label)}-{seed}.safetensors"

    def note_partition(self, prepared: Prepared, setting: Setting) -> None:
        """Who holds what, for the report."""
        path, classes = self.path / "partition.json", len(prepared.dataset.classes)
        labels, parts = prepared.dataset.train.y, setting.partition
        known: dict[str, Any] = {"classes": list(prepared.dataset.classes), "seeds": {}}
        known = _read_json(path) if path.exists() else known
        counts = dict(zip(parts.clients, parts.counts(labels, classes).tolist(), strict=True))
        server = labels[parts.server].bincount(minlength=classes).tolist()
        known["seeds"][str(setting.seed)] = {"clients": counts, "server": server, **plain(parts.facts)}
        write_json(path, known)

    def ordered(self, experiment: Experiment) -> list[dict[str, Any]]:
        """The ledger in the experiment's own order: method, seed, round."""
        labels, seeds = list(experiment.recipes()), list(experiment.seeds)
        known = [line for line in self.ledger.lines() if line["label"] in labels and line["seed"] in seeds]
        return sorted(known, key=lambda r: (labels.index(r["label"]), seeds.index(r["seed"]), r["round"]))

    def publish(self, experiment: Experiment) -> None:
        """Bring results.json up to the ledger."""
        write_results(self.path / "results.json", experiment.name, self.ordered(experiment))


@dataclass(frozen=True, slots=True)
class _Course:
    """One method on one seed, from wherever it stands to its last round."""

    folder: _Folder
    prepared: Prepared
    setting: Setting
    label: str
    recipe: Recipe
    engine: Remembering
    watch: Watcher

    def go(self) -> None:
        """Run the rounds that are missing and leave the final model."""
        seed, rounds = self.setting.seed, self.setting.plan.rounds
        state = self._stand()
        self.watch.course_began(self.label, seed, state.round, rounds)
        setting = self.setting
        for record in run(self.recipe, self.engine, setting.bench, setting.judge, state, setting.plan):
            state = record.state
            self._record(record)
            self.watch.round_done(self.label, seed, state.round, record.facts.get("accuracy"))
        self._finish(state)

    def _stand(self) -> ServerState:
        """Where the ledger and the checkpoints agree that we are."""
        seed = self.setting.seed
        mine = {line["round"] for line in self.folder.ledger.lines() if self._is_mine(line)}
        done = next((r for r in range(len(mine) + 1) if r + 1 not in mine), 0)
        found = self.folder.checkpoints(self.label, seed).restore(done, self.setting.start) if done else None
        if found is None:
            state = self.setting.start
        else:
            state, memories = found
            self.engine.memories = dict(memories)
        if beyond := [r for r in mine if r > state.round]:
            self.folder.ledger.keep(lambda line: not (self._is_mine(line) and line["round"] in beyond))
        return state

    def _is_mine(self, line: Mapping[str, Any]) -> bool:
        return bool(line["label"] == self.label and line["seed"] == self.setting.seed)

    def _record(self, record: Record) -> None:
        """Ledger first, then the checkpoint: what the ledger has beyond a checkpoint is simply done again."""
        line = {"method": self.recipe.name, "label": self.label, "seed": self.setting.seed, **record.facts}
        line["parameters"] = _size(record.state.model)
        if self.prepared.experiment.select == "best-on-server":
            line["server_accuracy"] = self._server_accuracy(record.state.model)
            self._keep_best(record.state, line["server_accuracy"])
        self.folder.ledger.append(line)
        self.folder.checkpoints(self.label, self.setting.seed).save(record.state, self.engine.memories)

    def _server_accuracy(self, model: Model) -> float:
        rows = self.setting.bench.need_rows("select = 'best-on-server'")
        return float(self.setting.judge.evaluate(model, rows)["accuracy"])

    def _keep_best(self, state: ServerState, accuracy: float) -> None:
        path = self._best_path()
        facts = load_model(path, self._trusted())[1] if path.exists() else {}
        if facts.get("round", 0) >= state.round or accuracy > facts.get("server_accuracy", -1.0):
            save_model(state.model, path, {"round": state.round, "server_accuracy": accuracy})

    def _best_path(self) -> Path:
        return self.folder.checkpoints(self.label, self.setting.seed).folder / "best.safetensors"

    def _trusted(self) -> frozenset[str]:
        return self.setting.plan.rules.trusted

    def _finish(self, state: ServerState) -> None:
        """Save the chosen model; with `best-on-server`, mark the round it came from."""
        facts = {"method": self.recipe.name, "label": self.label, "seed": self.setting.seed, "round": state.round}
        model = state.model
        if self._best_path().exists() and self.prepared.experiment.select == "best-on-server":
            model, best = load_model(self._best_path(), self._trusted())
            facts["round"] = best["round"]
            self._mark(int(best["round"]))
        save_model(model, self.folder.model(self.label, self.setting.seed), facts)

    def _mark(self, chosen: int) -> None:
        for line in self.folder.ledger.lines():
            wanted = line["round"] == chosen
            if self._is_mine(line) and line.get("selected") != wanted:
                self.folder.ledger.append(line | {"selected": wanted})


def file_name(label: str) -> str:
    """A label as part of a file's name.

    Example:
        >>> file_name("fedprox(mu=0.1)")
        'fedprox_mu_0.1'
    """
    return re.sub(r"[^A-Za-z0-9.+-]+", "_", label).strip("_")


def free_folder(parent: Path, name: str) -> Path:
    """The first of NAME, NAME-2, NAME-3, … that is not there yet."""
    path, number = parent / file_name(name), 1
    while path.exists():
        number += 1
        path = parent / f"{file_name(name)}-{number}"
    return path


def _size(model: Model) -> int:
    return sum(t.numel() for m in networks(model) for t in m.posterior.mean.values())


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as why:
        raise ConfigError(f"{path} cannot be read: {why}") from why


def _read_json(path: Path) -> dict[str, Any]:
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
        known["seeds"].keys()
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as why:
        raise ConfigError(f"{path} is damaged: {why}; delete it and --resume") from why
    return dict(known)

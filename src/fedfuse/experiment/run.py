"""Run an experiment: every seed, every method, every round, recorded as it happens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from fedfuse.core.metadata import About, distinct_names, versions
from fedfuse.core.model import Apart, Single
from fedfuse.core.params import Params
from fedfuse.core.recipe import Recipe
from fedfuse.core.seams import Engine
from fedfuse.core.state import ServerState
from fedfuse.core.torch_utils import one_thread
from fedfuse.engines.memo import Memo
from fedfuse.engines.pool import Pool, WorkersAnswer
from fedfuse.engines.starting import start_early
from fedfuse.errors import ConfigError
from fedfuse.experiment.callbacks import Callback, Watcher
from fedfuse.experiment.config import Experiment
from fedfuse.experiment.estimate import TimeInWorker, estimate_seconds
from fedfuse.experiment.prepare import GivenObjects, PreparedExperiment, Setting, prepare
from fedfuse.experiment.results import Results, write_json
from fedfuse.experiment.rundir import Checkpoints, RunFolder, environment, made_of
from fedfuse.nets.cost import density
from fedfuse.server.judge import AskModels
from fedfuse.server.loop import Record, run
from fedfuse.wire.files import load_model, save_model


def execute(
    experiment: Experiment,
    out: Path,
    *,
    resume: bool = False,
    workers: int | None = None,
    memo: Path | None = None,
    watch: Watcher | None = None,
    given: GivenObjects | None = None,
    announce: Callable[[Mapping[str, float]], None] | None = None,
) -> Results:
    """Run an experiment into a directory.

    Args:
        experiment: what to run.
        out: the run directory.
        resume: go on with what is in it.
        workers: worker processes; 0 trains in this one, by default there is one per core.
        memo: where trained updates are kept for reuse; None keeps none.
        watch: notified of progress, for a progress bar.
        given: a network and data that came as objects.
        announce: called before anything is trained with the seconds each method may take, by label.

    Raises:
        ConfigError: before any training, if the directory or the experiment cannot be used.
    """
    if workers != 0:
        start_early()
    prepared = prepare(experiment, given=given)
    prepared.check()
    store = None
    if memo:
        try:
            store = Memo(memo)
        except ConfigError as why:
            raise ConfigError(f"{why}, or do without it: --no-memo") from why
    folder = RunFolder(out)
    with folder.lock():
        folder.open(experiment, resume, made_of(prepared, as_objects=given is not None))
        with one_thread(), Pool(workers) as pool:
            if announce is not None:
                announce(estimate_seconds(prepared, pool.workers, TimeInWorker(pool)))
            if given is None:  # workers share rows of our own; those that came as objects stay where they are
                for rows in (prepared.dataset.test, prepared.dataset.train):
                    pool.move_rows(rows)
            return _run(folder, prepared, None, _LocalBackend(pool, store), watch or Callback())


def execute_with(
    experiment: Experiment, out: Path, backend: Backend, *, resume: bool = False, watch: Watcher | None = None
) -> Results:
    """Run an experiment into a directory with clients that live elsewhere; all else is as in `execute`."""
    prepared = prepare(experiment)
    sites = backend.sites(prepared)
    prepared.check(sites)
    folder = RunFolder(out)
    with folder.lock():
        folder.open(experiment, resume, made_of(prepared))
        with one_thread():
            return _run(folder, prepared, sites, backend, watch or Callback())


class Backend(Protocol):
    """Trains an experiment's clients: worker processes on this machine, or sites elsewhere."""

    @property
    def workers(self) -> int:
        """How many processes of this machine train."""
        ...

    def sites(self, prepared: PreparedExperiment) -> Mapping[str, int] | None:
        """The clients and how many rows each holds; None where the experiment's partition decides it."""
        ...

    @property
    def ask(self) -> AskModels:
        """Who asks models about the judge's rows."""
        ...

    def engine(self, setting: Setting, label: str, recipe: Recipe, watch: Watcher) -> EngineWithMemory:
        """The clients of one method on one seed."""
        ...


class EngineWithMemory(Engine, Protocol):
    """An engine whose clients' memories can be saved and brought back."""

    memories: dict[str, Params]


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

    @property
    def ask(self) -> AskModels:
        return WorkersAnswer(self.pool)

    def engine(self, setting: Setting, _: str, __: Recipe, watch: Watcher) -> EngineWithMemory:
        plain = self.pool.engine(setting.population, setting.seed, watch.client_done)
        return self.store.wrap(plain) if self.store else plain


def _run(
    folder: RunFolder, prepared: PreparedExperiment, sites: Mapping[str, int] | None, backend: Backend, watch: Watcher
) -> Results:
    """Every seed, every method."""
    experiment = prepared.experiment
    write_json(folder.path / "environment.json", environment(prepared.dataset, backend.workers))
    watch.run_started(experiment.name, folder.path, experiment.model_dump(mode="json", exclude_none=True))
    for seed in experiment.seeds:
        setting = prepared.setting(seed, sites)
        setting = replace(setting, judge=replace(setting.judge, ask=backend.ask))
        if sites is None:
            folder.write_partition(prepared, setting)
        for label, recipe in experiment.build_recipes().items():  # a seed's own parts, for they may keep state
            engine, saved = backend.engine(setting, label, recipe, watch), folder.checkpoints(label, seed)
            _MethodRun(folder, prepared, setting, label, recipe, engine, watch, saved).run_rounds()
            lines = folder.publish(experiment)
    watch.run_done()
    return Results(experiment.name, folder.path, tuple({"experiment": experiment.name, **line} for line in lines))


@dataclass(frozen=True, slots=True)
class _MethodRun:
    """One method on one seed, from the round it had reached to its last round."""

    folder: RunFolder
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
        exchanges = self.recipe.exchanges(setting.plan.rounds, state.network)
        self.watch.method_started(self.label, seed, state.round, exchanges, asked)
        plan = replace(setting.plan, checked=True)  # by `PreparedExperiment.check`, for all seeds before the first
        bench = replace(setting.bench, progress=self.watch.server_progress)
        for record in run(self.recipe, self.engine, bench, setting.judge, state, plan):
            state = record.state
            self.watch.round_done(self.label, seed, state.round, self._record(record))
        self._finish(state)

    def _resume_state(self) -> ServerState:
        """The last state that both the ledger and the checkpoints have.

        A round's line is written before its checkpoint, so the ledger may be ahead; what it has beyond the checkpoint
        is done again, and comes out the same, because seed and round decide every random number.
        """
        mine = {line["round"]: line for line in self.folder.ledger.lines() if self._is_mine(line)}
        done = next(r for r in range(len(mine) + 1) if r + 1 not in mine)
        state, memories = self.setting.start, dict[str, Params]()
        found = self.checkpoints.restore(done, state, self._trusted) if done else None
        if found is not None and self._has_best(found[0].round, mine):
            state, memories = found
        self.engine.memories = memories
        if any(round_ > state.round for round_ in mine):
            self.folder.ledger.keep(lambda line: not self._is_mine(line) or line["round"] <= state.round)
        return state

    def _has_best(self, done: int, mine: Mapping[int, Mapping[str, Any]]) -> bool:
        """Whether the best model of the rounds done is at hand, where one is to be chosen."""
        if not self._selects:
            return True
        best = max(range(1, done + 1), key=lambda r: (mine[r]["server_accuracy"], -r))
        kept = int(self._best_facts().get("round", 0))
        return kept == best or kept > done  # a later one will be found again

    def _is_mine(self, line: Mapping[str, Any]) -> bool:
        return bool(line["label"] == self.label and line["seed"] == self.setting.seed)

    def _record(self, record: Record) -> Mapping[str, Any]:
        """Write the ledger's line, then the checkpoint: what the ledger has beyond it is simply done again."""
        state = record.state
        line = {"method": self.recipe.name, "label": self.label, "seed": self.setting.seed, **record.facts}
        line |= _sizes(state)
        if self._selects:
            rows = self.setting.bench.need_rows("select = 'best-on-server'")
            members = state.model.members if isinstance(state.model, Apart) else (state.model,)
            accuracy = sum(float(self.setting.judge.evaluate(m, rows)["accuracy"]) for m in members) / len(members)
            line["server_accuracy"] = accuracy
            best = self._best_facts()
            if best.get("round", 0) >= state.round or accuracy > best.get("server_accuracy", -1.0):
                save_model(state.model, self._best, {"round": state.round, "server_accuracy": accuracy})
        self.folder.ledger.append(line)
        self.checkpoints.save(state, self.engine.memories)
        return line

    @property
    def _selects(self) -> bool:
        return self.prepared.experiment.select == "best-on-server"

    @property
    def _best(self) -> Path:
        return self.checkpoints.folder / "best.safetensors"

    @property
    def _trusted(self) -> frozenset[str]:
        return self.setting.plan.rules.trusted

    def _best_facts(self) -> Mapping[str, Any]:
        """What the best model's file says of it; nothing if there is none that can be read."""
        try:
            return load_model(self._best, self._trusted, self.prepared.spec)[1]
        except ConfigError:
            return {}

    def _finish(self, state: ServerState) -> None:
        """Save the chosen model; with `best-on-server`, mark the round it came from."""
        facts = {"method": self.recipe.name, "label": self.label, "seed": self.setting.seed, "round": state.round}
        model, facts["task"] = state.model, self.prepared.experiment.task
        if self._selects:
            model, best = load_model(self._best, self._trusted, self.prepared.spec)
            facts["round"] = best["round"]
            for line in filter(self._is_mine, self.folder.ledger.lines()):
                if line.get("selected") != (chosen := line["round"] == int(best["round"])):
                    self.folder.ledger.append(line | {"selected": chosen})
        dataset = self.prepared.dataset
        form = (
            None if self.prepared.experiment.data.standardize else dataset.form
        )  # of rows scaled before, it is not known
        about = About(method=self.label, class_names=distinct_names(dataset.classes), inputs=form, versions=versions())
        save_model(model, self.folder.model(self.label, self.setting.seed), facts, about)


def _sizes(state: ServerState) -> dict[str, Any]:
    """How large the model is: all its numbers, those no mask holds at zero, and the channels its layers have kept."""
    sizes = [(m, sum(t.numel() for t in m.posterior.mean.values())) for m in state.model.members]
    nonzero = sum(round(size * density(m.posterior.mean, state.memory)) for m, size in sizes)
    facts: dict[str, Any] = {"parameters": sum(size for _, size in sizes), "weights": nonzero}
    if isinstance(state.model, Single) and (kept := state.model.spec.kept):
        whole = replace(state.model.spec, surgery={}, kept={}).skeleton().state_dict()
        facts["channels"] = {layer: [len(some), len(whole[f"{layer}.weight"])] for layer, some in kept.items()}
    return facts

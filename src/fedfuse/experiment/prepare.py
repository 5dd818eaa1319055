"""From an experiment's words to things: data, partitions, networks, recipes; what can be wrong is said here."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fedfuse.core.messages import Start
from fedfuse.core.model import Single
from fedfuse.core.recipe import Recipe
from fedfuse.core.rng import seeded
from fedfuse.core.rows import Rows
from fedfuse.core.settings import LocalSettings
from fedfuse.core.spec import Spec, factory_of
from fedfuse.core.state import Bench, ServerState
from fedfuse.data import Dataset, Partition, augmentation, load, partition, standardise
from fedfuse.engines.base import Population
from fedfuse.errors import ConfigError
from fedfuse.experiment.config import Experiment, Named
from fedfuse.server.admit import Rules
from fedfuse.server.judge import Judge
from fedfuse.server.loop import Plan


@dataclass(frozen=True, slots=True)
class Setting:
    """One seed of an experiment, ready to run: every method starts from the same state on the same rows."""

    seed: int
    partition: Partition
    population: Population
    bench: Bench
    judge: Judge
    start: ServerState
    plan: Plan


@dataclass(frozen=True, slots=True)
class Prepared:
    """An experiment whose words have been turned into things, seed by seed."""

    experiment: Experiment
    dataset: Dataset
    recipes: Mapping[str, Recipe]
    spec: Spec
    groups: tuple[tuple[int, int, Spec], ...]
    local: LocalSettings

    def setting(self, seed: int) -> Setting:
        """Everything one seed needs."""
        data, classes = self.experiment.data, len(self.dataset.classes)
        train, test = self.dataset.train, self.dataset.test
        parts = partition(
            train.y,
            data.partition,
            data.clients,
            seed,
            server_fraction=data.server_fraction,
            server_rows=data.server_rows,
            validation_fraction=data.validation_fraction,
        )
        population = Population(train, parts.clients)
        server = train.take(parts.server) if len(parts.server) else None
        bench = Bench(server, None, len(parts.clients), classes, self.local, seed)
        held_out = {c: train.take(rows) for c, rows in parts.validation.items()}
        score = self.experiment.judge
        judge = Judge(test, classes, score.bins, held_out, score.clients)
        return Setting(seed, parts, population, bench, judge, self._start(seed, population), self._plan(population))

    def check(self) -> None:
        """Everything that can be known before training, for every seed and method."""
        for seed in self.experiment.seeds:
            setting = self.setting(seed)
            for recipe in self.recipes.values():
                recipe.check(self.experiment.rounds, setting.bench)
        for recipe in self.recipes.values():
            self._check_networks(recipe)
        if self.experiment.select == "best-on-server":
            setting.bench.need_rows("select = 'best-on-server'")
        for spec in {self.spec, *(s for _, _, s in self.groups)}:
            _check_fit(spec, self.dataset)

    def _check_networks(self, recipe: Recipe) -> None:
        if self.groups and not getattr(recipe.aggregate, "mixes_networks", False):
            raise ConfigError(
                f"method {recipe.name!r} needs one network for all clients and the file gives groups their own; "
                "leave out [[models]] or use a method that fuses predictions"
            )

    def _start(self, seed: int, population: Population) -> ServerState:
        first = Single.of(_fresh(self.spec, seed, "start"), self.spec)
        starts: dict[str, Start] = {}
        own = self.experiment.start == "separate"
        for place, client in enumerate(population.clients):
            mine = [s for begin, every, s in self.groups if place >= begin and (place - begin) % every == 0]
            if own or mine:
                spec = mine[-1] if mine else self.spec
                words = ("start", client) if own else ("start", spec.to_text())
                starts[client] = Start(spec, Single.of(_fresh(spec, seed, *words), spec).posterior.mean)
        return ServerState(0, first, starts=starts)

    def _plan(self, population: Population) -> Plan:
        server = self.experiment.server
        named = frozenset(s.factory for s in (self.spec, *(g for _, _, g in self.groups)))
        rules = Rules(server.quorum, server.mass_ratio, server.memory_mib * 2**20, named)
        return Plan(self.experiment.rounds, self.experiment.clients_per_round, rules, population.sizes())


def prepare(experiment: Experiment) -> Prepared:
    """Load the data and build what all seeds share.

    Raises:
        ConfigError: or another sentence about what cannot be, before any training.
    """
    data = experiment.data
    dataset = load(data.source, train_limit=data.train_limit, test_limit=data.test_limit, options=data.options or None)
    if data.standardise:
        scale = standardise(dataset.train.x)
        dataset = Dataset(
            dataset.name,
            Rows(scale(dataset.train.x), dataset.train.y),
            Rows(scale(dataset.test.x), dataset.test.y),
            dataset.classes,
            dataset.facts,
        )
    groups = tuple((g.first, g.every, spec_for(g, dataset)) for g in experiment.models)
    names = experiment.local.augment
    plain = experiment.local.model_dump() | {"augment": augmentation(names) if names else None}
    local = LocalSettings(**plain)
    return Prepared(experiment, dataset, experiment.recipes(), spec_for(experiment.model, dataset), groups, local)


def spec_for(model: Named, dataset: Dataset) -> Spec:
    """The network's spec, with what the data decide (classes, channels, size, inputs) filled in where it can be."""
    make = factory_of(model.name)
    try:
        known = set(inspect.signature(make).parameters)
    except (TypeError, ValueError):  # a callable that hides its signature is called with the user's options alone
        known = set()
    shape = dataset.train.x.shape[1:]
    facts: dict[str, Any] = {"classes": len(dataset.classes), "inputs": shape.numel()}
    if len(shape) == 3:
        facts |= {"channels": shape[0], "size": shape[1]}
    fill = {k: v for k, v in facts.items() if k in known and k not in model.options}
    return Spec(model.name, {**fill, **model.options})


def _fresh(spec: Spec, seed: int, *purpose: str | int) -> torch.nn.Module:
    with seeded(seed, *purpose):
        return spec.build()


def _check_fit(spec: Spec, dataset: Dataset) -> None:
    row = dataset.train.x[:2]
    try:
        with torch.no_grad():
            out = spec.skeleton()(row)
    except (RuntimeError, IndexError, ValueError) as why:
        shape = "×".join(map(str, row.shape[1:]))
        raise ConfigError(
            f"model {spec.factory!r} cannot read rows of shape {shape}: {str(why).splitlines()[0]}"
        ) from why
    classes = len(dataset.classes)
    if out.ndim != 2 or out.shape[1] < classes:
        raise ConfigError(
            f"model {spec.factory!r} gives outputs of shape {tuple(out.shape)} for two rows, expected (2, {classes}): "
            f"{dataset.name} has {classes} classes"
        )

"""Builds an experiment's data, partitions, networks and recipes, and reports whatever cannot work before training."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fedfuse.core.bounds import AMONG_OWN, Bounds
from fedfuse.core.inputs import InputForm
from fedfuse.core.messages import Start
from fedfuse.core.model import Single
from fedfuse.core.recipe import Recipe
from fedfuse.core.rng import seeded
from fedfuse.core.rows import Rows
from fedfuse.core.settings import LocalSettings
from fedfuse.core.spec import Spec, factory_of
from fedfuse.core.state import Bench, ServerState
from fedfuse.core.words import check_options
from fedfuse.data import (
    Dataset,
    Iid,
    Partition,
    Scheme,
    Standardize,
    before_standardizing,
    load,
    partition,
    standardize,
)
from fedfuse.data.formats import empty_classes_text
from fedfuse.data.sources import EMPTY
from fedfuse.engines.local import Population
from fedfuse.errors import ConfigError, FuseError, error_text
from fedfuse.experiment.config import Experiment, NameWithOptions
from fedfuse.experiment.fit import check_equal_outputs, check_fit
from fedfuse.experiment.given import GivenObjects
from fedfuse.experiment.rehearse import rehearse, some_rows
from fedfuse.models.adapted import adapted_spec
from fedfuse.server.door.admit import Rules
from fedfuse.server.judge import Judge
from fedfuse.server.loop import RunPlan
from fedfuse.tasks import task_named

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Setting:
    """One seed of an experiment, ready to run: every method starts from the same state on the same rows."""

    seed: int
    partition: Partition
    population: Population
    bench: Bench
    judge: Judge
    start: ServerState
    plan: RunPlan


@dataclass(frozen=True, slots=True)
class PreparedExperiment:
    """An experiment whose data, networks and recipes are built; `setting` adds what depends on the seed.

    Of what depends on the seed the partition is kept: all seeds are checked before the first trains, and a partition is
    row numbers only, where a whole setting may hold copies of rows and a network for every client.
    """

    experiment: Experiment
    dataset: Dataset
    recipes: Mapping[str, Recipe]
    spec: Spec
    groups: tuple[tuple[int, int, Spec], ...]
    local: LocalSettings
    inputs: InputForm
    unlabelled: torch.Tensor | None = None
    ood_inputs: torch.Tensor | None = None
    _partitions: dict[tuple[int, bool], Partition] = field(default_factory=dict, init=False, repr=False, compare=False)

    def setting(self, seed: int, sites: Mapping[str, int] | None = None) -> Setting:
        """Everything one seed needs.

        Args:
            seed: which.
            sites: clients that hold rows of their own elsewhere, and how many; nothing is then partitioned here.
        """
        classes, task = len(self.dataset.classes), self.dataset.task
        train, test = self.dataset.train, self.dataset.test
        parts = self._partition(seed, sites is None)
        population = Population(train, parts.clients if sites is None else dict.fromkeys(sites, torch.arange(0)))
        server = train.take(parts.server) if len(parts.server) else None
        plan = self._plan(population.sizes() if sites is None else sites, sites is not None)
        bench = Bench(
            server,
            self.unlabelled,
            len(population.clients),
            classes,
            self.local,
            seed,
            self.inputs,
            task,
            self.dataset.features,
            sum(plan.enrolled.values()),
            1.0 if plan.participation is None else plan.participation,
        )
        held_out = {c: train.take(rows) for c, rows in parts.validation.items()}
        score = self.experiment.judge
        judge = Judge(
            test, classes, score.bins, held_out, score.clients, ood_inputs=self.ood_inputs, task=task, seed=seed
        )
        return Setting(seed, parts, population, bench, judge, self._start(seed, population), plan)

    def _partition(self, seed: int, whole: bool) -> Partition:
        """Who holds which rows on a seed; where sites hold rows of their own, only the server's share is drawn."""
        if (seed, whole) not in self._partitions:
            data = self.experiment.data
            self._partitions[seed, whole] = partition(
                self.dataset.labels(),
                data.partition if whole else Iid(),
                data.clients if whole else 1,
                seed,
                server_fraction=data.server_fraction,
                server_rows=data.server_rows,
                validation_fraction=data.validation_fraction if whole else 0.0,
                owners=self.dataset.owners,
            )
        return self._partitions[seed, whole]

    def check(self, sites: Mapping[str, int] | None = None) -> None:
        """Everything that can be known before training, for every seed and method; each takes one step on two rows.

        Raises:
            ConfigError: or another sentence about the first thing that cannot be.
        """
        for why in self.flaws(sites).values():
            raise why

    def flaws(self, sites: Mapping[str, int] | None = None) -> dict[str, FuseError]:
        """For each method that cannot work here, by its label, the sentence that says why.

        Raises:
            ConfigError: about what concerns all methods.
        """
        _check_device(self.local.device)
        self._check_counts(sites is None)
        check_equal_outputs({check_fit(spec, self.dataset) for spec in {self.spec, *(s for _, _, s in self.groups)}})
        found: dict[str, FuseError] = {}
        for seed in self.experiment.seeds:
            setting = self.setting(seed, sites)
            for label in self.recipes.keys() - found.keys():
                try:
                    self._check_recipe(self.recipes[label], setting, last=seed == self.experiment.seeds[-1])
                except FuseError as why:
                    found[label] = why
        if self.experiment.select == "best-on-server":
            setting.bench.need_rows("select = 'best-on-server'")
        return {label: found[label] for label in self.recipes if label in found}

    def remarks(self) -> dict[str, tuple[str, ...]]:
        """What a user should know before training, by method."""
        setting = self.setting(self.experiment.seeds[0])
        asked = min(setting.plan.per_round or setting.bench.population, setting.bench.population)
        found = {label: recipe.remarks(asked, setting.bench) for label, recipe in self.recipes.items()}
        return {label: words for label, words in found.items() if words}

    def _check_recipe(self, recipe: Recipe, setting: Setting, last: bool) -> None:
        """Check a method on one seed; on the last it also takes a step, which is the same on all of them."""
        exchanges, bench = recipe.exchanges(self.experiment.rounds, self.spec), setting.bench
        recipe.check(exchanges, bench, setting.start)
        if not last:
            return
        self._check_networks(recipe)
        brief = recipe.prepare_models(setting.start, bench).brief(recipe.publishes, bench.classes, bench.task)
        rehearse(recipe, brief, some_rows(self.dataset, self.inputs), self.local, exchanges)

    def _check_counts(self, whole: bool) -> None:
        """Refuse to take more than there is; where sites hold the rows, nobody knows yet how many there are."""
        data, asked = self.experiment.data, self.experiment.clients_per_round
        if whole and asked is not None and asked > data.clients:
            raise ConfigError(
                f"clients_per_round is {asked} and data.clients is {data.clients}; ask at most as many, or leave "
                "it out to ask everybody"
            )
        if "outline" in self.dataset.facts:
            return
        for key, limit, rows in (
            ("train_limit", data.train_limit, self.dataset.train),
            ("test_limit", data.test_limit, self.dataset.test),
        ):
            if limit is not None and limit > len(rows):
                raise ConfigError(
                    f"data.{key} is {limit:,} and {data.source} has {len(rows):,} such rows; take fewer, or leave "
                    "it out to take them all"
                )

    def _check_networks(self, recipe: Recipe) -> None:
        if self.experiment.start == "separate" and "start" in recipe.needs:
            raise ConfigError(
                f"method {recipe.name!r} measures how far clients moved from a common start and start = 'separate' "
                "gives each its own; use start = 'shared' or leave the method out"
            )
        if self.groups and not recipe.mixes_networks:
            raise ConfigError(
                f"method {recipe.name!r} needs one network for all clients and the file gives groups their own; "
                "leave out [[models]] or use a method that fuses predictions"
            )

    def _start(self, seed: int, population: Population) -> ServerState:
        first = Single.of(_build_network(self.spec, seed, "start"), self.spec)
        starts: dict[str, Start] = {}
        own = self.experiment.start == "separate"
        for position, client in enumerate(population.clients):
            mine = [s for begin, every, s in self.groups if position >= begin and (position - begin) % every == 0]
            if own or mine:
                spec = mine[-1] if mine else self.spec
                words = ("start", client) if own else ("start", spec.to_text())
                starts[client] = Start(spec, Single.of(_build_network(spec, seed, *words), spec).posterior.mean)
        return ServerState(0, first, starts=starts)

    def _plan(self, sizes: Mapping[str, int], elsewhere: bool) -> RunPlan:
        """The plan of a run; a site elsewhere has as many rows as the file enrols it with, else as it says itself."""
        server = self.experiment.server
        named = frozenset[str]().union(*(s.factories for s in (self.spec, *(g for _, _, g in self.groups))))
        bounds = server.bounds or (Bounds() if elsewhere else AMONG_OWN)
        memory = server.memory_mib * 2**20
        rules = Rules(server.quorum, server.examples_ratio, bounds, memory=memory, trusted=named)
        own_word = frozenset(sizes if elsewhere else ()) - server.enrol.keys()
        enrolled = {client: server.enrol.get(client, size) if elsewhere else size for client, size in sizes.items()}
        asked, coins = self.experiment.clients_per_round, self.experiment.participation
        return RunPlan(self.experiment.rounds, asked, coins, rules, enrolled, own_word)


def prepare(
    experiment: Experiment, fetch: Callable[..., Dataset] | None = None, given: GivenObjects | None = None
) -> PreparedExperiment:
    """Load the data and build what all seeds share.

    Args:
        experiment: what the file says.
        fetch: brings a source's rows, by default `load`; to check an experiment, `load_or_outline` is enough.
        given: a network and data that came as objects, in the place of those the file names.

    Raises:
        ConfigError: or another sentence about what cannot be, before any training.
    """
    data, given = experiment.data, given or GivenObjects()
    fetch = given.fetch if given.data is not None else fetch or load
    task, options = task_named(experiment.task), data.options or None
    dataset = fetch(data.source, train_limit=data.train_limit, test_limit=data.test_limit, options=options, task=task)
    _check_scheme(data.partition, dataset)
    _check_labels(dataset)
    scale = _scale(dataset) if data.standardize else None
    if scale is not None:
        train, test = (Rows(scale(half.x), half.y) for half in (dataset.train, dataset.test))
        dataset = replace(dataset, train=train, test=test)
    groups = tuple((g.first, g.every, spec_for(g, dataset)) for g in experiment.models)
    return PreparedExperiment(
        experiment,
        dataset,
        experiment.recipes(),
        given.spec or spec_for(experiment.model, dataset),
        groups,
        _local_settings(experiment, scale),
        _input_form(dataset, scale),
        _load_unlabelled(experiment, fetch, dataset, scale),
        _load_ood_inputs(experiment, fetch, dataset, scale),
    )


def _scale(dataset: Dataset) -> Standardize | None:
    """The scale of the training rows; none where they are blank, for there is nothing to standardize by."""
    if not dataset.has_numbers:
        raise ConfigError(f"data.standardize: the rows of {dataset.name} are tokens, which have no scale; leave it out")
    return None if "outline" in dataset.facts else standardize(dataset.train.x)


def _local_settings(experiment: Experiment, scale: Standardize | None) -> LocalSettings:
    """How clients train; augmentations act on pixels, also where rows are standardized."""
    settings = experiment.local.settings()
    if settings.augment is None or scale is None:
        return settings
    return settings.model_copy(update={"augment": before_standardizing(settings.augment, scale)})


def _input_form(dataset: Dataset, scale: Standardize | None) -> InputForm:
    """What an input looks like: tokens, pixels in [0, 1] before they are standardized, standardized features in ±3."""
    x = dataset.train.x
    shape = tuple(x.shape[1:])
    if not x.is_floating_point():
        return InputForm(shape, tokens=len(dataset.vocabulary) or 1 + max(0, int(x.max())))
    if scale is None:
        return InputForm(shape)
    if len(shape) == 1:
        return InputForm(shape, (-3.0,), (3.0,))
    low, high = (scale(torch.full((1, shape[0], 1, 1), pixel)).flatten().tolist() for pixel in (0.0, 1.0))
    return InputForm(shape, tuple(low), tuple(high))


def _load_unlabelled(
    experiment: Experiment, fetch: Callable[..., Dataset], dataset: Dataset, scale: Standardize | None
) -> torch.Tensor | None:
    """The inputs without labels the server may use."""
    data = experiment.data
    if data.unlabelled is None:
        return None
    x = fetch(data.unlabelled, train_limit=data.unlabelled_limit).train.x
    return _match_inputs(x, f"data.unlabelled: the inputs of {data.unlabelled!r}", dataset, scale)


def _load_ood_inputs(
    experiment: Experiment, fetch: Callable[..., Dataset], dataset: Dataset, scale: Standardize | None
) -> torch.Tensor | None:
    """Out-of-distribution inputs, on which models should be less confident."""
    source = experiment.judge.ood
    if source is None:
        return None
    x = fetch(source, train_limit=1, test_limit=experiment.data.test_limit).test.x  # its training rows are not used
    return _match_inputs(x, f"judge.ood: the inputs of {source!r}", dataset, scale)


def _match_inputs(x: torch.Tensor, whose: str, dataset: Dataset, scale: Standardize | None) -> torch.Tensor:
    """Another source's inputs, checked for shape and scaled like the training inputs."""
    if x.shape[1:] != dataset.train.x.shape[1:]:
        came, wanted = ("×".join(map(str, t.shape[1:])) for t in (x, dataset.train.x))
        raise ConfigError(f"{whose} are {came}, expected {wanted} as here")
    return x if scale is None else scale(x)


def spec_for(model: NameWithOptions, dataset: Dataset) -> Spec:
    """The network's spec, with what the data decide filled in where it can be."""
    outputs = dataset.task.outputs(len(dataset.classes))
    return spec_with(model, dataset.train.x.shape[1:], outputs, len(dataset.vocabulary))


def spec_with(model: NameWithOptions, shape: Sequence[int], outputs: int, tokens: int = 0) -> Spec:
    """The network's spec, with what is known of rows (classes, channels, size, inputs, tokens, length) filled in.

    `output` says which of a network's outputs are the logits, and `adapters` what moves a network that rests, unless
    its factory has an option of that name.
    """
    make = _import_factory(model.name)
    given, output = dict(model.options), None
    if "adapters" in given and "adapters" not in _parameters(make):
        adapters = given.pop("adapters")
        return adapted_spec(spec_with(NameWithOptions(name=model.name, **given), shape, outputs, tokens), adapters)
    try:
        parameters = inspect.signature(make).parameters
    except (TypeError, ValueError):  # a callable that hides its signature is called with the user's options alone
        return Spec(model.name, given, output=given.pop("output", None))
    if "output" not in parameters:
        output = given.pop("output", None)
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        check_options(f"model {model.name!r}", given, list(parameters))
    facts: dict[str, Any] = {"classes": outputs, "inputs": math.prod(shape)}
    if len(shape) == 3:
        facts |= {"channels": shape[0], "size": shape[1]}
    if tokens:
        facts |= {"tokens": tokens, "length": shape[0]}
    fill = {k: v for k, v in facts.items() if k in parameters and k not in given}
    return Spec(model.name, {**fill, **given}, output=output)


def _parameters(make: Callable[..., object]) -> Collection[str]:
    try:
        return inspect.signature(make).parameters
    except (TypeError, ValueError):  # a callable that hides its signature
        return ()


def _import_factory(factory: str) -> Callable[..., object]:
    try:
        return factory_of(factory)
    except FuseError:
        raise
    except Exception as why:  # a user's module may raise anything when it is imported
        raise ConfigError(
            f"model {factory!r} cannot be imported ({error_text(why)}); correct {factory.partition(':')[0]}"
        ) from why


def _build_network(spec: Spec, seed: int, *purpose: str | int) -> torch.nn.Module:
    with seeded(seed, *purpose):
        return spec.build()


def _check_device(device: str) -> None:
    try:
        torch.ones(1, device=device).item()
    except (RuntimeError, AssertionError) as why:  # torch asserts that it was built with CUDA
        raise ConfigError(f"local.device is {device!r}, which cannot be used here: {error_text(why)}") from why


def _check_labels(dataset: Dataset) -> None:
    """Refuse labels that count from 1, where nobody named the classes; say what labels with gaps were taken for."""
    empty: Any = dataset.facts.get(EMPTY, ())
    if not empty:
        return
    assumed = f"{dataset.name}: {empty_classes_text(empty, len(dataset.classes))}"
    if empty[0] == 0:
        raise ConfigError(
            f"{assumed}; number the classes 0, 1, 2, …, or name all of them: an array `classes` in an .npz, or "
            "`classes` of a Dataset"
        )
    _log.warning("%s; if labels should not leave any out, number the classes 0, 1, 2, …", assumed)


def _check_scheme(scheme: Scheme, dataset: Dataset) -> None:
    """Say that rows without a class each cannot be dealt by class."""
    if not dataset.has_labels and scheme.kind not in ("iid", "shares", "quantity", "natural"):
        raise ConfigError(
            f"partition: kind {scheme.kind!r} deals rows by their class and the task is {dataset.task.name}; "
            "use iid, shares, quantity or natural"
        )

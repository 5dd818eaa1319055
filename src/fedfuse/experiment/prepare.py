"""From an experiment's words to what runs: its data, partitions, networks and recipes, checked before any training.

`prepare` builds what all seeds share and `PreparedExperiment.setting` what one seed needs; `PreparedExperiment.flaws`
is the one place where an experiment is checked.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from fedfuse.core.inputs import InputForm
from fedfuse.core.messages import Brief, Envelope, Start
from fedfuse.core.model import Single
from fedfuse.core.recipe import Recipe
from fedfuse.core.rng import seeded, stream
from fedfuse.core.rows import Rows
from fedfuse.core.seams import Work
from fedfuse.core.settings import AMONG_OWN, Bounds, LocalSettings
from fedfuse.core.spec import Spec, factory_of, logits_in
from fedfuse.core.state import Bench, ServerState
from fedfuse.core.torch_utils import one_thread
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
from fedfuse.data.sources import EMPTY, load_arrays
from fedfuse.engines.local import Population
from fedfuse.errors import ConfigError, FuseError, Refused, check_options, error_text
from fedfuse.experiment.config import Experiment, NameWithOptions
from fedfuse.models.adapted import adapted_spec
from fedfuse.server.admission.admit import Contract, Rules, admit
from fedfuse.server.judge import Judge
from fedfuse.server.loop import RunPlan
from fedfuse.tasks import Classification, LanguageModel, task_named
from fedfuse.training.round import client_round

_log = logging.getLogger(__name__)


Data: TypeAlias = "Dataset | Sequence[Any]"


@dataclass(frozen=True, slots=True)
class GivenObjects:
    """What a program gives an experiment as objects.

    Attributes:
        spec: the network, from whose weights every seed begins.
        data: the rows.
        source: what stands for the rows in the experiment's settings.
    """

    spec: Spec | None = None
    data: Data | None = None
    source: str = ""

    @classmethod
    def of(cls, model: nn.Module | None = None, data: Data | None = None) -> GivenObjects:
        """A module, and a `Dataset` or x_train, y_train, x_test, y_test as tensors or arrays.

        Raises:
            ConfigError: for anything else.
        """
        if model is not None and not isinstance(model, nn.Module):
            raise ConfigError(
                f"model is a {type(model).__name__}, expected a torch.nn.Module; to build one by name, say it in the "
                "experiment: model = {name = 'package.module:Class'}"
            )
        spec = None if model is None else Spec.of(model)
        if data is None or isinstance(data, Dataset):
            return cls(spec, data, "" if data is None else data.name)
        if not isinstance(data, tuple | list) or len(data) != 4:
            raise ConfigError(
                f"data is a {type(data).__name__}, expected a fedfuse.data.Dataset or x_train, y_train, x_test, y_test"
            )
        arrays = [torch.as_tensor(np.asarray(part)) for part in data]
        return cls(spec, arrays, f"given-{digest_tensors(arrays)}")

    @property
    def settings(self) -> dict[str, Any]:
        """What stands for the objects in an experiment's settings.

        Names with checksums, so that a run that is resumed with other objects is known to be another run.
        """
        settings: dict[str, Any] = {}
        if self.spec is not None:
            weights = digest_tensors(self.spec.skeleton().state_dict().values())
            settings["model"] = {"name": self.spec.factory, "weights": weights}
        return settings | ({"data": {"source": self.source}} if self.source else {})

    def replace_names(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """An experiment's values with the objects' names in the place of those they had."""
        data = {**values.get("data", {}), **self.settings.get("data", {})}
        model = self.settings.get("model", values.get("model"))
        return {**values, **({"data": data} if data else {}), **({"model": model} if model else {})}

    def fetch(self, source: str, *, options: object = None, **limits: Any) -> Dataset:
        """The given rows under their name, any other source by `load`."""
        if self.data is None or source != self.source:
            return load(source, options=options, **limits)  # type: ignore[arg-type]
        if not isinstance(self.data, Dataset):
            return load_arrays(source, self.data, **limits)
        if cut := [name for name in ("train_limit", "test_limit") if limits.get(name) is not None]:
            raise ConfigError(f"data.{cut[0]} cannot cut a Dataset that a program gives; leave it out")
        return self.data


def digest_tensors(tensors: Iterable[Tensor]) -> str:
    """A short checksum of tensors: their shapes, kinds and numbers."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(str((tuple(tensor.shape), tensor.dtype)).encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()[:12]


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
    fetch_rows: Callable[..., Dataset] = given.fetch if given.data is not None else fetch or load
    task, options = task_named(experiment.task), data.options or None
    limits = {"train_limit": data.train_limit, "test_limit": data.test_limit}
    dataset = fetch_rows(data.source, **limits, options=options, task=task)
    _check_scheme(data.partition, dataset)
    _check_labels(dataset)
    scale = None
    if data.standardize:
        if not dataset.has_numbers:
            raise ConfigError(
                f"data.standardize: the rows of {dataset.name} are tokens, which have no scale; leave it out"
            )
        if "outline" not in dataset.facts:  # blank rows have no scale either
            scale = standardize(dataset.train.x)
            train, test = (Rows(scale(half.x), half.y) for half in (dataset.train, dataset.test))
            dataset = replace(dataset, train=train, test=test)
    local = experiment.local.settings()
    if local.augment is not None and scale is not None:  # augmentations act on pixels
        local = local.model_copy(update={"augment": before_standardizing(local.augment, scale)})

    def inputs_of(key: str, source: str | None, half: str, **limits: int | None) -> Tensor | None:
        """Another source's inputs, checked for shape and scaled like the training inputs."""
        if source is None:
            return None
        x: Tensor = getattr(fetch_rows(source, **limits), half).x
        if x.shape[1:] != dataset.train.x.shape[1:]:
            came, wanted = ("×".join(map(str, t.shape[1:])) for t in (x, dataset.train.x))
            raise ConfigError(f"{key}: the inputs of {source!r} are {came}, expected {wanted} as here")
        return x if scale is None else scale(x)

    return PreparedExperiment(
        experiment,
        dataset,
        experiment.recipes(),
        given.spec or spec_for(experiment.model, dataset),
        tuple((g.first, g.every, spec_for(g, dataset)) for g in experiment.models),
        local,
        _input_form(dataset, scale),
        inputs_of("data.unlabelled", data.unlabelled, "train", train_limit=data.unlabelled_limit),
        # one training row, for none is used
        inputs_of("judge.ood", experiment.judge.ood, "test", train_limit=1, test_limit=data.test_limit),
    )


def _check_scheme(scheme: Scheme, dataset: Dataset) -> None:
    """Say that rows without a class each cannot be dealt by class."""
    if not dataset.has_labels and scheme.kind not in ("iid", "shares", "quantity", "natural"):
        raise ConfigError(
            f"partition: kind {scheme.kind!r} deals rows by their class and the task is {dataset.task.name}; "
            "use iid, shares, quantity or natural"
        )


def _check_labels(dataset: Dataset) -> None:
    """Refuse labels that count from 1, where the classes have no names; say what labels with gaps were taken for."""
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


def spec_for(model: NameWithOptions, dataset: Dataset) -> Spec:
    """The network's spec, with what the data decide filled in where it can be."""
    outputs = dataset.task.outputs(len(dataset.classes))
    return spec_with(model, dataset.train.x.shape[1:], outputs, len(dataset.vocabulary))


def spec_with(model: NameWithOptions, shape: Sequence[int], outputs: int, tokens: int = 0) -> Spec:
    """The network's spec, with what is known of rows (classes, channels, size, inputs, tokens, length) filled in.

    `output` says which of a network's outputs are the logits, and `adapters` what moves a network that rests, unless
    its factory has an option of that name.
    """
    make, given, output = _import_factory(model.name), dict(model.options), None
    parameters: Mapping[str, inspect.Parameter] | None
    try:
        parameters = inspect.signature(make).parameters
    except (TypeError, ValueError):  # a callable that hides its signature is called with the user's options alone
        parameters = None
    if "adapters" in given and "adapters" not in (parameters or ()):
        adapters = given.pop("adapters")
        return adapted_spec(spec_with(NameWithOptions(name=model.name, **given), shape, outputs, tokens), adapters)
    if parameters is None:
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


def _import_factory(factory: str) -> Callable[..., object]:
    try:
        return factory_of(factory)
    except FuseError:
        raise
    except Exception as why:  # a user's module may raise anything when it is imported
        raise ConfigError(
            f"model {factory!r} cannot be imported ({error_text(why)}); correct {factory.partition(':')[0]}"
        ) from why


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

    All seeds are checked before the first trains. Of what depends on the seed, the partitions of all are kept, for they
    are row numbers only, and one whole setting, the last that was asked for: it may hold copies of rows and a network
    for every client.
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
    _latest: dict[object, Setting] = field(default_factory=dict, init=False, repr=False, compare=False)
    _partitions: dict[tuple[int, bool], Partition] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def _specs(self) -> set[Spec]:
        return {self.spec, *(spec for _, _, spec in self.groups)}

    def setting(self, seed: int, sites: Mapping[str, int] | None = None) -> Setting:
        """Everything one seed needs.

        Args:
            seed: which.
            sites: clients that hold rows of their own elsewhere, and how many; nothing is then partitioned here.
        """
        asked_for = seed, None if sites is None else tuple(sites.items())
        if asked_for not in self._latest:
            self._latest.clear()  # first, so that two settings are never held
            self._latest[asked_for] = self._build_setting(seed, sites)
        return self._latest[asked_for]

    def _build_setting(self, seed: int, sites: Mapping[str, int] | None) -> Setting:
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

    def _plan(self, sizes: Mapping[str, int], elsewhere: bool) -> RunPlan:
        """The plan of a run; a site elsewhere has as many rows as the file enrols it with, else as it says itself."""
        server = self.experiment.server
        named = frozenset[str]().union(*(spec.factories for spec in self._specs))
        bounds = server.bounds or (Bounds() if elsewhere else AMONG_OWN)
        memory = server.memory_mib * 2**20
        rules = Rules(server.quorum, server.examples_ratio, bounds, memory=memory, trusted=named)
        own_word = frozenset(sizes if elsewhere else ()) - server.enrol.keys()
        enrolled = {client: server.enrol.get(client, size) if elsewhere else size for client, size in sizes.items()}
        asked, coins = self.experiment.clients_per_round, self.experiment.participation
        return RunPlan(self.experiment.rounds, asked, coins, rules, enrolled, own_word)

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

    def check(self, sites: Mapping[str, int] | None = None) -> None:
        """Check everything that can be known before training, for every seed and method.

        Raises:
            ConfigError: or another sentence about the first thing that cannot be.
        """
        for why in self.flaws(sites).values():
            raise why

    def flaws(self, sites: Mapping[str, int] | None = None) -> dict[str, FuseError]:
        """For each method that cannot work here, by its label, the sentence that says why.

        First comes what concerns all methods: the device, the counts, the networks' outputs. Then every method says for
        every seed what it could not do (`Recipe.check`), and takes one step on two rows, once, for that is the same on
        all seeds.

        Raises:
            ConfigError: about what concerns all methods.
        """
        _check_device(self.local.device)
        self._check_counts(sites is None)
        if len(outputs := {check_fit(spec, self.dataset) for spec in self._specs}) > 1:
            counts = " and ".join(map(str, sorted(outputs)))
            raise ConfigError(f"the networks of [model] and [[models]] give {counts} logits; all must give as many")
        found: dict[str, FuseError] = {}
        for seed in self.experiment.seeds:
            setting = self.setting(seed, sites)
            start, bench = setting.start, setting.bench
            for label, recipe in self.recipes.items():
                if label in found:
                    continue
                try:
                    exchanges = recipe.exchanges(self.experiment.rounds, self.spec)
                    recipe.check(exchanges, bench, start)
                    if seed == self.experiment.seeds[-1]:
                        self._check_networks(recipe)
                        brief = recipe.prepare_models(start, bench).brief(recipe.publishes, bench.classes, bench.task)
                        rehearse(recipe, brief, some_rows(self.dataset, self.inputs), self.local, exchanges)
                except FuseError as why:
                    found[label] = why
        if self.experiment.select == "best-on-server":
            setting.bench.need_rows("select = 'best-on-server'")
        return {label: found[label] for label in self.recipes if label in found}

    def _check_counts(self, whole: bool) -> None:
        """Refuse to take more than there is; where sites hold the rows, their number is not known yet."""
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

    def remarks(self) -> dict[str, tuple[str, ...]]:
        """What a user should know before training, by method."""
        setting = self.setting(self.experiment.seeds[0])
        asked = min(setting.plan.per_round or setting.bench.population, setting.bench.population)
        found = {label: recipe.remarks(asked, setting.bench) for label, recipe in self.recipes.items()}
        return {label: words for label, words in found.items() if words}


def _build_network(spec: Spec, seed: int, *purpose: str | int) -> torch.nn.Module:
    with seeded(seed, *purpose):
        return spec.build()


def _check_device(device: str) -> None:
    try:
        torch.ones(1, device=device).item()
    except (RuntimeError, AssertionError) as why:  # torch asserts that it was built with CUDA
        raise ConfigError(f"local.device is {device!r}, which cannot be used here: {error_text(why)}") from why


def check_fit(spec: Spec, dataset: Dataset) -> int:
    """How many logits a network gives, after checking that they fit the data."""
    out, classes, task = logits_in(_answer(spec, dataset.train.x[:2]), spec.factory), len(dataset.classes), dataset.task
    places = tuple(dataset.train.y.shape[1:]) if isinstance(task, LanguageModel) else ()
    wanted = task.outputs(classes)
    more = wanted + isinstance(task, Classification)  # open-set networks have one more: none of them
    if tuple(out.shape) not in ((2, *places, wanted), (2, *places, more)):
        why = f"{classes} classes" if isinstance(task, Classification) else f"the task {task.name}"
        raise ConfigError(
            f"model {spec.factory!r} gives outputs of shape {tuple(out.shape)} for two rows, expected "
            f"{(2, *places, wanted)}: {dataset.name} has {why}"
        )
    return int(out.shape[-1])


def _answer(spec: Spec, rows: torch.Tensor) -> object:
    """A network's output for some rows; a user's network may raise anything while it is built or run."""
    try:
        network = spec.skeleton()
    except FuseError:
        raise
    except Exception as why:
        raise ConfigError(
            f"model {spec.factory!r} cannot be built with {dict(spec.options)}: {error_text(why)}"
        ) from why
    try:
        with torch.no_grad():
            return network(spec.cast(rows))
    except FuseError:
        raise
    except Exception as why:
        shape = "×".join(map(str, rows.shape[1:]))
        raise ConfigError(f"model {spec.factory!r} cannot read rows of shape {shape}: {error_text(why)}") from why


_WHO = "rehearsal"
_ROWS = 2


def rehearse(recipe: Recipe, brief: Brief, rows: Rows, local: LocalSettings, rounds: int) -> None:
    """Let every network of a brief take one step of a recipe on two rows, and pass the door with all its evidence.

    Every kind of evidence is asked for in the first round that brings it, and a client that remembers something takes
    another step with what it remembers.

    Args:
        recipe: the method, and those that take over from it.
        brief: what the server would send in the first round.
        rows: two rows, or a few.
        local: how clients train.
        rounds: how many there will be.

    Raises:
        ConfigError: naming the network, the method and what went wrong.
    """
    trial: dict[str, object] = {"epochs": 1, "max_steps": 1, "batch_size": _ROWS, "drop_last": False}
    if local.kernel == "auto":  # loading compiled code for one step takes longer, and memory that stays
        trial["kernel"] = "torch"
    step = local.model_copy(update=trial)
    networks = {variant.spec: variant for variant in (brief.to(client) for client in ("", *brief.own))}
    for variant in networks.values():
        for round_, now in _distinct_rounds(recipe, variant, rounds):
            with one_thread(), seeded(0, _WHO):
                _take_step(now, replace(variant, round=round_), now.work(step), rows)


def _distinct_rounds(recipe: Recipe, brief: Brief, rounds: int) -> Iterator[tuple[int, Recipe]]:
    """The first round of every recipe in force and of every set of evidence that is due together."""
    seen: set[tuple[int, frozenset[str]]] = set()
    for round_ in range(rounds):
        now, variant = recipe.at(round_), replace(brief, round=round_)
        due = id(now), frozenset(name for kind in now.evidence for name in kind.expects(variant))
        if due not in seen:
            seen.add(due)
            yield round_, now


def _take_step(recipe: Recipe, brief: Brief, work: Work, rows: Rows) -> None:
    who = f"model {brief.spec.factory!r} cannot train by {recipe.label or recipe.name!r}"
    try:
        with without_remarks():
            answer = client_round(work, brief, _WHO, rows)
            if answer.memory:
                answer = client_round(work, brief, _WHO, rows, memory=answer.memory)
        admit(Envelope(_WHO, answer.reply), Contract.of(brief, recipe.evidence, trains=recipe.trains))
    except Refused as why:
        facts = why.facts()
        raise ConfigError(
            f"{who}: after one step {facts['field']} is {facts['got']}, expected {facts['expected']}"
        ) from why
    except FuseError:
        raise
    except Exception as why:  # the user's own network and parts run in here
        raise ConfigError(f"{who}: one step on two rows ends in {error_text(why)}") from why


def some_rows(dataset: Dataset, form: InputForm) -> Rows:
    """Two rows to take a step on: the first of the data, or noise of their form where they are not at hand."""
    if "outline" in dataset.facts or len(dataset.train) < _ROWS:
        return Rows(form.noise(_ROWS, stream(0, _WHO)), dataset.train.y[torch.arange(_ROWS) % len(dataset.train)])
    return dataset.train.take(torch.arange(_ROWS))


@contextmanager
def without_remarks() -> Iterator[None]:
    """Leave unsaid what clients remark about their rows: two rows taken for a trial are no client's."""
    logger = logging.getLogger("fedfuse")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)

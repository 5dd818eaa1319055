"""An experiment file: read, changed by `--set`, spread by its sweep, and checked key by key.

`load_experiments` reads a file; `Experiment` below says what one may hold. Torch is imported late, so that a misspelt
key is reported at once.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from fedfuse.core.catalogue import method_options
from fedfuse.core.files import regular
from fedfuse.core.settings import Bounds, LocalSettings, Settings, validate_settings
from fedfuse.data.schemes import Iid, Scheme, ServerRowsConfig
from fedfuse.errors import ConfigError, check_options, suggest

if TYPE_CHECKING:
    from fedfuse.core.recipe import Recipe


def load_experiments(path: Path, sets: Sequence[str] = ()) -> list[Experiment]:
    """Read an experiment file; `--set a.b=c` beats the file, the file beats the default.

    A table `[sweep]` maps keys to lists of values: the file then stands for one experiment per combination, named
    after what varies.

    Raises:
        ConfigError: one sentence about the first thing that is wrong.
    """
    return make_experiments({"name": path.stem} | read_values(path), sets)


def load_experiment(path: Path, sets: Sequence[str] = ()) -> Experiment:
    """Read a file that stands for one experiment."""
    cells = load_experiments(path, sets)
    if len(cells) > 1:
        raise ConfigError(f"{path} sweeps over {len(cells)} experiments; choose one with --set sweep={{}} and the keys")
    return cells[0]


def read_values(path: Path) -> dict[str, Any]:
    """What an experiment file says, unchecked.

    Raises:
        ConfigError: if it cannot be read, or is no TOML.
    """
    try:
        return tomllib.loads(regular(path).read_text(encoding="utf-8"))
    except OSError as why:
        raise ConfigError(f"cannot read the experiment {path}: {why.strerror or why}") from why
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as why:
        raise ConfigError(f"{path} is not a TOML file: {why}") from why


def make_experiments(said: Mapping[str, Any], sets: Sequence[str] = ()) -> list[Experiment]:
    """The experiments that plain values stand for, all checked; the values are as a file would say them.

    Raises:
        ConfigError: one sentence about the first thing that is wrong.
    """
    values = copy.deepcopy(dict(said))
    for text in sets:
        assign(values, text)
    values.setdefault("name", "experiment")
    cells = [validate_settings(Experiment, cell) for cell in sweep_cells(values)]
    for entry in (entry for cell in cells for entry in cell.methods):
        entry.check_words()  # first, for recipes need torch
    for cell in cells:
        cell.recipes()
    if len({file_name(c.name) for c in cells}) < len(cells):
        raise ConfigError(f"{values['name']}: two cells of the sweep have the same name; let the values differ")
    return cells


def sweep_cells(values: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Every combination of the sweep's values, written into the rest of the file."""
    sweep = dict(flatten_keys(values.pop("sweep", {})))
    if not all(key and isinstance(choices, list) and choices for key, choices in sweep.items()):
        raise ConfigError("sweep must be a table of keys with a list of values each")
    for choice in itertools.product(*sweep.values()):
        cell = copy.deepcopy(values)
        for key, value in zip(sweep, choice, strict=True):
            set_at_path(cell, key, value, f"sweep.{key}")
        words = [name_part(value) for value in choice]
        yield cell | {"name": "-".join([str(values["name"]), *words])}


def flatten_keys(table: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """A table's entries by dotted key, whether the user quoted the dots or not.

    Example:
        >>> dict(flatten_keys({"data": {"clients": [5, 10]}, "local.epochs": [1]}))
        {'data.clients': [5, 10], 'local.epochs': [1]}
    """
    if not isinstance(table, dict):
        yield prefix.rstrip("."), table
        return
    for key, value in table.items():
        yield from flatten_keys(value, f"{prefix}{key}.")


def name_part(value: Any) -> str:
    """A swept value as part of a name.

    Example:
        >>> name_part({"kind": "dirichlet", "alpha": 0.1})
        'dirichlet-0.1'
    """
    if isinstance(value, dict | list):
        return "-".join(map(name_part, value.values() if isinstance(value, dict) else value))
    return str(value)


def file_name(label: str) -> str:
    """A label as part of a file's name.

    Example:
        >>> file_name("fedprox(mu=0.1)")
        'fedprox_mu_0.1'
    """
    name = re.sub(r"[^A-Za-z0-9.+-]+", "_", label).strip("_.")
    if name and len(name) <= 100:
        return name
    return f"{name[:80]}{hashlib.sha256(label.encode()).hexdigest()[:12]}"


def assign(values: dict[str, Any], text: str) -> None:
    """Put one `a.b=c` into the values; c is TOML, or else a plain word.

    Example:
        >>> values = {"methods": [{"name": "fedprox"}]}
        >>> assign(values, "methods.0.mu=0.5")
        >>> values
        {'methods': [{'name': 'fedprox', 'mu': 0.5}]}
    """
    path, equals, given = text.partition("=")
    if not equals or not path:
        raise ConfigError(f"--set {text!r} is not of the form key.key=value")
    try:
        value = tomllib.loads(f"v = {given}")["v"]
    except tomllib.TOMLDecodeError:
        value = given
    set_at_path(values, path.strip(), value, f"--set {text!r}")


def set_at_path(values: dict[str, Any], path: str, value: Any, text: str) -> None:
    """Put a value at a dotted path; numbers are places in a list."""
    *parents, leaf = path.split(".")
    container: Any = values
    for key in parents:
        if isinstance(container, list):
            container = container[_index(key, container, text)]
            continue
        container = container.setdefault(key, {})
        if not isinstance(container, dict | list):
            raise ConfigError(f"{text}: {key!r} is a value, not a table")
    container[_index(leaf, container, text) if isinstance(container, list) else leaf] = value


def _index(key: str, container: list[Any], text: str) -> int:
    if not key.isdecimal() or int(key) >= len(container):
        raise ConfigError(f"{text}: {key!r} is not a place in a list of {len(container)}")
    return int(key)


Share = Annotated[float, Field(ge=0, lt=1)]
SCHEMES: Mapping[str, type[BaseModel]] = {s.model_fields["kind"].default: s for s in get_args(get_args(Scheme)[0])}


class DataConfig(Settings):
    """Which data, and who holds what.

    `standardize` subtracts the training rows' mean and divides by their standard deviation, per channel. `unlabelled`
    is a source whose training inputs the server may use, their labels unseen; `unlabelled_limit` takes so many of them.
    """

    source: str = "digits"
    clients: PositiveInt = 10
    partition: Scheme = Iid()
    train_limit: PositiveInt | None = None
    test_limit: PositiveInt | None = None
    server_fraction: Share = 0.0
    server_rows: ServerRowsConfig | None = None
    unlabelled: str | None = None
    unlabelled_limit: PositiveInt | None = None
    validation_fraction: Share = 0.0
    standardize: bool = False
    options: dict[str, Any] = Field(default_factory=dict)

    @field_validator("partition", mode="before")
    @classmethod
    def _scheme(cls, given: Any) -> Any:
        """The scheme its kind names, so that a misspelt key is explained by the keys of that one."""
        if not isinstance(given, Mapping):
            return given
        kind = str(given.get("kind", ""))
        if kind not in SCHEMES:
            raise ValueError(f"kind is {kind!r}{suggest(kind, SCHEMES)} expected one of {', '.join(SCHEMES)}")
        return validate_settings(SCHEMES[kind], given)


class NameWithOptions(BaseModel):
    """A name with options of its own."""

    model_config = ConfigDict(frozen=True, extra="allow")
    name: str

    @property
    def options(self) -> dict[str, Any]:
        """Everything but the name and what a subclass knows."""
        return dict(self.model_extra or {})


class GroupConfig(NameWithOptions):
    """A network of their own for some clients: those whose numbers are `first`, `first + every`, and so on."""

    first: Annotated[int, Field(ge=0)] = 0
    every: PositiveInt = 1


class MethodConfig(NameWithOptions):
    """One method to run, perhaps behind an alignment and a guard, and another method after its first rounds.

    `refit = "head"` adds one exchange without training, in which the last layer is fitted in closed form;
    `refit = "layers"` one for every layer from the bottom up; `refit = "units"` one for every layer whose units are
    rescaled to what they gave in the clients' own networks. A table has the options of the method `refit`.
    """

    label: str | None = None
    align: NameWithOptions | None = None
    guard: NameWithOptions | None = None
    rounds: PositiveInt | None = None
    then: MethodConfig | None = None
    refit: Literal["head", "layers", "units"] | dict[str, Any] | None = None

    @field_validator("align", "guard", mode="before")
    @classmethod
    def _expand_name(cls, given: Any) -> Any:
        """`align = "weights"` and `guard = "krum"` are short for a table with that name."""
        return {"name": given} if isinstance(given, str) else given

    @model_validator(mode="after")
    def _check_handover(self) -> MethodConfig:
        if (self.rounds is None) != (self.then is None):
            raise ValueError(f"method {self.name!r}: `rounds` and `then` belong together: n rounds of it, then another")
        return self

    def check_words(self) -> None:
        """Refuse a method or an option that does not exist, at the cost of looking it up.

        Raises:
            ConfigError: with the nearest word that is known.
        """
        known = [*method_options(self.name), *type(self).model_fields]
        check_options(f"method {self.name!r}", self.options, known)
        if self.then is not None:
            self.then.check_words()

    def recipe(self, rounds: int = 1) -> Recipe:
        """The recipe it stands for in a run of so many rounds."""
        from fedfuse.core.registry import load_method
        from fedfuse.server.filters import with_filters

        self.check_words()
        recipe = load_method(self.name).recipe(**self.options)
        align, guard = (None if f is None else {"name": f.name, **f.options} for f in (self.align, self.guard))
        recipe = with_filters(recipe, align=align, guard=guard)
        if self.then is not None and self.rounds is not None:
            recipe = recipe.then(self.rounds, self.then.recipe(rounds))
        if self.refit is not None:
            from fedfuse.methods.refit import refit_ending  # late: only where it is asked for

            recipe = recipe.ending(rounds, refit_ending(self.refit))
        return replace(recipe, label=self.label) if self.label else recipe


class JudgeConfig(Settings):
    """How models are scored: calibration bins, and when the clients' own models are scored too.

    `ood` names a source of inputs from elsewhere: how much less sure models are of them is scored too. `disturbance`
    notes for every method how much its clients' networks would disturb each other, were their logits added. `target`
    is an accuracy: the report says what each method spent until it got there.
    """

    bins: PositiveInt = 15
    clients: Literal["never", "last", "every"] = "last"
    ood: str | None = None
    disturbance: bool = False
    target: Annotated[float, Field(gt=0, lt=1)] | None = None


class ServerConfig(Settings):
    """What the server insists on.

    Attributes:
        quorum: the share of asked clients without which a round does not count.
        examples_ratio: a number of examples by a client's own word above this multiple of the median is refused.
        bounds: how far above the others a client's levers may be; by default wide in a simulation, whose clients are
            its own, and narrow for sites elsewhere.
        enrol: how many examples sites have, by the operator's word.
        memory_mib: memory for updates.
        allow_dropped: whether a run that lost clients to crashes still ends as a success.
        deadline: seconds a round may take on a federation; of a list, each round its own and later ones the last.
        patience: seconds such a round waits for others once the quorum has answered, or as long again as that took.
        wait: seconds to wait for all sites at the beginning.
    """

    quorum: Annotated[float, Field(ge=0, le=1)] = 0.5
    examples_ratio: Annotated[float, Field(gt=1)] = 10.0
    bounds: Bounds | None = None
    enrol: dict[str, PositiveInt] = Field(default_factory=dict)
    memory_mib: PositiveInt = 2048
    allow_dropped: bool = False
    deadline: PositiveFloat | Annotated[tuple[PositiveFloat, ...], Field(min_length=1)] = 3600.0
    patience: NonNegativeFloat = 60.0
    wait: PositiveFloat = 3600.0


class LocalConfig(LocalSettings):
    """Local training as a file says it: augmentations by name."""

    augment: tuple[str, ...] = ()

    def settings(self) -> LocalSettings:
        """The same for a client: with the augmentations themselves."""
        from fedfuse.data import augmentation  # late: it brings torch

        return LocalSettings(**self.model_dump() | {"augment": augmentation(self.augment) if self.augment else None})


class Experiment(Settings):
    """The whole file.

    Example:
        >>> Experiment(methods=[{"name": "fedavg"}]).rounds
        1
    """

    name: str = "experiment"
    rounds: PositiveInt = 1
    seeds: Annotated[tuple[int, ...], Field(min_length=1)] = (0,)
    task: Literal["classification", "binary", "multilabel", "regression", "text-classification", "language-model"] = (
        "classification"
    )
    clients_per_round: PositiveInt | None = None
    participation: Annotated[float, Field(gt=0, le=1)] | None = None
    start: Literal["shared", "separate"] = "shared"
    select: Literal["last", "best-on-server"] = "last"
    data: DataConfig = DataConfig()
    model: NameWithOptions = NameWithOptions(name="mlp")
    models: tuple[GroupConfig, ...] = ()
    local: LocalConfig = LocalConfig()
    methods: tuple[MethodConfig, ...]
    judge: JudgeConfig = JudgeConfig()
    server: ServerConfig = ServerConfig()

    @model_validator(mode="after")
    def _distinct(self) -> Experiment:
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"the seeds {list(self.seeds)} repeat themselves")
        if not self.methods:
            raise ValueError("the experiment has no method; add a [[methods]] table with its name")
        if self.select == "best-on-server" and self.task == "regression":
            raise ValueError("select = 'best-on-server' chooses by accuracy, which regression has not; use 'last'")
        if self.clients_per_round is not None and self.participation is not None:
            raise ValueError(
                f"clients_per_round is {self.clients_per_round} and participation {self.participation:g}: one draws a "
                "fixed number, the other everybody by a coin; leave one of them out"
            )
        return self

    def recipes(self) -> dict[str, Recipe]:
        """Every method's recipe by its label, all checked; built once and shared, so a run builds its own."""
        return dict(self._recipes)

    @cached_property
    def _recipes(self) -> dict[str, Recipe]:
        return self.build_recipes()

    def build_recipes(self) -> dict[str, Recipe]:
        """Every method's recipe by its label, built by its function again, for a part may keep state on `self`."""
        from fedfuse.server.steps.disturb import with_disturbance

        by_label: dict[str, Recipe] = {}
        for entry in self.methods:
            recipe = entry.recipe(self.rounds)
            recipe = with_disturbance(recipe) if self.judge.disturbance else recipe
            if alike := [label for label in by_label if file_name(label) == file_name(recipe.label)]:
                raise ConfigError(
                    f"two methods are labelled {alike[0]!r} and {recipe.label!r}, whose files would have one name; "
                    "give one of them another label"
                )
            by_label[recipe.label] = recipe
        return by_label

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy with changes, whose recipes are built from them."""
        copied = super().model_copy(update=update, deep=deep)
        vars(copied).pop("_recipes", None)
        return copied

    def to_toml(self) -> str:
        """The resolved experiment as a file that gives the same experiment."""
        return to_toml(self.model_dump(mode="json", exclude_none=True))


_BARE = re.compile(r"[A-Za-z0-9_-]+")


def to_toml(values: Mapping[str, Any]) -> str:
    """A table of plain values as a TOML file: numbers, words, lists and tables, each on a line of its own.

    Example:
        >>> print(to_toml({"rounds": 2, "data": {"source": "digits"}, "methods": [{"name": "fedavg"}]}), end="")
        rounds = 2
        <BLANKLINE>
        [data]
        source = "digits"
        <BLANKLINE>
        [[methods]]
        name = "fedavg"
    """
    return "".join(_lines(values, ""))


def _lines(values: Mapping[str, Any], prefix: str) -> Iterator[str]:
    """Plain values first, then tables and lists of tables, as TOML wants them."""
    tables = {key: value for key, value in values.items() if isinstance(value, Mapping) or _is_tables(value)}
    for key, value in values.items():
        if key not in tables:
            yield f"{_key(key)} = {_value(value)}\n"
    for key, value in tables.items():
        name = f"{prefix}{_key(key)}"
        for head, each in [(f"[{name}]", value)] if isinstance(value, Mapping) else [(f"[[{name}]]", v) for v in value]:
            yield f"\n{head}\n"
            yield from _lines(each, f"{name}.")


def _is_tables(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(v, Mapping) for v in value)


def _key(key: str) -> str:
    return key if _BARE.fullmatch(key) else _value(key)


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(k)} = {_value(v)}" for k, v in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(v) for v in value) + "]"
    if isinstance(value, float):
        return repr(value)  # inf and nan are words of TOML, and not of JSON
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def changed_keys(old: object, new: object) -> dict[str, str]:
    """What differs between two tables, by dotted key, in words; places in a list are keys too.

    Example:
        >>> changed_keys({"data": {"clients": 3}, "rounds": 2}, {"data": {"clients": 5}, "rounds": 2, "select": "last"})
        {'data.clients': 'was 3 and is now 5', 'select': 'was not set and is now "last"'}
    """
    before, after = dict(_leaves(old)), dict(_leaves(new))

    def text(values: Mapping[str, object], key: str) -> str:
        words = json.dumps(values[key], default=str) if key in values else "not set"
        return words if len(words) <= 60 else words[:59] + "…"

    return {
        key: f"was {text(before, key)} and is now {text(after, key)}"
        for key in dict.fromkeys([*before, *after])
        if key not in before or key not in after or before[key] != after[key]
    }


def _leaves(value: object, prefix: str = "") -> Iterator[tuple[str, object]]:
    entries = value.items() if isinstance(value, dict) else list(enumerate(value)) if isinstance(value, list) else ()
    if not entries:
        yield prefix.rstrip("."), value
    for key, part in entries:
        yield from _leaves(part, f"{prefix}{key}.")

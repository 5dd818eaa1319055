"""An experiment file: what it may say, checked key by key, with one sentence for whatever is wrong."""

from __future__ import annotations

import copy
import hashlib
import itertools
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveInt,
    field_validator,
    model_validator,
)

from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import find_method
from fedfuse.core.settings import LocalSettings, Settings, checked
from fedfuse.core.words import check_options, suggest
from fedfuse.data import Iid, Scheme, ServerRows
from fedfuse.errors import ConfigError
from fedfuse.experiment.toml import to_toml
from fedfuse.server.filters import with_filters
from fedfuse.server.steps.disturb import measured

Share = Annotated[float, Field(ge=0, lt=1)]
SCHEMES: Mapping[str, type[BaseModel]] = {s.model_fields["kind"].default: s for s in get_args(get_args(Scheme)[0])}


class DataConfig(Settings):
    """Which data, and who holds what.

    `standardise` subtracts the training rows' mean and divides by their standard deviation, per channel. `unlabelled`
    is a source whose training inputs the server may use, their labels unseen; `unlabelled_limit` takes so many of them.
    """

    source: str = "digits"
    clients: PositiveInt = 10
    partition: Scheme = Iid()
    train_limit: PositiveInt | None = None
    test_limit: PositiveInt | None = None
    server_fraction: Share = 0.0
    server_rows: ServerRows | None = None
    unlabelled: str | None = None
    unlabelled_limit: PositiveInt | None = None
    validation_fraction: Share = 0.0
    standardise: bool = False
    options: dict[str, Any] = Field(default_factory=dict)

    @field_validator("partition", mode="before")
    @classmethod
    def _scheme(cls, said: Any) -> Any:
        """The scheme its kind names, so that a misspelt key is explained by the keys of that one."""
        if not isinstance(said, Mapping):
            return said
        kind = str(said.get("kind", ""))
        if kind not in SCHEMES:
            raise ValueError(f"kind is {kind!r}{suggest(kind, SCHEMES)} expected one of {', '.join(SCHEMES)}")
        return checked(SCHEMES[kind], said)


class Named(BaseModel):
    """A name with options of its own."""

    model_config = ConfigDict(frozen=True, extra="allow")
    name: str

    @property
    def options(self) -> dict[str, Any]:
        """Everything beside the name."""
        return dict(self.model_extra or {})


class GroupConfig(Named):
    """A network of their own for some clients: those whose numbers are `first`, `first + every`, and so on."""

    first: Annotated[int, Field(ge=0)] = 0
    every: PositiveInt = 1


class MethodConfig(Named):
    """One method to run, perhaps behind an alignment and a guard, and another method after its first rounds."""

    label: str | None = None
    align: Named | None = None
    guard: Named | None = None
    rounds: PositiveInt | None = None
    then: MethodConfig | None = None

    @field_validator("align", "guard", mode="before")
    @classmethod
    def _by_name(cls, said: Any) -> Any:
        """`align = "weights"` and `guard = "krum"` are short for a table with that name."""
        return {"name": said} if isinstance(said, str) else said

    @model_validator(mode="after")
    def _handover(self) -> MethodConfig:
        if (self.rounds is None) != (self.then is None):
            raise ValueError(f"method {self.name!r}: `rounds` and `then` belong together: n rounds of it, then another")
        return self

    def recipe(self) -> Recipe:
        """The recipe it stands for."""
        method = find_method(self.name)
        check_options(f"method {self.name!r}", self.options, [*method.schema.model_fields, *type(self).model_fields])
        made = method.recipe(**self.options)
        made = with_filters(made, align=_choice(self.align), guard=_choice(self.guard))
        if self.then is not None and self.rounds is not None:
            made = made.then(self.rounds, self.then.recipe())
        return replace(made, label=self.label) if self.label else made


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
    """What the server insists on: quorum, the largest num_examples, memory for updates in MiB."""

    quorum: Annotated[float, Field(ge=0, le=1)] = 0.5
    examples_ratio: Annotated[float, Field(gt=1)] = 100.0
    memory_mib: PositiveInt = 2048


class LocalConfig(LocalSettings):
    """Local training as a file says it: augmentations by name."""

    augment: tuple[str, ...] = ()


class Experiment(Settings):
    """The whole file.

    Example:
        >>> Experiment(methods=[{"name": "fedavg"}]).rounds
        1
    """

    name: str = "experiment"
    rounds: PositiveInt = 1
    seeds: Annotated[tuple[int, ...], Field(min_length=1)] = (0,)
    clients_per_round: PositiveInt | None = None
    start: Literal["shared", "separate"] = "shared"
    select: Literal["last", "best-on-server"] = "last"
    data: DataConfig = DataConfig()
    model: Named = Named(name="mlp")
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
        return self

    def recipes(self) -> dict[str, Recipe]:
        """Every method's recipe by its label, all checked."""
        made: dict[str, Recipe] = {}
        for entry in self.methods:
            recipe = measured(entry.recipe()) if self.judge.disturbance else entry.recipe()
            if alike := [label for label in made if file_name(label) == file_name(recipe.label)]:
                raise ConfigError(
                    f"two methods are labelled {alike[0]!r} and {recipe.label!r}, whose files would have one name; "
                    "give one of them another label"
                )
            made[recipe.label] = recipe
        return made

    def to_toml(self) -> str:
        """The resolved experiment as a file that gives the same experiment."""
        return to_toml(self.model_dump(mode="json", exclude_none=True))


def load_experiments(path: Path, sets: Sequence[str] = ()) -> list[Experiment]:
    """Read an experiment file; `--set a.b=c` beats the file, the file beats the default.

    A table `[sweep]` maps keys to lists of values: the file then stands for one experiment per combination, named
    after what varies.

    Raises:
        ConfigError: one sentence about the first thing that is wrong.
    """
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as why:
        raise ConfigError(f"cannot read the experiment {path}: {why.strerror or why}") from why
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as why:
        raise ConfigError(f"{path} is not a TOML file: {why}") from why
    values.setdefault("name", path.stem)
    for text in sets:
        assign(values, text)
    cells = [_experiment(cell) for cell in _cells(values)]
    if len({file_name(c.name) for c in cells}) < len(cells):
        raise ConfigError(f"{path}: two cells of the sweep have the same name; let the values differ")
    return cells


def load_experiment(path: Path, sets: Sequence[str] = ()) -> Experiment:
    """Read a file that stands for one experiment."""
    cells = load_experiments(path, sets)
    if len(cells) > 1:
        raise ConfigError(f"{path} sweeps over {len(cells)} experiments; choose one with --set sweep={{}} and the keys")
    return cells[0]


def _experiment(values: Mapping[str, Any]) -> Experiment:
    experiment = checked(Experiment, values)
    experiment.recipes()
    return experiment


def _cells(values: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Every combination of the sweep's values, written into the rest of the file."""
    sweep = dict(_dotted(values.pop("sweep", {})))
    if not all(key and isinstance(choices, list) and choices for key, choices in sweep.items()):
        raise ConfigError("sweep must be a table of keys with a list of values each")
    for choice in itertools.product(*sweep.values()):
        cell = copy.deepcopy(values)
        for key, value in zip(sweep, choice, strict=True):
            put(cell, key, value, f"sweep.{key}")
        words = [_word(value) for value in choice]
        yield cell | {"name": "-".join([str(values["name"]), *words])}


def _dotted(table: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """A table's entries by dotted key, whether the user quoted the dots or not.

    Example:
        >>> dict(_dotted({"data": {"clients": [5, 10]}, "local.epochs": [1]}))
        {'data.clients': [5, 10], 'local.epochs': [1]}
    """
    if not isinstance(table, dict):
        yield prefix.rstrip("."), table
        return
    for key, value in table.items():
        yield from _dotted(value, f"{prefix}{key}.")


def _word(value: Any) -> str:
    """A swept value as part of a name.

    Example:
        >>> _word({"kind": "dirichlet", "alpha": 0.1})
        'dirichlet-0.1'
    """
    if isinstance(value, dict):
        return "-".join(_word(v) for v in value.values())
    if isinstance(value, list):
        return "-".join(_word(v) for v in value)
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


def _choice(said: Named | None) -> dict[str, Any] | None:
    return None if said is None else {"name": said.name, **said.options}


def assign(values: dict[str, Any], text: str) -> None:
    """Put one `a.b=c` into the values; c is TOML, or else a plain word.

    Example:
        >>> values = {"methods": [{"name": "fedprox"}]}
        >>> assign(values, "methods.0.mu=0.5")
        >>> values
        {'methods': [{'name': 'fedprox', 'mu': 0.5}]}
    """
    path, equals, said = text.partition("=")
    if not equals or not path:
        raise ConfigError(f"--set {text!r} is not of the form key.key=value")
    try:
        value = tomllib.loads(f"v = {said}")["v"]
    except tomllib.TOMLDecodeError:
        value = said
    put(values, path.strip(), value, f"--set {text!r}")


def put(values: dict[str, Any], path: str, value: Any, text: str) -> None:
    """Put a value at a dotted path; numbers are places in a list."""
    *parents, leaf = path.split(".")
    place: Any = values
    for key in parents:
        place = _step(place, key, text)
    if isinstance(place, list):
        place[_index(leaf, place, text)] = value
    else:
        place[leaf] = value


def _step(place: Any, key: str, text: str) -> Any:
    if isinstance(place, list):
        return place[_index(key, place, text)]
    found = place.setdefault(key, {})
    if not isinstance(found, dict | list):
        raise ConfigError(f"{text}: {key!r} is a value, not a table")
    return found


def _index(key: str, place: list[Any], text: str) -> int:
    if not key.isdecimal() or int(key) >= len(place):
        raise ConfigError(f"{text}: {key!r} is not a place in a list of {len(place)}")
    return int(key)

"""The methods by name: one decorated function each; its signature is its schema."""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.metadata import entry_points
from typing import Annotated, Any, get_type_hints

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError, create_model
from pydantic.errors import PydanticUserError
from pydantic.fields import FieldInfo

from fedfuse.core.recipe import Recipe
from fedfuse.core.settings import Settings
from fedfuse.core.words import suggest
from fedfuse.errors import ConfigError

Maker = Callable[..., Recipe]

_KINDS = {
    "integer": "whole number",
    "boolean": "true | false",
    "string": "text",
    "object": "table",
}
_LIMITS = {"exclusiveMinimum": ">", "minimum": "≥", "exclusiveMaximum": "<", "maximum": "≤"}


@dataclass(frozen=True, slots=True)
class Option:
    """One option of a method."""

    name: str
    type: str
    default: object
    text: str


@dataclass(frozen=True, slots=True)
class Method:
    """A registered method: how to make its recipe, and how to speak of it."""

    name: str
    make: Maker
    paper: str
    schema: type[BaseModel]
    groups: Mapping[str, type[Settings]]

    @property
    def summary(self) -> str:
        """The first sentence of its documentation."""
        return (inspect.getdoc(self.make) or "").split("\n")[0]

    @property
    def text(self) -> str:
        """All of its documentation."""
        return inspect.getdoc(self.make) or ""

    @property
    def options(self) -> tuple[Option, ...]:
        """Its options, read off the signature and the Args section."""
        told = {key: inspect.getdoc(group) or "" for group in self.groups.values() for key in group.model_fields}
        return tuple(
            Option(key, accepted(field), field.default, _said(told.get(key, self.text), key))
            for key, field in self.schema.model_fields.items()
        )

    def recipe(self, **options: object) -> Recipe:
        """Its recipe with these options, checked against the signature."""
        values = _checked(self, options)
        for name, group in self.groups.items():
            values[name] = group(**{key: values.pop(key) for key in group.model_fields})
        made = self.make(**values)
        chosen = [f"{k}={options[k]}" for k in options]
        label = f"{self.name}({', '.join(chosen)})" if chosen else self.name
        return replace(made, name=self.name, label=made.label or label)


_METHODS: dict[str, Method] = {}


def method(name: str, *, paper: str = "") -> Callable[[Maker], Maker]:
    """Register a function that makes a recipe; its keyword arguments become the method's options.

    An argument whose type is a `Settings` is a group of options several methods share: each of its fields becomes an
    option of the method.
    """

    def register(make: Maker) -> Maker:
        if name in _METHODS and _METHODS[name].make.__module__ != make.__module__:
            raise ConfigError(
                f"two methods are called {name!r}: in {_METHODS[name].make.__module__} and {make.__module__}"
            )
        hints = get_type_hints(make, include_extras=True)
        groups = {key: hint for key, hint in hints.items() if isinstance(hint, type) and issubclass(hint, Settings)}
        _METHODS[name] = Method(name, make, paper, _schema(name, make, hints, groups), groups)
        return make

    return register


def forget_method(name: str) -> None:
    """Take a method out of the registry: for tests and notebooks that register one on the spot."""
    _METHODS.pop(name, None)


def all_methods() -> Mapping[str, Method]:
    """Every method: those in `fedfuse.methods` and those of installed packages (entry point "fedfuse.methods")."""
    _discover()
    return dict(sorted(_METHODS.items()))


def find_method(name: str) -> Method:
    """One method, or a sentence with the nearest name.

    Example:
        >>> find_method("fedavgg")
        Traceback (most recent call last):
        ...
        fedfuse.errors.ConfigError: there is no method 'fedavgg'; did you mean 'fedavg'? ...
    """
    known = all_methods()
    if name not in known:
        raise ConfigError(f"there is no method {name!r}{suggest(name, known)} `fedfuse methods` lists them all")
    return known[name]


@lru_cache(maxsize=1)
def _discover() -> None:
    package = importlib.import_module("fedfuse.methods")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"fedfuse.methods.{module.name}")
    for entry in entry_points(group="fedfuse.methods"):
        entry.load()


def _schema(name: str, make: Maker, hints: Mapping[str, Any], groups: Mapping[str, type[Settings]]) -> type[BaseModel]:
    fields: dict[str, Any] = {}
    for p in inspect.signature(make).parameters.values():
        if p.default is p.empty:
            raise ConfigError(f"method {name!r}: option {p.name!r} needs a default")
        if p.name in groups:
            fields |= {key: (field.annotation, field) for key, field in groups[p.name].model_fields.items()}
        else:
            fields[p.name] = (hints[p.name], p.default)
    return create_model(name, __config__=ConfigDict(extra="forbid", arbitrary_types_allowed=True), **fields)


def _checked(method_: Method, options: Mapping[str, object]) -> dict[str, object]:
    known = method_.schema.model_fields
    for key in options:
        if key not in known:
            has = f" it has {', '.join(known)}" if known else " it has none"
            raise ConfigError(f"method {method_.name!r} has no option {key!r}{suggest(key, known)}{has}")
    try:
        return dict(method_.schema(**options))
    except ValidationError as why:
        first = why.errors()[0]
        where = ".".join(str(p) for p in first["loc"])
        raise ConfigError(
            f"method {method_.name!r}: option {where} is {first['input']!r}, expected {_plain(first['msg'])}"
        ) from why


def _said(text: str, name: str) -> str:
    """What a docstring says of a name, on one line."""
    said = dict(re.findall(r"^ {4}(\w+): (.+(?:\n {6,}.+)*)", text, re.MULTILINE))
    return re.sub(r"\s+", " ", said.get(name, ""))


def accepted(field: FieldInfo) -> str:
    """What a field takes, as a user would say it.

    Example:
        >>> from typing import Literal
        >>> from pydantic import PositiveInt
        >>> accepted(FieldInfo(annotation=PositiveInt | Literal["all"]))
        'whole number > 0, or "all"'
    """
    kind: Any = Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation
    try:
        return _in_words(TypeAdapter(kind).json_schema())
    except PydanticUserError:  # a type of the method's own
        return str(getattr(field.annotation, "__name__", field.annotation))


def _in_words(schema: Mapping[str, Any]) -> str:
    """A JSON schema as a noun phrase."""
    if "anyOf" in schema:
        return ", or ".join(_in_words(kind) for kind in schema["anyOf"] if kind.get("type") != "null")  # null: left out
    if "enum" in schema or "const" in schema:
        return " | ".join(json.dumps(value) for value in schema.get("enum", [schema.get("const")]))
    kind = str(schema.get("type", "anything"))
    if kind == "array":
        return f"list: {_in_words(schema.get('items', {}))}"
    limits = [f"{sign} {schema[key]:g}" for key, sign in _LIMITS.items() if key in schema]
    return " ".join([_KINDS.get(kind, kind), " and ".join(limits)]).strip()


def _plain(message: str) -> str:
    """Pydantic's complaint as a noun phrase."""
    return message.removeprefix("Input should be ").removeprefix("Value error, ")

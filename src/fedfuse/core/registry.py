"""The methods by name: one decorated function each; its signature is its schema."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import pkgutil
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any, cast, get_type_hints

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError, create_model
from pydantic.errors import PydanticUserError
from pydantic.fields import FieldInfo

from fedfuse.core.catalogue import FAMILIES, Family, unknown_method
from fedfuse.core.recipe import Recipe
from fedfuse.core.settings import Settings
from fedfuse.errors import ConfigError, FuseError, error_text, suggest

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
    family: Family
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
        group_texts = {key: inspect.getdoc(group) or "" for group in self.groups.values() for key in group.model_fields}
        return tuple(
            Option(key, describe_type(field), field.default, describe_option(group_texts.get(key, self.text), key))
            for key, field in self.schema.model_fields.items()
        )

    def recipe(self, **options: object) -> Recipe:
        """Its recipe with these options, checked against the signature."""
        values = _validate_options(self, options)
        for name, group in self.groups.items():
            values[name] = group(**{key: values.pop(key) for key in group.model_fields})
        recipe = self.make(**values)
        chosen = [f"{k}={options[k]}" for k in options]
        label = f"{self.name}({', '.join(chosen)})" if chosen else self.name
        return replace(recipe, name=self.name, label=recipe.label or label)


_METHODS: dict[str, Method] = {}


def method(name: str, *, paper: str = "", family: Family = "weights") -> Callable[[Maker], Maker]:
    """Register a function that makes a recipe; its keyword arguments become the method's options.

    An argument whose type is a `Settings` is a group of options several methods share: each of its fields becomes an
    option of the method.

    Args:
        name: what users call it.
        paper: where it was published.
        family: where it takes its mean, a key of `FAMILIES`; lists of methods are grouped by it.
    """
    if family not in FAMILIES:
        raise ConfigError(
            f"method {name!r}: family is {family!r}{suggest(family, FAMILIES)} known: {', '.join(FAMILIES)}"
        )

    def register(make: Maker) -> Maker:
        if name in _METHODS and _METHODS[name].make.__module__ != make.__module__:
            raise ConfigError(
                f"two methods are called {name!r}: in {_METHODS[name].make.__module__} and {make.__module__}"
            )
        hints = get_type_hints(make, include_extras=True)
        groups = {key: hint for key, hint in hints.items() if isinstance(hint, type) and issubclass(hint, Settings)}
        _METHODS[name] = Method(name, make, paper, family, _schema(name, make, hints, groups), groups)
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
    _import_file_of(name)
    known = _METHODS if name in _METHODS else all_methods()
    if name not in known:
        raise unknown_method(name, known)
    return known[name]


def _import_file_of(name: str) -> None:
    """Import the file of ours that has a method's name, if there is one: one method need not wait for all others."""
    if name in _METHODS or not name.isidentifier() or entry_points(group="fedfuse.methods"):
        return
    if importlib.util.find_spec(f"fedfuse.methods.{name}") is not None:
        importlib.import_module(f"fedfuse.methods.{name}")


def load_method(name: str) -> Method:
    """A method by its name, or one of the user's own as module:function or path/to/file.py:function.

    The latter imports the user's code. It is for names that the user typed or wrote into a file of theirs; names that
    came in a message are looked up by `find_method`, which imports nothing.

    Raises:
        ConfigError: if there is no such method, or the function cannot be found.
    """
    if ":" not in name:
        return find_method(name)
    module, _, function = name.rpartition(":")
    make = _import_function(name, module, function)
    for known in all_methods().values():
        if known.make is make:
            return known
    method(function)(make)
    return _METHODS[function]


def _import_function(name: str, module: str, function: str) -> Maker:
    """The user's function; a file's folder is put where workers look for modules too."""
    path = Path(module)
    if path.suffix == ".py":
        if not path.is_file():
            raise ConfigError(f"method {name!r}: there is no file {module}; expected file.py:function")
        sys.path.insert(0, str(path.parent.absolute()))
        module = path.stem
    try:
        found = getattr(importlib.import_module(module), function)
    except FuseError:
        raise
    except Exception as why:  # a user's module may raise anything when it is imported
        raise ConfigError(
            f"method {name!r} cannot be imported ({error_text(why)}); expected module:function or file.py:function"
        ) from why
    if not callable(found):
        raise ConfigError(f"method {name!r} is a {type(found).__name__}, expected a function that returns a Recipe")
    return cast("Maker", found)


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


def _validate_options(method_: Method, options: Mapping[str, object]) -> dict[str, object]:
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
        expected = first["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
        raise ConfigError(
            f"method {method_.name!r}: option {where} is {first['input']!r}, expected {expected}"
        ) from why


def describe_option(text: str, name: str) -> str:
    """What a docstring says of a name, on one line."""
    texts = dict(re.findall(r"^ {4}(\w+): (.+(?:\n {6,}.+)*)", text, re.MULTILINE))
    return re.sub(r"\s+", " ", texts.get(name, ""))


def describe_type(field: FieldInfo) -> str:
    """What a field takes, as a user would say it.

    Example:
        >>> from typing import Literal
        >>> from pydantic import PositiveInt
        >>> describe_type(FieldInfo(annotation=PositiveInt | Literal["all"]))
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

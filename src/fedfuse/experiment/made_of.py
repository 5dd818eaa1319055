"""What a run is made of beside its configuration: our code, the user's, and the rows; and what of it has changed."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from types import CodeType, FunctionType
from typing import Any, TypeAlias

from torch import nn

from fedfuse.core.registry import load_method
from fedfuse.core.spec import Spec
from fedfuse.engines.code import follow, source
from fedfuse.experiment.config import MethodConfig
from fedfuse.experiment.environment import versions
from fedfuse.experiment.given import digest_tensors
from fedfuse.experiment.prepare import PreparedExperiment

FILE = "made-of.json"

_Code: TypeAlias = type | FunctionType
_WORD = 16  # hexadecimal digits of a digest that are kept


def made_of(prepared: PreparedExperiment, as_objects: bool = False) -> dict[str, Any]:
    """The digests of all that decides a run beside its configuration, by the file or the key that a user knows it by.

    Args:
        prepared: the experiment.
        as_objects: whether its rows came as objects, whose facts are not ours.
    """
    specs = (prepared.spec, *(spec for _, _, spec in prepared.groups))
    named = {
        label: list(_makers(entry)) for label, entry in zip(prepared.recipes, prepared.experiment.methods, strict=True)
    }
    return {
        "fedfuse": {"version": versions().get("fedfuse", "?"), "code": source()[:_WORD]},
        "network": _code_digests([kind for spec in specs for kind in _kinds(spec)], _modules(specs)),
        "methods": {
            label: _code_digests([*named[label], *_kinds(recipe)]) for label, recipe in prepared.recipes.items()
        },
        "rows": _row_digests(prepared, as_objects),
    }


def changes(old: Mapping[str, Any], new: Mapping[str, Any], labels: Collection[str]) -> list[str]:
    """What has changed between two such records, in words; of methods only those that are to go on count.

    Example:
        >>> one, other = ({"network": {"net.py": digest, "blocks.py": "c"}} for digest in "ab")
        >>> changes(one, other, [])
        ['net.py changed']
    """
    found = []
    before, now = old.get("fedfuse"), new.get("fedfuse")
    if before and now and before["code"] != now["code"]:
        texts = [f"{told['version']} (code {told['code'][:8]})" for told in (before, now)]
        found.append(f"fedfuse was {texts[0]} and is now {texts[1]}")
    pairs = [(old.get("network", {}), new.get("network", {}))]
    pairs += [(old["methods"][label], new["methods"][label]) for label in labels if label in old.get("methods", {})]
    files = sorted({file for one, other in pairs for file in {*one, *other} if one.get(file) != other.get(file)})
    rows = old.get("rows", {})
    keys = [key for key, digest in new.get("rows", {}).items() if rows.get(key, digest) != digest]
    return [*found, *(f"{file} changed" for file in files), *(f"the rows of {key} changed" for key in keys)]


def _makers(entry: MethodConfig) -> Iterator[_Code]:
    """The functions that make a method's recipe."""
    make = load_method(entry.name).make
    yield make if isinstance(make, FunctionType) else type(make)
    if entry.then is not None:
        yield from _makers(entry.then)


def _modules(specs: Iterable[Spec]) -> list[str]:
    """The modules that networks are named by."""
    return [name.partition(":")[0] for spec in specs if spec.prototype is None for name in spec.foreign]


def _kinds(value: object) -> Iterator[_Code]:
    """The classes and functions that a value is made of, at any depth."""
    if isinstance(value, FunctionType):
        yield value
    elif isinstance(value, partial):
        yield from _kinds((value.func, value.args, value.keywords))
    elif isinstance(value, nn.Module):
        yield from {type(part) for part in value.modules()}
    elif isinstance(value, tuple | list | set | frozenset):
        for part in value:
            yield from _kinds(part)
    elif isinstance(value, Mapping):
        yield from _kinds(list(value.values()))
    else:
        yield type(value)
        if is_dataclass(value):
            yield from _kinds([getattr(value, f.name) for f in fields(value)])


def _code_digests(kinds: Iterable[_Code], modules: Iterable[str] = ()) -> dict[str, str]:
    """The digest of every file of the user's that some code leads to, and of code that was typed in place."""
    every = set(kinds)
    typed = {kind for kind in every if kind.__module__ == "__main__"}  # a script says more than this: how to run it
    found = follow({*modules, *(kind.__module__ for kind in every - typed)})
    digests = {told.file: told.digest[:_WORD] for told in found.modules.values()}
    texts = {kind.__qualname__: "".join(_texts(kind, set())) for kind in typed}
    return digests | {name: hashlib.sha256(text.encode()).hexdigest()[:_WORD] for name, text in texts.items() if text}


def _texts(kind: _Code, seen: set[_Code]) -> Iterator[str]:
    """The source of typed code, and of what it names that was typed too."""
    seen.add(kind)
    for function in [kind] if isinstance(kind, FunctionType) else vars(kind).values():
        if not isinstance(function, FunctionType):
            continue
        try:
            yield inspect.getsource(function)
        except (OSError, TypeError):  # nothing keeps what was typed here
            continue
        for value in map(function.__globals__.get, _names(function.__code__)):
            if isinstance(value, bool | int | float | str):
                yield repr(value)
            elif isinstance(value, _Code) and value.__module__ == "__main__" and value not in seen:
                yield from _texts(value, seen)


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


def _row_digests(prepared: PreparedExperiment, as_objects: bool) -> dict[str, str]:
    """The digests of rows: those that clients, server and judge have, whatever file or function they came from."""
    dataset, data, judge = prepared.dataset, prepared.experiment.data, prepared.experiment.judge
    rows = None if as_objects else dataset.facts.get("checksum")
    rows = rows or digest_tensors((dataset.train.x, dataset.train.y, dataset.test.x, dataset.test.y))
    facts = repr((rows, dataset.classes, dataset.owners))
    found = {f"data.source = {data.source!r}": hashlib.sha256(facts.encode()).hexdigest()[:_WORD]}
    for key, name, inputs in (
        ("data.unlabelled", data.unlabelled, prepared.unlabelled),
        ("judge.ood", judge.ood, prepared.ood_inputs),
    ):
        found |= {} if inputs is None else {f"{key} = {name!r}": digest_tensors([inputs])}
    return found

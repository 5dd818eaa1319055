"""A name for a client's round: the digest of everything its answer depends on, or none where that cannot be told.

A wrong name would bring back a wrong answer: tensors enter with all their numbers, classes with their module, our code
with the whole package, the user's with every module that it leads to and the plain values these hold, and an object
that has no canonical form makes the round nameless. What the user's code reads while it trains, a file or the clock,
does not enter.
"""

from __future__ import annotations

import contextlib
import hashlib
import platform
import sys
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from functools import lru_cache
from pathlib import Path
from types import FunctionType

import numpy as np
import torch
from pydantic import BaseModel
from torch import Tensor

from fedfuse.core.messages import Brief
from fedfuse.core.seams import Work
from fedfuse.engines.code import follow, installed_digest, source
from fedfuse.kernels import signature
from fedfuse.wire.codec import encode
from fedfuse.wire.messages import VERSION, encode_brief

_PLAIN = (type(None), bool, int, float, str, bytes, Tensor, np.ndarray, torch.dtype, torch.device)


class Nameless(Exception):
    """Something without a canonical form."""


@dataclass(frozen=True, slots=True)
class Name:
    """What a client's answer is filed under: the whole work, and its training alone where that can stand alone."""

    whole: str
    training: str | None


@dataclass(frozen=True, slots=True)
class Namer:
    """Names the rounds of one work and one seed."""

    whole: bytes
    training: bytes | None
    seed: int

    @classmethod
    def of(cls, work: Work, seed: int) -> Namer | None:
        """The namer of a work, or None if a part of it has no canonical form: a lambda, an open file."""
        if work.key is None:
            return None
        here = [machine(work.settings.device), source().encode()]
        try:
            whole = digest(*here, *canonical(work))
            alone = digest(*here, *canonical(replace(work, evidence=(), memory=())))
        except Nameless:
            return None
        return cls(whole, alone if _stands_alone(work) else None, seed)

    def name(self, brief: bytes | None, client: str, rows: bytes, memory: bytes) -> Name | None:
        """The name of one client's round, given digests of its brief and rows, and its memory's bytes."""
        if brief is None:
            return None
        rest = (brief, client.encode(), rows, str(self.seed).encode(), memory)
        training = digest(self.training, *rest).hex() if self.training else None
        return Name(digest(self.whole, *rest).hex(), training)


def _stands_alone(work: Work) -> bool:
    """Whether evidence can be brought later: the rate in force at the end must follow from the settings."""
    alone = work.trains and bool(work.evidence or work.memory)
    return alone and (work.settings.max_steps is None or work.settings.decay is None)


def brief_digest(brief: Brief) -> bytes | None:
    """The digest of a brief as a client hears it; None for a network whose code cannot be told."""
    spec = brief.spec
    if spec.prototype is not None:  # an object in memory: its class and weights do not say what it computes
        return None
    try:
        code = [code_of(name.partition(":")[0]) for name in sorted(spec.foreign)]
    except Nameless:
        return None
    return digest(encode_brief(brief), *code)


def digest(*parts: bytes) -> bytes:
    """SHA-256 of the parts, each with its length, so that no two lists look alike.

    Example:
        >>> digest(b"ab", b"c") == digest(b"a", b"bc")
        False
    """
    total = hashlib.sha256()
    for part in parts:
        total.update(len(part).to_bytes(8, "little"))
        total.update(part)
    return total.digest()


def canonical(value: object) -> Iterator[bytes]:
    """A value as bytes that are equal for equal values and for no others.

    Raises:
        Nameless: for anything whose equality is only identity.

    Example:
        >>> list(canonical((1, "a")))
        [b'builtins.tuple', b'2', b'builtins.int', b'1', b'builtins.str', b"'a'"]
    """
    kind = type(value)
    if "<locals>" in kind.__qualname__:  # what it may have closed over cannot be told
        raise Nameless(kind)
    yield f"{kind.__module__}.{kind.__qualname__}".encode()
    if kind.__module__ != "builtins":
        yield code_of(kind.__module__)
    if value is None or isinstance(value, bool | int | float | str | bytes | Path | torch.dtype | torch.device):
        yield repr(value).encode()
    elif isinstance(value, Enum):
        yield value.name.encode()
    elif isinstance(value, Tensor | np.ndarray):
        try:
            yield encode({"": torch.as_tensor(value)}, {})
        except (TypeError, ValueError, RuntimeError) as why:  # an array of words or objects, a sparse tensor
            raise Nameless(kind) from why
    elif isinstance(value, Mapping | Set | tuple | list):
        yield from _items(value)
    elif isinstance(value, FunctionType):
        yield from _function(value)
    elif isinstance(value, BaseModel) or is_dataclass(kind):
        yield from _parts(value)
    else:
        raise Nameless(kind)


def _items(value: Mapping[object, object] | Set[object] | tuple[object, ...] | list[object]) -> Iterator[bytes]:
    items = (
        sorted(value, key=repr) if isinstance(value, Set) else value.items() if isinstance(value, Mapping) else value
    )
    yield str(len(value)).encode()
    for item in items:
        yield from canonical(item)


def _function(value: FunctionType) -> Iterator[bytes]:
    if "<" in value.__qualname__ or value.__closure__:
        raise Nameless(value.__qualname__)
    yield f"{value.__module__}.{value.__qualname__}".encode()
    yield code_of(value.__module__)
    yield from canonical((value.__defaults__, value.__kwdefaults__))


def _parts(value: object) -> Iterator[bytes]:
    """The fields that tell two of a class apart."""
    if isinstance(value, BaseModel):
        yield from _items(dict(value))
    elif is_dataclass(value):
        yield from _items({f.name: getattr(value, f.name) for f in fields(value) if f.compare})


def code_of(module: str) -> bytes:
    """The digest of all code that a module leads to, beside ours: the user's modules and the values they hold.

    Raises:
        Nameless: where the modules do not say all that is run.

    Example:
        >>> code_of("fedfuse.methods.moon") == code_of("json") == b""
        True
    """
    found = follow([module])
    if found.doubts:
        raise Nameless(found.doubts[0])
    if not found.modules and not found.installed:
        return b""
    code = [(name, told.digest, list(_values(name))) for name, told in sorted(found.modules.items())]
    return digest(*canonical((code, [(name, installed_digest(name)) for name in sorted(found.installed)])))


def _values(module: str) -> Iterator[tuple[str, bytes]]:
    """The plain values a module holds: a constant may come from the environment, or have been set from elsewhere.

    Others count by the code that makes them.
    """
    for name, value in sorted(vars(sys.modules[module]).items()) if module in sys.modules else ():
        with contextlib.suppress(Nameless, RecursionError):
            if not name.startswith("__") and _is_plain(value):
                yield name, digest(*canonical(value))


def _is_plain(value: object) -> bool:
    if isinstance(value, Mapping):
        return type(value) is dict and all(map(_is_plain, (*value, *value.values())))
    if type(value) in (tuple, list, set, frozenset):
        return all(map(_is_plain, value))  # type: ignore[call-overload]
    return type(value) in _PLAIN or isinstance(value, Path)


@lru_cache
def machine(device: str) -> bytes:
    """What else decides the last bits: the processor's instructions, torch, the kernels, and the message format."""
    cuda = torch.cuda.get_device_name(device) if device.startswith("cuda") else ""
    here = (platform.machine(), torch.backends.cpu.get_cpu_capability(), torch.__version__, cuda, signature())
    return digest(*(word.encode() for word in (*here, f"wire {VERSION}")))

"""Train once, fuse many: what a client answered is kept under the digest of all that it depends on.

A client's round is a pure function of the brief, the recipe's client half, its rows, its memory and the seed, so
twenty fusion rules compared on the same start cost one training, and a rerun costs none. There are two levels: the
whole work, and its training alone, which serves works that differ in their evidence only.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import platform
import sys
import time
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from functools import lru_cache
from pathlib import Path
from types import FunctionType
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from pydantic import BaseModel
from torch import Tensor

from fedfuse.core.messages import Brief, Envelope
from fedfuse.core.params import Params
from fedfuse.core.seams import Terms, Work
from fedfuse.engines.code import follow, installed_digest, source
from fedfuse.engines.local import ClientResult, LocalEngine, OncePerBrief, close_round
from fedfuse.errors import ConfigError
from fedfuse.kernels import signature
from fedfuse.wire.codec import Malformed, Packet, decode, encode, read, write
from fedfuse.wire.messages import VERSION, encode_brief, split

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


_DAY = 86_400.0
_ROOM = 0.9  # how full the store is after making room, so that it is not made for every entry
_log = logging.getLogger(__name__)


class MemoEntry(NamedTuple):
    """What the store knows of a round: the reply, and what the client remembered after it (None: as before)."""

    payload: bytes
    memory: bytes | None = None

    @property
    def checksum(self) -> str:
        """Tells a sound entry from a damaged one."""
        return digest(self.payload, self.memory or b"").hex()


class _StoredFile(NamedTuple):
    path: Path
    size: int
    used: float


class Memo:
    """A store of clients' answers in a folder that several runs may share.

    Entries appear whole or not at all, a damaged one counts as missing, and those unused for longest go first.

    Args:
        folder: where the entries lie; it is made if need be.
        limit: bytes they may take.

    Example:
        >>> import tempfile
        >>> memo = Memo(tempfile.mkdtemp())
        >>> memo.keep("ab12", MemoEntry(b"reply"))
        >>> memo.find("ab12"), memo.find("cd34")
        (MemoEntry(payload=b'reply', memory=None), None)
    """

    def __init__(self, folder: str | Path, limit: int = 20 * 2**30) -> None:
        self.folder, self.limit = Path(folder), limit
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as why:
            raise ConfigError(
                f"the memo cannot use {folder}: {why.strerror}; choose a folder you may write to"
            ) from why
        self._bytes_stored, self._written = self.size(), 0  # as counted last, and what we wrote since

    def wrap(self, engine: LocalEngine) -> MemoEngine:
        """The engine, asking its clients only what is not known."""
        return MemoEngine(engine, self)

    def find(self, key: str) -> MemoEntry | None:
        """The entry of a key, if there is a sound one; it counts as used now."""
        path = self._path(key)
        try:
            packet = read(path)
            parts = {name: packet.tensors[name].numpy().tobytes() for name in packet.tensors}
            os.utime(path)
        except (OSError, Malformed):
            return None
        entry = MemoEntry(parts.get("reply", b""), parts.get("memory"))
        return entry if packet.header.get("checksum") == entry.checksum else None

    def keep(self, key: str, entry: MemoEntry) -> None:
        """Write an entry, and make room if that is needed; a store that cannot be written ends no run."""
        parts = {"reply": entry.payload} | ({} if entry.memory is None else {"memory": entry.memory})
        tensors = {name: torch.frombuffer(data, dtype=torch.uint8) for name, data in parts.items()}
        try:
            header = {"kind": "memo", "checksum": entry.checksum}
            self._written += write(self._path(key), tensors, header, durable=False)  # the checksum sees a torn one
        except ConfigError as why:
            _log.warning("an answer was not kept: %s", why)
            return
        if self._written > self.limit // 20:  # count again: others may write here too
            self._bytes_stored, self._written = self.size(), 0
        if self._bytes_stored + self._written > self.limit:
            self._make_room()

    def size(self) -> int:
        """Bytes the store takes now."""
        return sum(entry.size for entry in self._entries())

    def _make_room(self) -> None:
        entries = sorted(self._entries(), key=lambda entry: entry.used)
        _bytes_stored = sum(entry.size for entry in entries)
        for entry in entries:
            if _bytes_stored <= _ROOM * self.limit:
                break
            with contextlib.suppress(OSError):
                entry.path.unlink()
            _bytes_stored -= entry.size
        self._bytes_stored, self._written = _bytes_stored, 0

    def _entries(self) -> Iterator[_StoredFile]:
        """Everything in the store, but for what a killed writer left behind: that is removed."""
        for path in self.folder.glob("*/*"):
            with contextlib.suppress(OSError):  # another run may remove it while we look
                facts = path.stat()
                if path.name.startswith(".") and time.time() - facts.st_mtime > _DAY:
                    path.unlink()
                else:
                    yield _StoredFile(path, facts.st_size, facts.st_mtime)

    def _path(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key}.safetensors"


@dataclass(frozen=True, slots=True)
class _Trainings:
    """Fetches the trainings that are known, when they are asked for."""

    memo: Memo
    names: Mapping[str, Name | None]

    def __call__(self, client: str) -> bytes | None:
        name = self.names[client]
        entry = self.memo.find(name.training) if name and name.training else None
        return entry.payload if entry else None


@dataclass(slots=True)
class MemoEngine:
    """An engine that asks its clients only what the memo does not know."""

    engine: LocalEngine
    memo: Memo
    terms: ClassVar[Terms] = Terms()

    @property
    def clients(self) -> tuple[str, ...]:
        """Client ids in client order."""
        return self.engine.clients

    @property
    def memories(self) -> dict[str, Params]:
        """What clients remember from round to round."""
        return self.engine.memories

    @memories.setter
    def memories(self, memories: dict[str, Params]) -> None:
        self.engine.memories = memories

    def exchange(self, brief: Brief, work: Work, asked: tuple[str, ...]) -> Iterator[Envelope]:
        """Bring known answers from the store; ask for the others, and keep them."""
        names = self._names(brief, work, asked)
        unknown = []
        for client in asked:
            name = names[client]
            if name and (entry := self.memo.find(name.whole)):
                memory = self.memories.get(client, {}) if entry.memory is None else dict(decode(entry.memory).tensors)
                yield close_round(self.engine, client, ClientResult(entry.payload, memory, remembered=True))
            else:
                unknown.append(client)
        if unknown:
            yield from self._ask(brief, work, tuple(unknown), names)

    def _ask(
        self, brief: Brief, work: Work, asked: tuple[str, ...], names: Mapping[str, Name | None]
    ) -> Iterator[Envelope]:
        before = {client: digest(self._memory(client)) for client in asked}
        for envelope in self.engine.exchange(brief, work, asked, _Trainings(self.memo, names)):
            name = names[envelope.client]
            payload = envelope.payload
            if name and isinstance(payload, bytes | Packet):
                came = payload if isinstance(payload, bytes) else payload.to_bytes()
                memory = self._memory(envelope.client)
                same = digest(memory) == before[envelope.client]
                self.memo.keep(name.whole, MemoEntry(came, None if same else memory))
                if name.training and not envelope.remembered:
                    self.memo.keep(name.training, MemoEntry(without_evidence(came)))
            yield envelope

    def _names(self, brief: Brief, work: Work, asked: tuple[str, ...]) -> dict[str, Name | None]:
        namer = Namer.of(work, self.engine.seed)
        if namer is None:
            return dict.fromkeys(asked)
        per_brief, rows = OncePerBrief(brief, brief_digest), self.engine.population
        return {c: namer.name(per_brief.for_client(c), c, rows.fingerprint(c), self._memory(c)) for c in asked}

    def _memory(self, client: str) -> bytes:
        return encode(self.engine.memories.get(client, {}), {})


def without_evidence(payload: bytes) -> bytes:
    """The reply that the same training gives when no evidence is asked for."""
    packet = decode(payload)
    return encode(split(packet)[0], packet.header)

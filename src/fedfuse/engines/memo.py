"""Train once, fuse many: what a client answered is kept under the digest of all that it depends on.

A client's round is a pure function of the brief, the recipe's client half, its rows, its memory and the seed, so
twenty fusion rules compared on the same start cost one training, and a rerun costs none. There are two levels: the
whole work, and its training alone, which serves works that differ in their evidence only.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

import torch

from fedfuse.core.messages import Brief, Envelope
from fedfuse.core.params import Params
from fedfuse.core.seams import Work
from fedfuse.core.terms import Terms
from fedfuse.engines.local import Done, LocalEngine, Spoken, close_round
from fedfuse.engines.naming import Name, Namer, brief_digest, digest
from fedfuse.errors import ConfigError
from fedfuse.wire.codec import Malformed, decode, encode, read, write
from fedfuse.wire.messages import split

_DAY = 86_400.0
_ROOM = 0.9  # how full the store is after making room, so that it is not made for every entry
_log = logging.getLogger(__name__)


class Kept(NamedTuple):
    """What the store knows of a round: the reply, and what the client remembered after it (None: as before)."""

    payload: bytes
    memory: bytes | None = None

    @property
    def checksum(self) -> str:
        """Tells a sound entry from a damaged one."""
        return digest(self.payload, self.memory or b"").hex()


class _Entry(NamedTuple):
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
        >>> memo.keep("ab12", Kept(b"reply"))
        >>> memo.find("ab12"), memo.find("cd34")
        (Kept(payload=b'reply', memory=None), None)
    """

    def __init__(self, folder: str | Path, limit: int = 20 * 2**30) -> None:
        self.folder, self.limit = Path(folder), limit
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as why:
            raise ConfigError(
                f"the memo cannot use {folder}: {why.strerror}; choose a folder you may write to"
            ) from why
        self._held, self._written = self.size(), 0  # as counted last, and what we wrote since

    def around(self, engine: LocalEngine) -> MemoEngine:
        """The engine, asking its clients only what is not known."""
        return MemoEngine(engine, self)

    def find(self, key: str) -> Kept | None:
        """The entry of a key, if there is a sound one; it counts as used now."""
        path = self._path(key)
        try:
            packet = read(path)
            parts = {name: packet.tensors[name].numpy().tobytes() for name in packet.tensors}
            os.utime(path)
        except (OSError, Malformed):
            return None
        kept = Kept(parts.get("reply", b""), parts.get("memory"))
        return kept if packet.header.get("checksum") == kept.checksum else None

    def keep(self, key: str, kept: Kept) -> None:
        """Write an entry, and make room if that is needed; a store that cannot be written ends no run."""
        parts = {"reply": kept.payload} | ({} if kept.memory is None else {"memory": kept.memory})
        tensors = {name: torch.frombuffer(data, dtype=torch.uint8) for name, data in parts.items()}
        try:
            header = {"kind": "memo", "checksum": kept.checksum}
            self._written += write(self._path(key), tensors, header, durable=False)  # the checksum sees a torn one
        except ConfigError as why:
            _log.warning("an answer was not kept: %s", why)
            return
        if self._written > self.limit // 20:  # count again: others may write here too
            self._held, self._written = self.size(), 0
        if self._held + self._written > self.limit:
            self._make_room()

    def size(self) -> int:
        """Bytes the store takes now."""
        return sum(entry.size for entry in self._entries())

    def _make_room(self) -> None:
        entries = sorted(self._entries(), key=lambda entry: entry.used)
        held = sum(entry.size for entry in entries)
        for entry in entries:
            if held <= _ROOM * self.limit:
                break
            with contextlib.suppress(OSError):
                entry.path.unlink()
            held -= entry.size
        self._held, self._written = held, 0

    def _entries(self) -> Iterator[_Entry]:
        """Everything in the store, but for what a killed writer left behind: that is removed."""
        for path in self.folder.glob("*/*"):
            with contextlib.suppress(OSError):  # another run may remove it while we look
                facts = path.stat()
                if path.name.startswith(".") and time.time() - facts.st_mtime > _DAY:
                    path.unlink()
                else:
                    yield _Entry(path, facts.st_size, facts.st_mtime)

    def _path(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key}.safetensors"


@dataclass(frozen=True, slots=True)
class _Trainings:
    """Fetches the trainings that are known, when they are asked for."""

    memo: Memo
    names: Mapping[str, Name | None]

    def __call__(self, client: str) -> bytes | None:
        name = self.names[client]
        kept = self.memo.find(name.training) if name and name.training else None
        return kept.payload if kept else None


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
            if name and (kept := self.memo.find(name.whole)):
                memory = self._memory(client) if kept.memory is None else kept.memory
                yield close_round(self.engine, client, Done(kept.payload, memory, remembered=True))
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
            if name and isinstance(envelope.payload, bytes):
                memory = self._memory(envelope.client)
                same = digest(memory) == before[envelope.client]
                self.memo.keep(name.whole, Kept(envelope.payload, None if same else memory))
                if name.training and not envelope.remembered:
                    self.memo.keep(name.training, Kept(without_evidence(envelope.payload)))
            yield envelope

    def _names(self, brief: Brief, work: Work, asked: tuple[str, ...]) -> dict[str, Name | None]:
        namer = Namer.of(work, self.engine.seed)
        if namer is None:
            return dict.fromkeys(asked)
        spoken, rows = Spoken(brief, brief_digest), self.engine.population
        return {c: namer.name(spoken.to(c), c, rows.fingerprint(c), self._memory(c)) for c in asked}

    def _memory(self, client: str) -> bytes:
        return encode(self.engine.memories.get(client, {}), {})


def without_evidence(payload: bytes) -> bytes:
    """The reply that the same training gives when no evidence is asked for."""
    packet = decode(payload)
    return encode(split(packet)[0], packet.header)

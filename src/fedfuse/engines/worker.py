"""A worker process's own side: it receives tasks, trains or asks networks, and answers.

What it is sent is ours and pickled by multiprocessing: inputs that several tasks share (or nothing, if they are those
of the task before) and a task. What it answers is bytes, which are never unpickled: a line of JSON, a payload, and what
the client remembers.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import multiprocessing
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import IO, Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from fedfuse.core.messages import Brief
from fedfuse.core.model import AskModel, ask_in_batches
from fedfuse.core.rows import Rows
from fedfuse.core.seams import Work
from fedfuse.core.spec import Spec
from fedfuse.engines.local import ClientResult, answer
from fedfuse.errors import ConfigError, FuseError, RecipeError, error_text
from fedfuse.wire.codec import Packet, decode, encode
from fedfuse.wire.messages import receive_brief

_DESCRIPTORS = Path("/proc/self/fd")  # where it exists, a file needs no name to be opened by another process

_LARGE = 1 << 24  # bytes that are worth having once


class MappedRows(NamedTuple):
    """Rows that lie in two files; any process of this user may map them."""

    x: str
    y: str
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    dtypes: tuple[torch.dtype, torch.dtype]

    def rows(self) -> Rows:
        """The rows as views of the files; nobody may write to them."""
        x, y = map(_map_file, (self.x, self.y), self.shapes, self.dtypes)
        return Rows(x, y)


def _map_file(path: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    if not math.prod(shape):  # nothing cannot be mapped
        return torch.empty(shape, dtype=dtype)
    if not Path(path).exists():  # torch would make it
        raise ConfigError(f"a worker process cannot find the rows at {path}; use workers=0 on this system")
    return torch.from_file(path, shared=True, size=math.prod(shape), dtype=dtype).view(shape)


class _RowFilePair(NamedTuple):
    rows: Rows
    files: tuple[IO[bytes], IO[bytes]]
    mapped: MappedRows

    def close(self) -> None:
        for file in self.files:
            file.close()


class RowFiles:
    """Where rows lie: in memory if it has room, else on disk; each written once, only the last used kept.

    The files have no name where the system allows that, so nothing can stay behind, however we end.

    Example:
        >>> row_files = RowFiles()
        >>> row_files.add(Rows(torch.ones(2, 3), torch.tensor([0, 1]))).rows().y.tolist()
        [0, 1]
        >>> row_files.clear()
    """

    def __init__(self, keep: int = 2) -> None:
        self._keep = keep
        self._entries: dict[int, _RowFilePair] = {}

    def add(self, rows: Rows) -> MappedRows:
        """The files of these rows, written unless they are there."""
        key = id(rows.x)  # an entry holds on to its rows, so no others can have their id
        entry = self._entries.pop(key, None) or _write(rows)
        while len(self._entries) >= self._keep:
            self._entries.pop(next(iter(self._entries))).close()
        self._entries[key] = entry
        return entry.mapped

    def move(self, rows: Rows) -> None:
        """Let large rows be views of their files, so that they are in memory once and not twice.

        For rows of our own: whoever shares their memory, an array of numpy's say, keeps what it has, apart from them.
        """
        if rows.x.nbytes >= _LARGE and rows.x.is_cpu and rows.x.is_contiguous():
            rows.x.set_(self.add(rows).rows().x)  # type: ignore[call-overload]
            _give_back_memory()

    def clear(self) -> None:
        """Remove everything."""
        while self._entries:
            self._entries.popitem()[1].close()


class RowBuffer:
    """Memory for one client's rows after another: new memory for each would leave holes that nothing else fits.

    What it gave before is overwritten, so nobody may hold on to it.

    Example:
        >>> buffer, rows = RowBuffer(), Rows(torch.arange(6.0).view(3, 2), torch.arange(3))
        >>> buffer.take(rows, torch.tensor([2, 0])).x.tolist()
        [[4.0, 5.0], [0.0, 1.0]]
    """

    def __init__(self) -> None:
        self._x = torch.empty(0)

    def take(self, rows: Rows, index: Tensor) -> Rows:
        """The rows at these positions, in this order."""
        if self._x.dtype != rows.x.dtype or self._x.shape[1:] != rows.x.shape[1:] or len(self._x) < len(index):
            self.clear()  # before there is more
            self._x = torch.empty((len(index), *rows.x.shape[1:]), dtype=rows.x.dtype)
        x = torch.index_select(rows.x, 0, index, out=self._x[: len(index)])
        return Rows(x, rows.y.index_select(0, index))

    def clear(self) -> None:
        """Let others have the memory."""
        self._x = torch.empty(0)


def _give_back_memory() -> None:
    """Let the system have what was freed; the C library would keep it for later. Where it cannot, nothing happens."""
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def _write(rows: Rows) -> _RowFilePair:
    x = _file(rows.x)
    try:
        y = _file(rows.y)
    except ConfigError:
        x.close()
        raise
    mapped = MappedRows(_path(x), _path(y), (tuple(rows.x.shape), tuple(rows.y.shape)), (rows.x.dtype, rows.y.dtype))
    return _RowFilePair(rows, (x, y), mapped)


def _file(tensor: Tensor) -> IO[bytes]:
    """A file with a tensor's numbers, which ends when it is closed."""
    folder = _folder_with_room(tensor.nbytes)
    try:
        make = tempfile.TemporaryFile if _DESCRIPTORS.is_dir() else tempfile.NamedTemporaryFile
        file: IO[bytes] = make(prefix="fedfuse-", dir=folder)
        try:
            tensor.detach().cpu().contiguous().numpy().tofile(file)
            file.flush()
        except BaseException:
            file.close()
            raise
    except OSError as why:
        raise ConfigError(
            f"cannot write {tensor.nbytes:,} bytes of rows to {folder}: {why.strerror or why}; "
            "free some space, point TMPDIR elsewhere or use workers=0"
        ) from why
    return file


def _path(file: IO[bytes]) -> str:
    """How another process opens a file."""
    return file.name if isinstance(file.name, str) else f"/proc/{os.getpid()}/fd/{file.fileno()}"


def _folder_with_room(size: int) -> Path:
    """The first folder with room to spare: memory, then disk."""
    folders = [folder for folder in (Path("/dev/shm"), Path(tempfile.gettempdir())) if folder.is_dir()]
    roomy = [folder for folder in folders if shutil.disk_usage(folder).free > size + size // 4]
    return (roomy or folders[-1:])[0]


READY = b"ready"
_ROWS = RowBuffer()  # of the client in training
USERS_FAULT: Mapping[str, type[FuseError]] = {"ConfigError": ConfigError, "RecipeError": RecipeError}


class ByValue(ForkingPickler):
    """Multiprocessing's pickling with tensors by value: torch's own way passes file descriptors that outlive us."""

    _extra_reducers: ClassVar[dict[type, Any]] = {}


def serve(wire: Connection) -> None:
    """Receive a task, do it and answer, until the connection ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then ends us
    threading.Thread(target=_follow_parent, daemon=True).start()
    torch.set_num_threads(1)
    inputs: Inputs | None = None
    with contextlib.suppress(EOFError, OSError):  # the connection ended: nobody reads any more
        wire.send_bytes(READY)
        while True:
            inputs = _turn(wire, inputs)


def _follow_parent() -> None:
    """Should the parent be killed, end too, in the middle of whatever we do."""
    if (parent := multiprocessing.parent_process()) is not None:
        wait([parent.sentinel])
        os._exit(1)


class Inputs(Protocol):
    """What a worker holds while it does one task after another."""

    def answer(self, task: bytes) -> ClientResult:
        """Do one task."""
        ...


class PackedInputs(Protocol):
    """The same as it travels."""

    def unpack(self) -> Inputs:
        """What the tasks need."""
        ...


class PackedRound(NamedTuple):
    """What all clients of one brief share."""

    work: Work
    spec: Spec
    brief: bytes
    seed: int
    rows: MappedRows

    def unpack(self) -> Inputs:
        """The brief decoded, the rows mapped."""
        return _Round(self.work, receive_brief(self.brief, self.spec), self.seed, self.rows.rows())


@dataclass(frozen=True, slots=True)
class _Round:
    work: Work
    brief: Brief
    seed: int
    rows: Rows

    def answer(self, task: bytes) -> ClientResult:
        client, index, memory, known = ForkingPickler.loads(task)
        rows, kept = _ROWS.take(self.rows, torch.from_numpy(index)), dict(decode(memory).tensors)
        return answer(self.work, self.brief, client, rows, kept, seed=self.seed, trained=known)


class PackedQuestion(NamedTuple):
    """A model, and what is asked of it about rows."""

    ask: AskModel
    model: object
    rows: MappedRows
    batch: int

    def unpack(self) -> Inputs:
        """The rows mapped; the memory that clients' rows had serves the answers."""
        _ROWS.clear()
        return _Question(self.ask, self.model, self.rows.rows().x, self.batch)


@dataclass(frozen=True, slots=True)
class _Question:
    ask: AskModel
    model: object
    x: Tensor
    batch: int

    def answer(self, task: bytes) -> ClientResult:
        """What the model says of a span of rows; a failure is told, so that the parent can meet it itself."""
        start, stop = ForkingPickler.loads(task)
        try:
            found = ask_in_batches(self.ask, self.model, self.x[start:stop], self.batch)
        except Exception as why:  # a user's network may raise anything
            return ClientResult(None, dropped=error_text(why))
        return ClientResult(Packet.of({"outputs": found}, {}))


def _turn(wire: Connection, inputs: Inputs | None) -> Inputs | None:
    fresh, task = wire.recv_bytes(), wire.recv_bytes()
    try:
        inputs = _unpack(fresh) if fresh else inputs
        if inputs is None:
            raise ConfigError("a worker was given a task without its inputs")
        done = inputs.answer(task)
    except (ConfigError, RecipeError) as why:
        kind = next(name for name, cls in USERS_FAULT.items() if isinstance(why, cls))
        wire.send_bytes(json.dumps({"error": kind, "text": str(why)}).encode())
        return None
    facts = {"seconds": done.seconds, "remembered": done.remembered, "dropped": done.dropped}
    reply = done.payload
    payload = reply.to_bytes() if isinstance(reply, Packet) else reply or b""
    for part in (json.dumps(facts).encode(), payload, encode(done.memory, {})):
        wire.send_bytes(part)
    return inputs


def _unpack(packed: bytes) -> Inputs:
    try:
        sent: PackedInputs = ForkingPickler.loads(packed)
    except Exception as why:  # a user's object may raise anything when it is unpickled
        raise ConfigError(
            f"a worker process cannot rebuild the recipe or the model ({type(why).__name__}: {why}); "
            "define its classes in a module that can be imported, or use workers=0"
        ) from why
    return sent.unpack()

"""A worker process's own side: it receives tasks, trains or asks networks, and answers.

What it is sent is ours and pickled by multiprocessing: inputs that several tasks share (or nothing, if they are those
of the task before) and a task. What it answers is bytes, which are never unpickled: a line of JSON, a payload, and what
the client remembers.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from fedfuse.core.messages import Brief
from fedfuse.core.model import AskModel, ask_in_batches
from fedfuse.core.rows import Rows
from fedfuse.core.seams import Work
from fedfuse.core.spec import Spec
from fedfuse.engines.local import ClientResult, answer
from fedfuse.engines.shared_rows import MappedRows, RowBuffer
from fedfuse.errors import ConfigError, FuseError, RecipeError, error_text
from fedfuse.wire.codec import encode
from fedfuse.wire.messages import receive_brief

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
        rows = _ROWS.take(self.rows, torch.from_numpy(index))
        return answer(self.work, self.brief, client, rows, memory, seed=self.seed, trained=known)


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
        return ClientResult(encode({"outputs": found}, {}))


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
    for part in (json.dumps(facts).encode(), done.payload or b"", done.memory):
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

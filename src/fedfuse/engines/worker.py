"""A worker process's own side: it receives tasks, trains, and answers.

What it hears is ours and pickled by multiprocessing: a lesson (or nothing, if it is the one before) and a turn. What it
answers is bytes, which are never unpickled: a line of JSON, the reply's payload, and what the client remembers.
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
from typing import Any, ClassVar

import torch

from fedfuse.core.messages import Brief
from fedfuse.core.rows import Rows
from fedfuse.core.seams import Work
from fedfuse.engines.local import ClientResult, answer
from fedfuse.errors import ConfigError, FuseError, RecipeError
from fedfuse.wire.messages import receive_brief

READY = b"ready"
USERS_FAULT: Mapping[str, type[FuseError]] = {"ConfigError": ConfigError, "RecipeError": RecipeError}


class ByValue(ForkingPickler):
    """Multiprocessing's pickling with tensors by value: torch's own way passes file descriptors that outlive us."""

    _extra_reducers: ClassVar[dict[type, Any]] = {}


def serve(wire: Connection) -> None:
    """Receive a task, do it and answer, until the connection ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then ends us
    threading.Thread(target=_follow_parent, daemon=True).start()
    torch.set_num_threads(1)
    inputs: _UnpackedInputs | None = None
    with contextlib.suppress(EOFError, OSError):  # the connection ended: nobody reads any more
        wire.send_bytes(READY)
        while True:
            inputs = _turn(wire, inputs)


def _follow_parent() -> None:
    """Should the parent be killed, end too, in the middle of whatever we do."""
    if (parent := multiprocessing.parent_process()) is not None:
        wait([parent.sentinel])
        os._exit(1)


@dataclass(frozen=True, slots=True)
class _UnpackedInputs:
    """A round's inputs as a worker holds them."""

    work: Work
    brief: Brief
    seed: int
    rows: Rows

    @classmethod
    def of(cls, packed: bytes) -> _UnpackedInputs:
        try:
            work, spec, brief, seed, mapped = ForkingPickler.loads(packed)
        except Exception as why:  # a user's object may raise anything when it is unpickled
            raise ConfigError(
                f"a worker process cannot rebuild the recipe or the model ({type(why).__name__}: {why}); "
                "define its classes in a module that can be imported, or use workers=0"
            ) from why
        return cls(work, receive_brief(brief, spec), seed, mapped.rows())


def _turn(wire: Connection, inputs: _UnpackedInputs | None) -> _UnpackedInputs | None:
    fresh, turn = wire.recv_bytes(), wire.recv_bytes()
    try:
        inputs = _UnpackedInputs.of(fresh) if fresh else inputs
        done = _answer(inputs, turn)
    except (ConfigError, RecipeError) as why:
        kind = next(name for name, cls in USERS_FAULT.items() if isinstance(why, cls))
        wire.send_bytes(json.dumps({"error": kind, "text": str(why)}).encode())
        return None
    facts = {"seconds": done.seconds, "remembered": done.remembered, "dropped": done.dropped}
    for part in (json.dumps(facts).encode(), done.payload or b"", done.memory):
        wire.send_bytes(part)
    return inputs


def _answer(inputs: _UnpackedInputs | None, turn: bytes) -> ClientResult:
    if inputs is None:
        raise ConfigError("a worker was given a task without its inputs")
    client, index, memory, known = ForkingPickler.loads(turn)
    rows = inputs.rows.take(torch.from_numpy(index))
    return answer(inputs.work, inputs.brief, client, rows, memory, seed=inputs.seed, trained=known)

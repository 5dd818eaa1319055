"""Briefs, replies and models as messages: which tensor goes under which name, and what the header says."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fedfuse.core.messages import Brief
from fedfuse.core.params import Params
from fedfuse.core.settings import LocalSettings
from fedfuse.core.spec import Spec
from fedfuse.errors import ConfigError
from fedfuse.tasks import CLASSIFICATION, task_header, task_named
from fedfuse.wire.codec import LazyParams, Malformed, Packet, decode, encode, encoded_size, laid_out

VERSION = 1
NOTE = "~"  # evidence and memory stand under this mark, so that plain names are always the model's own


def encode_brief(brief: Brief) -> bytes:
    """A brief as this client gets it (see `Brief.to`)."""
    return encode({**brief.params, **mark_notes(brief.memory)}, _brief_header(brief))


def brief_size(brief: Brief) -> int:
    """How many bytes a brief takes, without writing them."""
    return encoded_size({**brief.params, **mark_notes(brief.memory)}, _brief_header(brief))


def _brief_header(brief: Brief) -> dict[str, Any]:
    header = {"kind": "brief", "version": VERSION, "round": brief.round, "classes": brief.classes}
    return {**header, **task_header(brief.task), "spec": brief.spec.to_json()}


def decode_brief(data: bytes, trusted: Collection[str] = ()) -> Brief:
    """Read a brief at a client; a model that is not ours must be named in `trusted`.

    Raises:
        Malformed: if the bytes are no brief of this version.
        ConfigError: if they name a network that was not named here.

    Example:
        >>> import torch
        >>> brief = Brief(3, Spec("mlp"), {"w": torch.ones(1)}, {"control/w": torch.zeros(1)})
        >>> decode_brief(encode_brief(brief)).round
        3
    """
    packet = decode(data)
    header = packet.header
    counts = header.get("round"), header.get("classes")
    if (header.get("kind"), header.get("version")) != ("brief", VERSION) or not all(type(n) is int for n in counts):
        raise Malformed(f"it is a {header.get('kind')!r:.40} message, expected a brief of version {VERSION}")
    spec = Spec.from_json(header.get("spec"), trusted)
    params, memory = split(packet)
    task = task_named(header.get("task", CLASSIFICATION.name))
    return Brief(header["round"], spec, params, memory, classes=header["classes"], task=task)


def receive_brief(data: bytes, spec: Spec) -> Brief:
    """A brief as it arrives at another process of this machine; its spec comes separately: a prototype has no bytes."""
    brief = decode_brief(data, spec.factories)
    return replace(brief, spec=spec, params=dict(brief.params), memory=dict(brief.memory))


def hand_over(brief: Brief) -> Brief:
    """The same for a client of this process: its own copy of what it hears, without a message."""
    return replace(brief, params=dict(laid_out(brief.params)), memory=dict(laid_out(brief.memory)))


def encode_reply(
    brief: Brief,
    mean: Params,
    notes: Params,
    *,
    num_examples: float,
    steps: int,
    facts: Mapping[str, float],
    training: LocalSettings | None = None,
) -> bytes:
    """A client's answer to a brief, as bytes."""
    header = reply_header(brief, num_examples=num_examples, steps=steps, facts=facts, training=training)
    return encode({**mean, **mark_notes(notes)}, header)


def reply_header(
    brief: Brief, *, num_examples: float, steps: int, facts: Mapping[str, float], training: LocalSettings | None = None
) -> dict[str, Any]:
    """The header every reply and every update file carries; `training` says how the client trained."""
    header = {
        "kind": "reply",
        "version": VERSION,
        "round": brief.round,
        "spec": brief.spec.to_json(),
        "num_examples": num_examples,
        "steps": steps,
        "facts": {name: value for name, value in facts.items() if math.isfinite(value)},
    }
    return header | ({} if training is None else {"training": training.to_json()})


def tell_memory(memory: Params) -> dict[str, int]:
    """A server's published memory as a file's header tells it: whole numbers alone, such as turns.

    Example:
        >>> import torch
        >>> tell_memory({"turn/done": torch.tensor(2), "control/w": torch.zeros(3)})
        {'turn/done': 2}
    """
    return {n: int(t) for n, t in memory.items() if t.ndim == 0 and not t.is_floating_point()}


def read_memory(told: object) -> dict[str, Tensor]:
    """The published memory that a header tells of, none where it tells of none.

    Raises:
        ConfigError: if it tells what is no whole number.

    Example:
        >>> read_memory({"turn/done": 2}), read_memory(None)
        ({'turn/done': tensor(2)}, {})
    """
    entries = told.items() if isinstance(told, dict) else [] if told is None else [("", told)]
    if odd := [value for value in (v for _, v in entries) if type(value) is not int or not 0 <= value < 10**6]:
        raise ConfigError(f"a file tells of what the server published as {str(odd[0])[:40]!r}, expected whole numbers")
    return {str(name): torch.tensor(value) for name, value in entries}


def mark_notes(notes: Params) -> dict[str, Tensor]:
    """Notes under their marked names."""
    return {NOTE + name: tensor for name, tensor in notes.items()}


def split(packet: Packet) -> tuple[LazyParams, LazyParams]:
    """A message's tensors as the model's own and the notes."""
    tensors = packet.tensors
    notes = {name.removeprefix(NOTE): name for name in tensors.forms if name.startswith(NOTE)}
    own = tensors.part(lambda name: not name.startswith(NOTE)) if notes else tensors
    return own, tensors.renamed(notes)

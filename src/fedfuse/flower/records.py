"""Briefs and replies as Flower's records, read back with suspicion.

A tensor is an `Array` of `.npy` bytes, as any Flower app would send it, so that other apps can read it. We read it
without numpy's loader: the header is compared with the bytes that are there before anything is allocated, and the
tensor is a view of them. bfloat16, which `.npy` does not know, travels as its bits under its own name.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import Any

import numpy as np
import torch
from numpy.lib import format as npy
from torch import Tensor

from fedfuse.core.messages import Brief, Form
from fedfuse.core.params import Params
from fedfuse.core.seams import Work
from fedfuse.core.spec import Spec
from fedfuse.errors import ConfigError
from fedfuse.flower.version import need_flower
from fedfuse.tasks import CLASSIFICATION, task_header, task_named
from fedfuse.wire.codec import Malformed, Packet
from fedfuse.wire.messages import VERSION

need_flower()

from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict  # noqa: E402

NUMPY = "numpy.ndarray"  # Flower's word for .npy bytes
PARAMS, MEMORY, BRIEF, REPLY, TIME, FAILED = "params", "memory", "brief", "reply", "time", "failed"
_BITS = "bfloat16"
_HEADER = 4096  # bytes of an .npy's header that are read at most: dtype, order and shape; ours take 128
_TYPES = {
    np.dtype(name): getattr(torch, name)
    for name in ("float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8", "bool")
}


def to_arrays(params: Params) -> ArrayRecord:
    """Tensors as a record of arrays.

    Example:
        >>> record = to_arrays({"w": torch.tensor([1.0, 2.0])})
        >>> record["w"].dtype, to_tensors(record)["w"].tolist()
        ('float32', [1.0, 2.0])
    """
    record = ArrayRecord()
    for name in params:
        record[name] = _array(params[name])
    return record


def _array(tensor: Tensor) -> Array:
    plain = tensor.detach().cpu().contiguous()
    if plain.dtype != torch.bfloat16:
        return Array.from_numpy_ndarray(plain.numpy())
    bits = Array.from_numpy_ndarray(plain.view(torch.int16).numpy())
    return Array(dtype=_BITS, shape=tuple(plain.shape), stype=NUMPY, data=bits.data)


def to_tensors(record: Mapping[str, Array]) -> dict[str, Tensor]:
    """A record's arrays as views of their bytes, in the record's order.

    Raises:
        Malformed: naming the first array that is not what it claims to be.
    """
    return {name: _tensor(name, array) for name, array in record.items()}


def _tensor(name: str, array: Array) -> Tensor:
    if array.stype != NUMPY:
        raise Malformed(f"tensor {name[:80]!r} comes as {array.stype[:40]!r}, expected {NUMPY!r}")
    form, fortran, begin = _header(name, array.data)
    if math.prod(form.shape) == 0:
        tensor = torch.empty(form.shape, dtype=form.dtype)  # torch makes no tensor of an empty buffer
    else:
        tensor = torch.frombuffer(array.data, dtype=form.dtype, offset=begin)
        if fortran and len(form.shape) > 1:
            tensor = tensor.view(form.shape[::-1]).permute(*range(len(form.shape))[::-1])
        else:
            tensor = tensor.view(form.shape)
    return tensor.view(torch.bfloat16) if array.dtype == _BITS and form.dtype == torch.int16 else tensor


def _header(name: str, data: bytes) -> tuple[Form, bool, int]:
    """What an `.npy` says of itself, once it is sure that as many bytes follow; and where they begin.

    A header that lies must cost no memory and run no code: dtypes are a fixed list without objects, in this machine's
    byte order, and the shape is compared with the bytes that came.
    """
    start = io.BytesIO(data[:_HEADER])
    try:
        version = npy.read_magic(start)
        read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, fortran, dtype = read(start)
    except Exception as why:  # numpy's parser of headers may raise anything at a hostile one
        raise Malformed(f"tensor {name[:80]!r} is not an .npy array") from why
    if dtype not in _TYPES or not all(type(n) is int and n >= 0 for n in shape) or len(shape) > 8:
        raise Malformed(f"tensor {name[:80]!r} is {dtype.str[:20]!r} of {len(shape)} axes, which is not read here")
    begin, size = start.tell(), math.prod(shape) * dtype.itemsize
    if len(data) - begin != size:
        raise Malformed(f"tensor {name[:80]!r} claims {size:,} bytes and has {len(data) - begin:,}")
    return Form(shape, _TYPES[dtype]), fortran, begin


@dataclass(frozen=True, slots=True)
class Order:
    """What the server sends to a client besides the brief.

    Attributes:
        label: the method's label; a client's memory belongs to one label and seed.
        seed: the seed of the run.
        client: who it is, which names its random streams.
        work: the fingerprint of the work that is meant.
        method: the method's name and options as JSON, for a client that has no copy of an experiment file.
        local: how to train, as JSON, if the server decides it.
    """

    label: str
    seed: int
    client: str
    work: str
    method: str = ""
    local: str = ""


def fingerprint(work: Work) -> str:
    """A short name of a client's work, so that two sides with different code or files notice.

    Raises:
        ConfigError: for a work that the other side could not have, such as one with a lambda in it.

    Example:
        >>> fingerprint(Work()) == fingerprint(Work())
        True
    """
    if work.key is None:
        raise ConfigError(
            "this method cannot run on a federation: a part of its client half has no name (a lambda, an open file), "
            "so a site could not make it from the experiment file; use parts that are classes or functions of a module"
        )
    return sha256(work.key.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class BriefRecords:
    """A brief as records; the arrays are made once and shared by all clients that get the same brief."""

    params: ArrayRecord
    memory: ArrayRecord
    words: Mapping[str, Any]

    @classmethod
    def of(cls, brief: Brief) -> BriefRecords:
        """The records of a brief.

        Raises:
            ConfigError: for a network that is an object in memory, which no message can carry.
        """
        if brief.spec.prototype is not None:
            raise ConfigError(
                f"the network {brief.spec.factory!r} is an object of this process and cannot travel; "
                "name it as package.module:Class, importable at every site"
            )
        words = {"version": VERSION, "round": brief.round, "classes": brief.classes, "spec": brief.spec.to_text()}
        words |= task_header(brief.task)
        return cls(to_arrays(brief.params), to_arrays(brief.memory), words)

    def to(self, order: Order) -> RecordDict:
        """The content of one client's message."""
        words = ConfigRecord({**self.words, **asdict(order)})
        return RecordDict({PARAMS: self.params, MEMORY: self.memory, BRIEF: words})


def read_brief(content: RecordDict, trusted: Collection[str] | None = ()) -> tuple[Brief, Order]:
    """Read a brief and its order; a network that is not fedfuse's own must be named in `trusted`.

    With None for `trusted` any network may be named, and it must not be built before it was compared with one's own.

    Raises:
        Malformed: if it is no brief of this version.
        ConfigError: if it names a network that was not named here.
    """
    words: dict[str, Any] = dict(content.config_records.get(BRIEF, {}))
    wanted = {"version": int, "round": int, "classes": int, "spec": str, "label": str, "seed": int, "client": str}
    if odd := [key for key, kind in {**wanted, "work": str}.items() if type(words.get(key)) is not kind]:
        raise Malformed(f"the server's message has no usable {odd[0]!r}; expected a brief of version {VERSION}")
    if words["version"] != VERSION:
        raise Malformed(
            f"the server speaks version {words['version']} and this site version {VERSION}; install the same fedfuse"
        )
    value = json.loads(words["spec"])
    spec = Spec.from_json(value, Spec.factories_in(value) if trusted is None else trusted)
    params, memory = (to_tensors(content.array_records.get(key, {})) for key in (PARAMS, MEMORY))
    more = {key: str(words.get(key, "")) for key in ("method", "local")}
    task = task_named(words.get("task", CLASSIFICATION.name))
    order = Order(words["label"], words["seed"], words["client"], words["work"], **more)
    return Brief(words["round"], spec, params, memory, classes=words["classes"], task=task), order


def reply_content(packet: Packet, seconds: float) -> RecordDict:
    """A client's reply, taken apart into records: numbers, words, and as JSON what of its header is neither."""
    header = dict(packet.header)
    numbers = {"num_examples": header.pop("num_examples"), "steps": header.pop("steps"), **header.pop("facts")}
    words: dict[str, Any] = {key: value for key, value in header.items() if isinstance(value, str | int | float)}
    tables: dict[str, Any] = {
        key: json.dumps(value, sort_keys=True) for key, value in header.items() if key not in words
    }
    return RecordDict(
        {
            PARAMS: to_arrays(packet.tensors),
            f"{REPLY}.words": ConfigRecord(words),
            f"{REPLY}.tables": ConfigRecord(tables),
            f"{REPLY}.numbers": MetricRecord(numbers),
            TIME: MetricRecord({"seconds": seconds}),
        }
    )


def failed_content(why: str) -> RecordDict:
    """Why a client has no reply, in its own words."""
    return RecordDict({FAILED: ConfigRecord({"why": why[:500]})})


def read_reply(content: RecordDict, store: Callable[[Params, Mapping[str, Any]], Any]) -> Any:
    """Hand a reply's tensors and header to `store`, as the client's own message had them; nothing is judged here.

    Raises:
        Malformed: if the records cannot be read as a message at all.
    """
    try:
        words = dict(content.config_records[f"{REPLY}.words"])
        numbers = {key: _finite(value) for key, value in content.metric_records[f"{REPLY}.numbers"].items()}
        tables = {key: json.loads(str(text)) for key, text in content.config_records[f"{REPLY}.tables"].items()}
        header = {
            **words,
            **tables,
            "num_examples": numbers.pop("num_examples"),
            "steps": numbers.pop("steps"),
            "facts": numbers,
        }
        return store(to_tensors(content.array_records[PARAMS]), header)
    except (KeyError, ValueError, TypeError, RecursionError) as why:
        raise Malformed(f"its records are not a reply ({type(why).__name__}: {why})"[:200]) from why


def _finite(value: Any) -> Any:
    """A number, or the word for one that JSON cannot hold: the door refuses it by name."""
    return value if not isinstance(value, float) or math.isfinite(value) else str(value)


def seconds_in(content: RecordDict) -> float:
    """How long a client says it worked; nothing depends on it."""
    value: object = dict(content.metric_records.get(TIME, {})).get("seconds", 0.0)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) and value >= 0 else 0.0

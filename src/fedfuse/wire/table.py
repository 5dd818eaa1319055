"""A message's table of contents, read with suspicion: it is checked in full before a single tensor exists."""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from fedfuse.core.messages import Form
from fedfuse.errors import ConfigError, FuseError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_ENTRY = frozenset({"dtype", "shape", "data_offsets"})
_LEVELS = 32  # that a header may nest

FILE_FORMAT = 2  # of files for others: from 2 on they carry a checksum
SEAL = "fedfuse.sha256"  # the metadata's word that is the checksum
NO_SEAL = "0" * 64  # what stands in its place while it is computed


class Malformed(FuseError):
    """Bytes that are not what they claim to be."""


class Altered(ConfigError, Malformed):
    """A file that was whole when it was written and is another one now."""

    def __init__(self, path: object, how: str) -> None:
        self.how = how
        super().__init__(f"{path} is damaged or altered: {how}; fetch it again")


class Packed(Malformed):
    """A tensor that holds no numbers of a network but codes for them, of which there is no mean.

    Attributes:
        tensor: its name.
        got: its shape and dtype, or whose state it is.
    """

    expected = "plain weights: dequantize the model (`model.dequantize()` in transformers) and save it in bfloat16"

    def __init__(self, tensor: str, got: str) -> None:
        self.tensor, self.got = tensor, got
        super().__init__(f"tensor {tensor[:80]!r} is {got}, packed numbers; expected {self.expected}")


@dataclass(frozen=True, slots=True)
class Limits:
    """What a reader is ready to accept, checked before allocation."""

    bytes: int = 16 * 2**30
    header: int = 16 * 2**20
    tensors: int = 100_000


class Contents(NamedTuple):
    """A message's table of contents, found good for a body of that length."""

    table: Mapping[str, Any]
    body: int
    forms: Mapping[str, Form]
    offsets: Mapping[str, int]


_last: Contents | None = None  # replies of one round share their table: it is checked once, and kept once


def check_size(size: int, limits: Limits) -> None:
    """Refuse more bytes than are allowed."""
    if size > limits.bytes:
        raise Malformed(f"{size:,} bytes are more than the {limits.bytes:,} that fit here")


class Parsed(NamedTuple):
    """What stands before a message's data: its table, its header, and its checksum if it has one.

    `start` is where the data begin; `promised` tells that a message of this format has a checksum.
    """

    contents: Contents
    header: Mapping[str, Any]
    start: int
    seal: str | None
    promised: bool


def parse(piece: Callable[[int, int], bytes], size: int, limits: Limits) -> Parsed:
    """What stands before the data of a message of so many bytes; `piece` gives bytes of it.

    Raises:
        Malformed: with the reason.
    """
    if size < 8:
        raise Malformed(f"only {size} bytes, too short for any message")
    length = int.from_bytes(piece(0, 8), "little")
    if length > min(limits.header, size - 8):
        raise Malformed(
            f"it claims a header of {length:,} bytes; it has {size:,} in all and {limits.header:,} are allowed"
        )
    if length % 8:  # tensors would begin between numbers, where no view of them can be made
        raise Malformed("its header is not padded to eight bytes")
    table = _table(piece(8, length))
    meta = table.pop("__metadata__", {})
    if len(table) > limits.tensors:
        raise Malformed(f"{len(table):,} tensors are more than the {limits.tensors:,} allowed")
    header = _header(meta)
    written = header.pop("format", 1)
    if type(written) is not int or not 1 <= written <= FILE_FORMAT:
        raise Malformed(f"its format is {written!r:.40}, expected 1 to {FILE_FORMAT}; a newer fedfuse may read it")
    return Parsed(_contents(table, size - 8 - length), header, 8 + length, meta.get(SEAL), written > 1)


def _contents(table: Mapping[str, Any], body: int) -> Contents:
    global _last
    known = _last  # read once: another thread may be reading another message
    # names in their order too: dictionaries are equal in any order, and a run of tensors is not
    if known is None or (known.body, list(known.table), known.table) != (body, list(table), table):
        forms = {name: _form(name, entry) for name, entry in table.items()}
        offsets = {name: entry["data_offsets"][0] for name, entry in table.items()}
        _check_cover([entry["data_offsets"] for entry in table.values()], body)
        _last = known = Contents(table, body, forms, offsets)
    return known


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """JSON lets the last of two equal names win; another reader might take the first and see another message."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise Malformed("a name stands twice in its header")
    return found


def _table(text: str | bytes) -> dict[str, Any]:
    try:
        table = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as why:
        raise Malformed("its header is not JSON; expected a safetensors file") from why
    if not isinstance(table, dict):
        raise Malformed("its header is not a table; expected a safetensors file")
    return table


def _header(meta: object) -> dict[str, Any]:
    text = meta.get("fedfuse", "{}") if isinstance(meta, dict) else None
    if not isinstance(text, str):
        raise Malformed("its metadata are not text")
    header = _table(text)
    if text.count("{") + text.count("[") > _LEVELS and _too_deep(header):  # fewer brackets cannot nest as far
        raise Malformed("its header is nested too deeply")
    return header


def _too_deep(value: object, levels: int = _LEVELS) -> bool:
    """Whether a header nests so far that printing or comparing it could exhaust the stack."""
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels == 0 or any(_too_deep(part, levels - 1) for part in inside)


def _form(name: str, entry: object) -> Form:
    if not isinstance(entry, dict) or entry.keys() != _ENTRY:
        raise Malformed(f"tensor {name[:80]!r} is not described by dtype, shape and offsets")
    kind, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    dtype = DTYPES.get(kind) if isinstance(kind, str) else None
    if dtype is None:
        if isinstance(kind, str) and kind.startswith(("F8", "F6", "F4")):
            raise Packed(name, kind[:20])
        raise Malformed(f"tensor {name[:80]!r} has the dtype {reprlib.repr(kind)}, which is not read here")
    lists = isinstance(shape, list) and isinstance(offsets, list) and len(shape) <= 8 and len(offsets) == 2
    if not lists or not _naturals([*shape, *offsets]):
        raise Malformed(f"tensor {name[:80]!r} has an impossible shape or place")
    begin, end = offsets  # Python's integers do not overflow, so a product of huge sides is simply unequal
    if end - begin != math.prod(shape) * dtype.itemsize or begin % dtype.itemsize:
        raise Malformed(f"tensor {name[:80]!r} claims {end - begin} bytes for the shape {shape}")
    return Form(tuple(shape), dtype)


def _naturals(numbers: list[Any]) -> bool:
    return {*map(type, numbers)} == {int} and 0 <= min(numbers) <= max(numbers) < 2**48  # bool is another type


def _check_cover(offsets: list[list[int]], body: int) -> None:
    """The tensors must fill the data exactly: no gap, no overlap, nothing beyond."""
    at = 0
    for begin, end in sorted(offsets):
        if begin != at:
            raise Malformed("its tensors overlap or leave gaps")
        at = end
    if at != body:
        raise Malformed(f"its tensors claim {at:,} bytes and {body:,} came")

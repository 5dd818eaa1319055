"""Tensors and a small header as safetensors bytes, written plainly and read with suspicion.

The format is safetensors' own (8 bytes of length, a JSON table, the data), so any safetensors reader opens our
files; our header stands in its metadata under "fedfuse". Reading never trusts a length: the table is checked in
full, against given limits, before a single tensor exists.

A sealed file has under "fedfuse.sha256" the SHA-256 of all its bytes, with zeros for the 64 digits themselves. It is
looked at when the file is opened, in one pass; the tensors are then read from where the system keeps them.

Read first `LazyParams`, then `encode` and `decode`; what is checked of a message stands in `parse`.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import reprlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedfuse.core.files import regular, write_atomically
from fedfuse.core.messages import Form
from fedfuse.core.params import Params
from fedfuse.core.torch_utils import use_large_pages
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
_NAMES = {dtype: name for name, dtype in DTYPES.items()}

FILE_FORMAT = 2  # of files for others: from 2 on they carry a checksum
SEAL = "fedfuse.sha256"  # the metadata's word that is the checksum
NO_SEAL = "0" * 64  # what stands in its place while it is computed

with warnings.catch_warnings():  # torch says once per process that such memory is read-only; we know
    warnings.simplefilter("ignore")
    torch.frombuffer(b"\0", dtype=torch.uint8)


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


class LazyParams(Mapping[str, Tensor]):
    """Tensors that are fetched when asked for and not kept: the memory is the caller's.

    Attributes:
        forms: the shape and dtype of every tensor.
        offsets: at which byte of the message each tensor begins, where that is known: a piece may go on beyond its
            tensor's end into those of the same dtype that follow it.
        resident: whether pieces are views of memory, of any length.

    `fetch` reads a run of a tensor's elements, so that a reader can walk through a tensor larger than its memory.
    `fill` reads a run that begins at an element into memory that is there already, where that saves a copy.
    """

    __slots__ = ("_fetch", "_fill", "forms", "offsets", "resident")

    def __init__(
        self,
        forms: Mapping[str, Form],
        fetch: Callable[[str, int, int], Tensor],
        offsets: Mapping[str, int] | None = None,
        resident: bool = False,
        fill: Callable[[str, int, Tensor], None] | None = None,
    ) -> None:
        self.forms, self.resident = forms, resident
        self.offsets = offsets or {}
        self._fetch, self._fill = fetch, fill

    def __getitem__(self, name: str) -> Tensor:
        form = self.forms[name]
        return self._fetch(name, 0, math.prod(form.shape)).view(form.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self.forms)

    def __len__(self) -> int:
        return len(self.forms)

    def __contains__(self, name: object) -> bool:
        return name in self.forms

    def piece(self, name: str, begin: int, end: int) -> Tensor:
        """Elements [begin, end) of a tensor laid flat, counted from its first."""
        return self._fetch(name, begin, end)

    def piece_in(self, room: Tensor, name: str, begin: int, end: int) -> Tensor:
        """The same, in a room if it is read from a file, and fits: one room serves many pieces."""
        if self._fill is None or room.dtype != self.forms[name].dtype or len(room) < end - begin:
            return self._fetch(name, begin, end)
        self._fill(name, begin, piece := room[: end - begin])
        return piece

    def runs(self) -> list[tuple[str, ...]]:
        """Names in groups whose tensors lie one behind the other in one dtype: each can be read as one long piece."""
        runs, end = list[tuple[str, ...]](), (-1, torch.bool)  # where the last run ends, and its dtype
        for name, offset in sorted(self.offsets.items(), key=lambda entry: entry[1]):
            form = self.forms[name]
            if end == (offset, form.dtype):
                runs[-1] += (name,)
            else:
                runs.append((name,))
            end = (offset + math.prod(form.shape) * form.dtype.itemsize, form.dtype)
        return runs if self.offsets else [(name,) for name in self.forms]

    def pieces(self, run: tuple[str, ...], size: int = 1 << 22) -> Iterator[Tensor]:
        """All elements of a run, so many at a time."""
        count = sum(math.prod(self.forms[name].shape) for name in run)
        return (self._fetch(run[0], begin, min(begin + size, count)) for begin in range(0, count, size))

    def only(self, names: Iterable[str]) -> LazyParams:
        """The tensors of these names, found without looking at any other."""
        forms = {name: self.forms[name] for name in names}
        offsets = {name: self.offsets[name] for name in forms if name in self.offsets}
        return LazyParams(forms, self._fetch, offsets, self.resident, self._fill)

    def part(self, keep: Callable[[str], bool], rename: Callable[[str], str] = str) -> LazyParams:
        """The tensors whose names pass, under new names."""
        kept = [name for name in self.forms if keep(name)]
        if rename is not str:
            return self.renamed({rename(name): name for name in kept})
        # itself, with its tables: clients whose tables are one object are known to be laid out alike at once
        return self if len(kept) == len(self.forms) else self.only(kept)

    def renamed(self, old: Mapping[str, str]) -> LazyParams:
        """Some of the tensors, by new names for old ones."""
        forms = {new: self.forms[name] for new, name in old.items()}
        offsets = {new: self.offsets[name] for new, name in old.items() if name in self.offsets}
        fetch, fill = self._fetch, self._fill
        return LazyParams(
            forms,
            lambda new, begin, end: fetch(old[new], begin, end),
            offsets,
            self.resident,
            None if fill is None else lambda new, begin, room: fill(old[new], begin, room),
        )


@dataclass(frozen=True, slots=True)
class Packet:
    """A parsed message: its header, its tensors on demand, and whether it had a checksum, which was then right."""

    header: Mapping[str, Any]
    tensors: LazyParams
    size: int
    sealed: bool = False

    @classmethod
    def of(cls, tensors: Params, header: Mapping[str, Any]) -> Packet:
        """What `decode(encode(tensors, header))` gives, for a message that never leaves this process.

        Example:
            >>> Packet.of({"w": torch.tensor([1.0, 2.0])}, {"num_examples": 3}).tensors["w"].tolist()
            [1.0, 2.0]
        """
        said = json.loads(json.dumps(header, sort_keys=True, allow_nan=False))  # as a reader finds it: tuples are lists
        copies = laid_out(tensors)
        return cls(said, copies, encoded_size(copies, said))

    def to_bytes(self) -> bytes:
        """The message as it travels."""
        return encode(self.tensors, self.header)


def laid_out(tensors: Params) -> LazyParams:
    """Copies of tensors as they lie in a message: contiguous, the widest numbers first, all in one piece of memory.

    A tensor's strides decide the order in which its numbers are summed, so what comes from a message and what never
    was in one must lie alike, or the two would differ in their last bits.
    """
    forms = forms_of(tensors)
    places, size = _places(forms)
    offsets = {name: begin for name, (begin, _) in places.items()}
    memory = torch.empty(size, dtype=torch.uint8)

    def fetch(name: str, begin: int, end: int) -> Tensor:
        dtype = forms[name].dtype
        at = offsets[name] + begin * dtype.itemsize
        return memory[at : at + (end - begin) * dtype.itemsize].view(dtype)

    found = LazyParams(forms, fetch, offsets, resident=True)
    for name, tensor in tensors.items():
        found[name].copy_(tensor.detach())
    return found


def as_lazy(params: Params) -> LazyParams:
    """The tensors as if they waited on disk."""
    if isinstance(params, LazyParams):
        return params
    return LazyParams(forms_of(params), lambda name, begin, end: piece_of(params, name, begin, end))


def piece_of(params: Params, name: str, begin: int, end: int) -> Tensor:
    """Elements [begin, end) of a tensor laid flat, wherever it lives."""
    return params.piece(name, begin, end) if isinstance(params, LazyParams) else params[name].reshape(-1)[begin:end]


def piece_in(room: Tensor, params: Params, name: str, begin: int, end: int) -> Tensor:
    """The same, in a room if it is read from a file, and fits."""
    if isinstance(params, LazyParams):
        return params.piece_in(room, name, begin, end)
    return piece_of(params, name, begin, end)


def forms_of(params: Params) -> Mapping[str, Form]:
    """The form of every tensor, without fetching any that waits on disk."""
    if isinstance(params, LazyParams):
        return params.forms
    return {name: Form(tuple(t.shape), t.dtype) for name, t in params.items()}


def forms_size(forms: Mapping[str, Form]) -> int:
    """Bytes of data these tensors take."""
    return sum(math.prod(f.shape) * f.dtype.itemsize for f in forms.values())


def encode(tensors: Params, header: Mapping[str, Any]) -> bytes:
    """Tensors and header as one message.

    Example:
        >>> packet = decode(encode({"w": torch.tensor([1.0, 2.0])}, {"num_examples": 3}))
        >>> packet.header["num_examples"], packet.tensors["w"].tolist()
        (3, [1.0, 2.0])
    """
    head = _head(tensors, header)
    return b"".join([head.text, *[_bytes_of(tensors[name]) for name in head.ordered]])


def encoded_size(tensors: Params, header: Mapping[str, Any]) -> int:
    """How long the message would be, without writing it.

    Example:
        >>> encoded_size({"w": torch.ones(9)}, {}) == len(encode({"w": torch.ones(9)}, {}))
        True
    """
    head = _head(tensors, header)
    return len(head.text) + head.body


def write(
    path: Path, tensors: Params, header: Mapping[str, Any], durable: bool = True, marks: Mapping[str, str] | None = None
) -> int:
    """Write a message to a file, one tensor at a time; the file appears whole or not at all (see `write_atomically`).

    `marks` are further words of its metadata, for other readers.
    """
    head = _head(tensors, header, marks)
    with write_atomically(path, durable) as file:
        file.write(head.text)
        for name in head.ordered:
            file.write(_bytes_of(tensors[name]))
        return file.tell()


def write_sealed(path: Path, tensors: Params, header: Mapping[str, Any], marks: Mapping[str, str] | None = None) -> int:
    """The same for a file that others will read: it carries a checksum of itself, by which `read` sees damage.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     size = write_sealed(path := Path(folder) / "w", {"w": torch.ones(2)}, {})
        ...     whole = path.read_bytes()
        ...     damaged = path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        ...     read(path)
        Traceback (most recent call last):
        ...
        fedfuse.wire.codec.Altered: ...w is damaged or altered: its checksum is not the one it was written with; ...
    """
    head = _head(tensors, {**header, "format": FILE_FORMAT}, {SEAL: NO_SEAL, **(marks or {})})
    digest = hashlib.sha256(head.text)
    with write_atomically(path) as file, ThreadPoolExecutor(1) as pool:
        file.write(head.text)
        for name in head.ordered:
            data = _bytes_of(tensors[name])
            hashed = pool.submit(digest.update, data)  # a core of its own, while this one copies to the system
            file.write(data)
            hashed.result()
        size = file.tell()
        file.seek(head.text.index(NO_SEAL.encode()))
        file.write(digest.hexdigest().encode())
    return size


class _Head(NamedTuple):
    """What stands before a message's data, the order of its tensors there, and their bytes in all."""

    text: bytes
    ordered: list[str]
    body: int


def _head(tensors: Params, header: Mapping[str, Any], marks: Mapping[str, str] | None = None) -> _Head:
    forms = forms_of(tensors)
    for name, form in forms.items():
        if form.dtype not in _NAMES:
            raise ConfigError(
                f"tensor {name!r} is {form.dtype}, which safetensors files do not carry here; bring it to "
                "floats of 16 bits or more, or to 64-bit whole numbers"
            )
    places, end = _places(forms)
    table: dict[str, Any] = {
        "__metadata__": {**(marks or {}), "fedfuse": json.dumps(header, sort_keys=True, allow_nan=False)},
        **{
            name: {"dtype": _NAMES[form.dtype], "shape": list(form.shape), "data_offsets": places[name]}
            for name, form in forms.items()
        },
    }
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the data begin at a multiple of eight and can be read in place
    return _Head(len(text).to_bytes(8, "little") + text, list(places), end)


def _places(forms: Mapping[str, Form]) -> tuple[dict[str, list[int]], int]:
    """Where each tensor begins and ends behind a message's head, in the order in which they lie, and where all end."""
    widths = {name: form.dtype.itemsize for name, form in forms.items()}
    places, end = dict[str, list[int]](), 0
    # The widest numbers first, so that every tensor starts at a multiple of its own width; among equals in order.
    for name in sorted(forms, key=widths.__getitem__, reverse=True):
        begin, end = end, end + math.prod(forms[name].shape) * widths[name]
        places[name] = [begin, end]
    return places, end


def _bytes_of(tensor: Tensor) -> Any:
    """A tensor's numbers as they stand in a message, as an array of bytes: a view, where it lies there so."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    if flat.stride() != (1,):  # `contiguous` leaves a single number's odd stride, and a view as bytes does not
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8).numpy()


def decode(data: bytes, limits: Limits | None = None) -> Packet:
    """Parse a message in memory; tensors are views of its bytes.

    Raises:
        Malformed: with the reason, before anything is allocated.
    """
    limits = limits or Limits()
    start = 8 + _head_length(data[:8], len(data), limits)
    found = parse(data[8:start], len(data) - start, limits)
    forms, offsets = found.table.forms, found.table.offsets

    def fetch(name: str, begin: int, end: int) -> Tensor:
        dtype = forms[name].dtype
        if begin == end:  # frombuffer refuses a length of zero
            return torch.empty(0, dtype=dtype)
        offset = start + offsets[name] + begin * dtype.itemsize
        return torch.frombuffer(data, dtype=dtype, count=end - begin, offset=offset)

    return Packet(found.header, LazyParams(forms, fetch, offsets, resident=True), len(data))


def read(path: Path, limits: Limits | None = None) -> Packet:
    """Parse a file; each tensor is read when it is asked for, and not kept.

    Raises:
        Malformed: with the reason, before anything is allocated.
        Altered: if it is not what was written, by its checksum.
    """
    limits = limits or Limits()
    try:
        size = regular(path).stat().st_size
        with path.open("rb", buffering=0) as file:  # without a buffer only the head is read: tensors wait for callers
            start = 8 + _head_length(file.read(8), size, limits)
            found = parse(file.read(start - 8), size - start, limits)
        if found.promises_seal and found.seal is None:
            raise Altered(path, "it has no checksum, and files of its format have one")
        if found.seal is not None and found.seal != _sha256_of(path, start, found.seal):
            raise Altered(path, "its checksum is not the one it was written with")
    except OSError as why:
        raise Malformed(f"cannot read {path}: {why.strerror or why}") from why
    except Altered:
        raise
    except ConfigError as why:  # a pipe or a device
        raise Malformed(str(why)) from why
    forms, offsets = found.table.forms, found.table.offsets

    def read_into(name: str, begin: int, room: Tensor) -> None:
        try:
            whole = _fill(path, start + offsets[name] + begin * room.itemsize, memoryview(_bytes_of(room)))
        except OSError as why:
            raise Malformed(f"cannot read {path}: {why.strerror or why}") from why
        if not whole:
            raise Malformed(f"{path.name} changed while it was read")

    def fetch(name: str, begin: int, end: int) -> Tensor:
        read_into(name, begin, out := use_large_pages(torch.empty(end - begin, dtype=forms[name].dtype)))
        return out

    return Packet(found.header, LazyParams(forms, fetch, offsets, fill=read_into), size, found.seal is not None)


def _fill(path: Path, place: int, room: memoryview) -> bool:
    """Fill a buffer with what a file has at a place, without one of our own between; false if it ends before."""
    file = os.open(path, os.O_RDONLY)  # and closed: a cohort may be more files than a process may hold open
    try:
        while room and (got := os.preadv(file, [room], place)):
            room, place = room[got:], place + got
    finally:
        os.close(file)
    return not room


def _sha256_of(path: Path, start: int, seal: str) -> str:
    """SHA-256 of a file with zeros in the place of its seal, which stands before `start`."""
    with path.open("rb", buffering=0) as file:
        digest = hashlib.sha256(file.read(start).replace(seal.encode(), NO_SEAL.encode(), 1))
        room = memoryview(bytearray(1 << 20))  # stays in a core's cache between the read and the hash
        while got := file.readinto(room):
            digest.update(room[:got])
    return digest.hexdigest()


class _Table(NamedTuple):
    """A message's table of contents, found good for a body of that length."""

    entries: list[tuple[str, Any]]
    body: int
    forms: Mapping[str, Form]
    offsets: Mapping[str, int]


class Parsed(NamedTuple):
    """What stands before a message's data: its table, its header, and its checksum if it has one."""

    table: _Table
    header: Mapping[str, Any]
    seal: str | None
    promises_seal: bool


def _head_length(first: bytes, size: int, limits: Limits) -> int:
    """How long the JSON before the data of a message of so many bytes is, by its first eight."""
    if size > limits.bytes:
        raise Malformed(f"{size:,} bytes are more than the {limits.bytes:,} that fit here")
    if size < 8:
        raise Malformed(f"only {size} bytes, too short for any message")
    length = int.from_bytes(first, "little")
    if length > min(limits.header, size - 8):
        raise Malformed(
            f"it claims a header of {length:,} bytes; it has {size:,} in all and {limits.header:,} are allowed"
        )
    if length % 8:  # tensors would begin between numbers, where no view of them can be made
        raise Malformed("its header is not padded to eight bytes")
    return length


def parse(text: bytes, body: int, limits: Limits) -> Parsed:
    """The JSON before a message's data, of which there are so many bytes, checked in full.

    Raises:
        Malformed: with the reason.
    """
    # Objects come as tuples of pairs (arrays are lists): nothing of ours is called for each tensor's entry, and
    # entries compare with their order.
    table = _unique(_load(text, tuple))
    meta = table.pop("__metadata__", ())
    words = _unique(meta) if isinstance(meta, tuple) else {"fedfuse": None}
    if len(table) > limits.tensors:
        raise Malformed(f"{len(table):,} tensors are more than the {limits.tensors:,} allowed")
    header = _header(words.get("fedfuse", "{}"))
    written = header.pop("format", 1)
    if type(written) is not int or not 1 <= written <= FILE_FORMAT:
        raise Malformed(f"its format is {written!r:.40}, expected 1 to {FILE_FORMAT}; a newer fedfuse may read it")
    seal = words.get(SEAL)
    return Parsed(_check_table(table, body), header, None if seal is None else str(seal), written > 1)


def _load(text: str | bytes, pairs_hook: Callable[[list[tuple[str, Any]]], Any]) -> Any:
    try:
        found = json.loads(text, object_pairs_hook=pairs_hook)
    except (ValueError, RecursionError) as why:
        raise Malformed("its header is not JSON; expected a safetensors file") from why
    if not isinstance(found, dict | tuple):
        raise Malformed("its header is not a table; expected a safetensors file")
    return found


def _unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """JSON lets the last of two equal names win; another reader might take the first and see another message."""
    found = dict(pairs := list(pairs))
    if len(found) != len(pairs):
        raise Malformed("a name stands twice in its header")
    return found


_LEVELS = 32  # that a header may nest


def _header(text: object) -> dict[str, Any]:
    if not isinstance(text, str):
        raise Malformed("its metadata are not text")
    header: dict[str, Any] = _load(text, _unique)
    if text.count("{") + text.count("[") > _LEVELS and _too_deep(header):  # fewer brackets cannot nest as far
        raise Malformed("its header is nested too deeply")
    return header


def _too_deep(value: object, levels: int = _LEVELS) -> bool:
    """Whether a header nests so far that printing or comparing it could exhaust the stack."""
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels == 0 or any(_too_deep(part, levels - 1) for part in inside)


_last: _Table | None = None  # replies of one round share their table: it is checked once, and kept once


def _check_table(table: Mapping[str, Any], body: int) -> _Table:
    """The forms and places of tensors; they must fill the data exactly: no gap, no overlap, nothing beyond."""
    global _last
    entries, known = list(table.items()), _last  # read once: another thread may be reading another message
    if known is not None and known.body == body and known.entries == entries:
        return known
    forms, places, at = dict[str, Form](), dict[str, list[int]](), 0
    for name, entry in entries:
        forms[name], places[name] = _read_entry(name, entry)
    for begin, end in sorted(places.values()):
        if begin != at:
            raise Malformed("its tensors overlap or leave gaps")
        at = end
    if at != body:
        raise Malformed(f"its tensors claim {at:,} bytes and {body:,} came")
    _last = known = _Table(entries, body, forms, {name: begin for name, (begin, _) in places.items()})
    return known


def _read_entry(name: str, entry: object) -> tuple[Form, list[int]]:
    # as many pairs as names, so that none stands twice
    if not isinstance(entry, tuple) or len(entry) != 3 or dict(entry).keys() != {"dtype", "shape", "data_offsets"}:
        raise Malformed(f"tensor {name[:80]!r} is not described by dtype, shape and offsets")
    known = dict(entry)
    kind, shape, offsets = known["dtype"], known["shape"], known["data_offsets"]
    dtype = DTYPES.get(kind) if isinstance(kind, str) else None
    if dtype is None:
        if isinstance(kind, str) and kind.startswith(("F8", "F6", "F4")):
            raise Packed(name, kind[:20])
        raise Malformed(f"tensor {name[:80]!r} has the dtype {reprlib.repr(kind)}, which is not read here")
    lists = isinstance(shape, list) and isinstance(offsets, list) and len(shape) <= 8 and len(offsets) == 2
    numbers: list[Any] = [*shape, *offsets] if lists else [None]
    # by type, for a boolean is an int to `isinstance`
    if {*map(type, numbers)} != {int} or not 0 <= min(numbers) <= max(numbers) < 2**48:
        raise Malformed(f"tensor {name[:80]!r} has an impossible shape or place")
    begin, end = offsets  # Python's integers do not overflow, so a product of huge sides is simply unequal
    if end - begin != math.prod(shape) * dtype.itemsize or begin % dtype.itemsize:
        raise Malformed(f"tensor {name[:80]!r} claims {end - begin} bytes for the shape {shape}")
    return Form(tuple(shape), dtype), offsets


def fingerprint(params: Params) -> str:
    """A short name for a set of weights, equal for equal weights.

    Example:
        >>> import torch
        >>> fingerprint({"w": torch.zeros(2)}) == fingerprint({"w": torch.zeros(2)})
        True
    """
    digest = hashlib.sha256()
    for name in sorted(params):
        digest.update(f"{name}{tuple(params[name].shape)}".encode())
        digest.update(encode({"": params[name]}, {}))
    return digest.hexdigest()[:16]

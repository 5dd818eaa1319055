"""Tensors and a small header as safetensors bytes, written plainly and read with suspicion.

The format is safetensors' own (8 bytes of length, a JSON table, the data), so any safetensors reader opens our
files; our header stands in its metadata under "fedfuse". Reading never trusts a length: the table is checked in
full, against given limits, before a single tensor exists.

A sealed file has under "fedfuse.sha256" the SHA-256 of all its bytes, with zeros for the 64 digits themselves. It is
looked at when the file is opened, in one pass; the tensors are then read from where the system keeps them.
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

_BLOCK = 1 << 20  # bytes that stay in a core's cache between the read and the hash


def fill(path: Path, place: int, room: memoryview) -> bool:
    """Fill a buffer with what a file has at a place, without one of our own between; false if it ends before.

    Raises:
        OSError: if the file cannot be read.
    """
    file = os.open(path, os.O_RDONLY)
    try:
        while room and (got := os.preadv(file, [room], place)):
            room, place = room[got:], place + got
    finally:
        os.close(file)
    return not room


def sha256_of(path: Path, start: int, instead: tuple[bytes, bytes]) -> str:
    """SHA-256 of a file, one text of which, before `start`, is read as another.

    Raises:
        OSError: if the file cannot be read.
    """
    with path.open("rb", buffering=0) as file:
        digest = hashlib.sha256(file.read(start).replace(*instead, 1))
        room = memoryview(bytearray(_BLOCK))
        while got := file.readinto(room):
            digest.update(room[:got])
    return digest.hexdigest()


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


_NAMES = {dtype: name for name, dtype in DTYPES.items()}

with warnings.catch_warnings():  # torch says once per process that such memory is read-only; we know
    warnings.simplefilter("ignore")
    torch.frombuffer(b"\0", dtype=torch.uint8)


class LazyParams(Mapping[str, Tensor]):
    """Tensors that are fetched when asked for and not kept: memory stays with whoever asks.

    `piece` fetches a run of a tensor's elements, so that a reader can walk through a tensor larger than its memory.
    `offsets` tells, where it is known, at which byte of the message each tensor begins: a piece may go on beyond its
    tensor's end into those of the same dtype that follow it. Pieces of what is `resident` are views, of any length.
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

    def __iter__(self) -> Iterator[str]:
        return iter(self.forms)

    def __len__(self) -> int:
        return len(self.forms)

    def __contains__(self, name: object) -> bool:
        return name in self.forms

    def only(self, names: Iterable[str]) -> LazyParams:
        """The tensors of these names, found without looking at any other."""
        forms = {name: self.forms[name] for name in names}
        offsets = {name: self.offsets[name] for name in forms if name in self.offsets}
        return LazyParams(forms, self._fetch, offsets, self.resident)

    def part(self, keep: Callable[[str], bool], rename: Callable[[str], str] = str) -> LazyParams:
        """The tensors whose names pass, under new names."""
        if rename is str and all(map(keep, self.forms)):
            return self  # with its tables: clients whose tables are one object are known to be laid out alike at once
        old = {rename(n): n for n in self.forms if keep(n)}
        forms = {new: self.forms[name] for new, name in old.items()}
        offsets = {new: self.offsets[name] for new, name in old.items() if name in self.offsets}
        fetch, fill = self._fetch, self._fill
        renamed = lambda new, begin, end: fetch(old[new], begin, end)
        filled = None if fill is None else lambda new, begin, room: fill(old[new], begin, room)
        both = (fetch, fill) if rename is str else (renamed, filled)
        return LazyParams(forms, both[0], offsets, self.resident, both[1])


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
    offsets, size = _places(forms)
    memory = torch.empty(size, dtype=torch.uint8)

    def fetch(name: str, begin: int, end: int) -> Tensor:
        dtype = forms[name].dtype
        at = offsets[name] + begin * dtype.itemsize
        return memory[at : at + (end - begin) * dtype.itemsize].view(dtype)

    found = LazyParams(forms, fetch, offsets, resident=True)
    for name, tensor in tensors.items():
        found[name].copy_(tensor.detach())
    return found


def encode(tensors: Params, header: Mapping[str, Any]) -> bytes:
    """Tensors and header as one message.

    Example:
        >>> packet = decode(encode({"w": torch.tensor([1.0, 2.0])}, {"num_examples": 3}))
        >>> packet.header["num_examples"], packet.tensors["w"].tolist()
        (3, [1.0, 2.0])
    """
    head, ordered = _head(tensors, header)
    return b"".join([head, *(tensor_bytes(tensors[name]) for name in ordered)])


def write(
    path: Path, tensors: Params, header: Mapping[str, Any], durable: bool = True, marks: Mapping[str, str] | None = None
) -> int:
    """Write a message to a file, one tensor at a time; the file appears whole or not at all (see `atomic`).

    `marks` are further words of its metadata, for other readers.
    """
    head, ordered = _head(tensors, header, marks)
    with write_atomically(path, durable) as file:
        file.write(head)
        for name in ordered:
            file.write(tensor_bytes(tensors[name]))
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
    head, ordered = _head(tensors, {**header, "format": FILE_FORMAT}, {SEAL: NO_SEAL, **(marks or {})})
    digest = hashlib.sha256(head)
    with write_atomically(path) as file, ThreadPoolExecutor(1) as pool:
        file.write(head)
        for name in ordered:
            data = tensor_bytes(tensors[name])
            hashed = pool.submit(digest.update, data)  # a core of its own, while this one copies to the system
            file.write(data)
            hashed.result()
        size = file.tell()
        file.seek(head.index(NO_SEAL.encode()))
        file.write(digest.hexdigest().encode())
    return size


def decode(data: bytes, limits: Limits | None = None) -> Packet:
    """Parse a message in memory; tensors are views of its bytes.

    Raises:
        Malformed: with the reason, before anything is allocated.
    """
    limits = limits or Limits()
    check_size(len(data), limits)
    contents, header, start, *_ = parse(lambda begin, length: data[begin : begin + length], len(data), limits)
    forms, offsets = contents.forms, contents.offsets

    def fetch(name: str, begin: int, end: int) -> Tensor:
        dtype = forms[name].dtype
        if begin == end:  # frombuffer refuses a length of zero
            return torch.empty(0, dtype=dtype)
        offset = start + offsets[name] + begin * dtype.itemsize
        return torch.frombuffer(data, dtype=dtype, count=end - begin, offset=offset)

    return Packet(header, LazyParams(forms, fetch, offsets, resident=True), len(data))


def read(path: Path, limits: Limits | None = None) -> Packet:
    """Parse a file; each tensor is read when it is asked for, and not kept.

    Raises:
        Malformed: with the reason, before anything is allocated.
        Altered: if it is not what was written, by its checksum.
    """
    limits = limits or Limits()
    try:
        size = regular(path).stat().st_size
        check_size(size, limits)
        with path.open("rb") as file:
            # pread moves no file position, and only the header is read: a tensor waits until somebody asks
            found = parse(lambda begin, length: os.pread(file.fileno(), length, begin), size, limits)
        contents, header, start, seal, promised = found
        if promised and seal is None:
            raise Altered(path, "it has no checksum, and files of its format have one")
        if seal is not None and seal != sha256_of(path, start, (str(seal).encode(), NO_SEAL.encode())):
            raise Altered(path, "its checksum is not the one it was written with")
    except OSError as why:
        raise Malformed(f"cannot read {path}: {why.strerror or why}") from why
    except Altered:
        raise
    except ConfigError as why:  # a pipe or a device
        raise Malformed(str(why)) from why

    forms, offsets = contents.forms, contents.offsets

    def read_into(name: str, begin: int, room: Tensor) -> None:
        try:
            whole = fill(path, start + offsets[name] + begin * room.itemsize, memoryview(_bytes_of(room)))
        except OSError as why:
            raise Malformed(f"cannot read {path}: {why.strerror or why}") from why
        if not whole:
            raise Malformed(f"{path.name} changed while it was read")

    def fetch(name: str, begin: int, end: int) -> Tensor:
        read_into(name, begin, out := use_large_pages(torch.empty(end - begin, dtype=forms[name].dtype)))
        return out

    return Packet(header, LazyParams(forms, fetch, offsets, fill=read_into), size, sealed=seal is not None)


def piece_of(params: Params, name: str, begin: int, end: int) -> Tensor:
    """Elements [begin, end) of a tensor laid flat, wherever it lives."""
    return params.piece(name, begin, end) if isinstance(params, LazyParams) else params[name].reshape(-1)[begin:end]


def piece_in(room: Tensor, params: Params, name: str, begin: int, end: int) -> Tensor:
    """The same, in a room if it is read from a file, and fits."""
    return (
        params.piece_in(room, name, begin, end)
        if isinstance(params, LazyParams)
        else piece_of(params, name, begin, end)
    )


def as_lazy(params: Params) -> LazyParams:
    """The tensors as if they waited on disk."""
    if isinstance(params, LazyParams):
        return params
    return LazyParams(forms_of(params), lambda name, begin, end: piece_of(params, name, begin, end))


def forms_of(params: Params) -> Mapping[str, Form]:
    """The form of every tensor, without fetching any that waits on disk."""
    return params.forms if isinstance(params, LazyParams) else {n: Form.of(t) for n, t in params.items()}


def forms_size(forms: Mapping[str, Form]) -> int:
    """Bytes of data these tensors take."""
    return sum(math.prod(f.shape) * f.dtype.itemsize for f in forms.values())


def encoded_size(tensors: Params, header: Mapping[str, Any]) -> int:
    """How long the message would be, without writing it.

    Example:
        >>> encoded_size({"w": torch.ones(9)}, {}) == len(encode({"w": torch.ones(9)}, {}))
        True
    """
    return len(_head(tensors, header)[0]) + forms_size(forms_of(tensors))


def _head(
    tensors: Params, header: Mapping[str, Any], marks: Mapping[str, str] | None = None
) -> tuple[bytes, list[str]]:
    forms = forms_of(tensors)
    if wrong := [n for n, f in forms.items() if f.dtype not in _NAMES]:
        raise ConfigError(
            f"tensor {wrong[0]!r} is {forms[wrong[0]].dtype}, which safetensors files do not carry here; bring it to "
            "floats of 16 bits or more, or to 64-bit whole numbers"
        )
    begins, _ = _places(forms)
    own = {"fedfuse": json.dumps(header, sort_keys=True, allow_nan=False)}
    table: dict[str, Any] = {"__metadata__": {**(marks or {}), **own}}
    for name, form in forms.items():
        size = math.prod(form.shape) * form.dtype.itemsize
        offsets = [begins[name], begins[name] + size]
        table[name] = {"dtype": _NAMES[form.dtype], "shape": list(form.shape), "data_offsets": offsets}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the data begin at a multiple of eight and can be read in place
    return len(text).to_bytes(8, "little") + text, list(begins)


def _places(forms: Mapping[str, Form]) -> tuple[dict[str, int], int]:
    """Where each tensor begins behind a message's head, in the order in which they lie, and where the last one ends."""
    begins, at = dict[str, int](), 0
    # the widest numbers first, so that every tensor begins at a multiple of its own width
    for name in sorted(forms, key=lambda n: -forms[n].dtype.itemsize):
        begins[name] = at
        at += math.prod(forms[name].shape) * forms[name].dtype.itemsize
    return begins, at


def tensor_bytes(tensor: Tensor) -> memoryview:
    """A tensor's numbers as they stand in a message."""
    return memoryview(_bytes_of(tensor.detach().cpu().contiguous()))


def _bytes_of(tensor: Tensor) -> Any:
    flat = tensor.reshape(-1)
    if flat.stride() != (1,):  # `contiguous` leaves a single number's odd stride, and a view as bytes does not
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8).numpy()


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

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
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedfuse.core.files import regular, write_atomically
from fedfuse.core.large_pages import use_large_pages
from fedfuse.core.messages import Form
from fedfuse.core.params import Params
from fedfuse.errors import ConfigError
from fedfuse.wire.reading import fill, sha256_of
from fedfuse.wire.table import DTYPES as DTYPES
from fedfuse.wire.table import FILE_FORMAT, NO_SEAL, SEAL, Altered, check_size, parse
from fedfuse.wire.table import Limits as Limits
from fedfuse.wire.table import Malformed as Malformed

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
        fedfuse.wire.table.Altered: ...w is damaged or altered: its checksum is not the one it was written with; ...
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
    # The widest numbers first, so that every tensor starts at a multiple of its own width.
    ordered = sorted(forms, key=lambda n: -forms[n].dtype.itemsize)
    begins, at = {}, 0
    for name in ordered:
        begins[name] = at
        at += math.prod(forms[name].shape) * forms[name].dtype.itemsize
    own = {"fedfuse": json.dumps(header, sort_keys=True, allow_nan=False)}
    table: dict[str, Any] = {"__metadata__": {**(marks or {}), **own}}
    for name, form in forms.items():
        size = math.prod(form.shape) * form.dtype.itemsize
        offsets = [begins[name], begins[name] + size]
        table[name] = {"dtype": _NAMES[form.dtype], "shape": list(form.shape), "data_offsets": offsets}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the data begin at a multiple of eight and can be read in place
    return len(text).to_bytes(8, "little") + text, ordered


def tensor_bytes(tensor: Tensor) -> memoryview:
    """A tensor's numbers as they stand in a message."""
    return memoryview(_bytes_of(tensor.detach().cpu().contiguous()))


def _bytes_of(tensor: Tensor) -> Any:
    flat = tensor.reshape(-1)
    if flat.stride() != (1,):  # `contiguous` leaves a single number's odd stride, and a view as bytes does not
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8).numpy()

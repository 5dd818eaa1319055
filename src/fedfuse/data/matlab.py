"""MATLAB level 5 files, as far as plain arrays of numbers go: a reader in which damage is always one sentence.

A file is a header of 128 bytes and then elements, each a tag (type and size) and its data, padded to eight bytes. An
array is an element of four others: flags, dimensions, name and numbers; it may lie zipped in a further element. Sizes
are compared with each other and with a limit before anything of that size is made.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fedfuse.data.rows import Array

_HEADER = 128
_MATRIX, _ZIPPED = 14, 15
_UINT32, _INT32, _INT8 = 6, 5, 1
_STORED = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
_CLASSES = {6: "f8", 7: "f4", 8: "i1", 9: "u1", 10: "i2", 11: "u2", 12: "i4", 13: "u4", 14: "i8", 15: "u8"}
_COMPLEX = 0x08
_MOST_DIMENSIONS = 32
_HEAD_BYTES = 1024  # enough for flags, dimensions and the name of any array we look for


class NotMatlab(ValueError):
    """The bytes are no MATLAB 5 file, or say something that cannot be."""


def read_arrays(data: bytes, names: Collection[str], limit: int = 2**31) -> dict[str, Array]:
    """The arrays of some names; all others are passed by, zipped ones without being unzipped.

    Args:
        data: the file.
        names: of the arrays wanted.
        limit: the largest array in bytes.

    Raises:
        NotMatlab: saying what does not fit.

    Example:
        >>> import io
        >>> from scipy.io import savemat
        >>> savemat(stream := io.BytesIO(), {"y": np.array([[1], [2]], dtype=np.uint8)})
        >>> read_arrays(stream.getvalue(), ["y"])["y"].tolist()
        [[1], [2]]
    """
    order = _byte_order(data)
    found: dict[str, Array] = {}
    for element in _elements(data, _HEADER, order):
        if element.type not in (_MATRIX, _ZIPPED):
            raise NotMatlab(f"an element of type {element.type} stands where an array should begin")
        body = data[element.begin : element.end]
        entry = _zipped_entry(body, order, limit) if element.type == _ZIPPED else _Entry(body, order, element.size)
        head = entry.head()
        if head.name in names:
            if head.name in found:
                raise NotMatlab(f"there are two arrays {head.name!r}")
            found[head.name] = _numbers(entry, head, limit)
    return found


class _Element(NamedTuple):
    type: int
    begin: int
    size: int

    @property
    def end(self) -> int:
        return self.begin + self.size


class _Head(NamedTuple):
    """What stands before an array's numbers: its class, shape and name, and where the next element begins."""

    kind: str
    shape: tuple[int, ...]
    name: str
    end: int


@dataclass(slots=True)
class _Entry:
    """The inside of an array's element: as much of it as was read, its byte order and its whole size."""

    body: bytes
    order: str
    size: int
    rest: zlib._Decompress | None = None

    def head(self) -> _Head:
        """Flags, dimensions and name."""
        flags = self._next(0, _UINT32, "flags")
        if flags.size != 8:
            raise NotMatlab(f"an array's flags have {flags.size} bytes, expected 8")
        (word,) = struct.unpack_from(f"{self.order}I", self.body, flags.begin)
        if word >> 8 & _COMPLEX:
            raise NotMatlab("an array has complex numbers, expected real ones")
        sizes = self._next(_next_place(flags), _INT32, "dimensions")
        count = sizes.size // 4
        if sizes.size % 4 or not 2 <= count <= _MOST_DIMENSIONS:
            raise NotMatlab(f"an array has {sizes.size} bytes of dimensions, expected at least two numbers")
        shape = struct.unpack_from(f"{self.order}{count}i", self.body, sizes.begin)
        name = self._next(_next_place(sizes), _INT8, "name")
        text = self.body[name.begin : name.end].decode("latin-1")
        return _Head(_CLASSES.get(word & 0xFF, ""), shape, text, _next_place(name))

    def unzip_to(self, end: int) -> None:
        """Read on until there are so many bytes, or none are left."""
        while self.rest is not None and len(self.body) < end:
            piece = _unzip(self.rest, self.rest.unconsumed_tail, end - len(self.body))
            if not piece:
                break
            self.body += piece

    def check_end(self, end: int) -> None:
        """Read what is left of a zipped array, which ends in its checksum."""
        self.unzip_to(end + 1)
        if len(self.body) > end or (self.rest is not None and not self.rest.eof):
            raise NotMatlab("a zipped array is longer than it says, or its checksum is missing")

    def element(self, at: int) -> _Element:
        """The element whose tag is at a place."""
        return _tag(self.body, at, self.order, self.size)

    def _next(self, at: int, kind: int, what: str) -> _Element:
        element = self.element(at)
        if element.type != kind or element.end > len(self.body):
            raise NotMatlab(f"an array's {what} are not where they should be")
        return element


def _byte_order(data: bytes) -> str:
    mark = data[126:128]
    if len(data) < _HEADER or mark not in (b"IM", b"MI"):
        raise NotMatlab("it does not begin as one does")
    return "<" if mark == b"IM" else ">"


def _elements(data: bytes, at: int, order: str) -> Iterator[_Element]:
    """The elements one after the other; those that are zipped are not padded."""
    while at < len(data):
        element = _tag(data, at, order, len(data))
        yield element
        at = element.end if element.type == _ZIPPED else _next_place(element)


def _tag(data: bytes, at: int, order: str, size: int) -> _Element:
    """The tag at a place; up to four bytes of data may stand in the tag itself."""
    if at + 8 > len(data):
        raise NotMatlab("it ends within an element's tag")
    first, second = struct.unpack_from(f"{order}2I", data, at)
    if first >> 16:
        element = _Element(first & 0xFFFF, at + 4, first >> 16)
        if element.size > 4:
            raise NotMatlab(f"a short element has {element.size} bytes, expected at most 4")
        return element
    element = _Element(first, at + 8, second)
    if element.end > size:
        raise NotMatlab(f"an element of {element.size} bytes does not fit into it")
    return element


def _next_place(element: _Element) -> int:
    return element.end + -element.end % 8


def _zipped_entry(data: bytes, order: str, limit: int) -> _Entry:
    """The beginning of a zipped array; the rest is unzipped when it is asked for."""
    rest = zlib.decompressobj()
    start = _unzip(rest, data, _HEAD_BYTES)
    if len(start) < 8:
        raise NotMatlab("a zipped element is too short for an array")
    kind, size = struct.unpack_from(f"{order}2I", start)
    if kind != _MATRIX:
        raise NotMatlab(f"a zipped element has type {kind}, expected an array")
    if size > limit + _HEAD_BYTES:
        raise NotMatlab(f"an array promises {size:,} bytes, expected at most {limit:,}")
    return _Entry(start[8:], order, size, rest)


def _unzip(rest: zlib._Decompress, data: bytes, most: int) -> bytes:
    try:
        return rest.decompress(data, most)
    except zlib.error as why:
        raise NotMatlab(f"a zipped element cannot be unzipped: {why}") from why


def _numbers(entry: _Entry, head: _Head, limit: int) -> Array:
    """The numbers of an array, which lie column by column."""
    entry.unzip_to(head.end + 8)
    element = entry.element(head.end)
    if element.type not in _STORED or not head.kind:
        raise NotMatlab(f"{head.name} holds something else than plain numbers")
    stored, count = np.dtype(entry.order + _STORED[element.type]), math.prod(head.shape)
    if min(head.shape) < 0 or count * stored.itemsize != element.size or element.size > limit:
        raise NotMatlab(f"{head.name} has {element.size} bytes, its shape {head.shape} needs {count * stored.itemsize}")
    entry.unzip_to(element.end)
    if len(entry.body) < element.end:
        raise NotMatlab(f"{head.name} ends after {len(entry.body) - element.begin} bytes of {element.size}")
    entry.check_end(_next_place(element))
    flat = np.frombuffer(entry.body, stored, count, element.begin)
    return flat.astype(head.kind, copy=False).reshape(head.shape, order="F")

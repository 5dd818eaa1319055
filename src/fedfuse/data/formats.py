"""The official file formats, each as a function from bytes to arrays; nothing here runs what it reads.

Every reader checks magic numbers and lengths, so a cut or foreign file is named before it is used. First IDX, CIFAR and
SVHN, then arrays in `.npz` files or in memory, last the reader of MATLAB 5 that SVHN needs.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedfuse.core.rows import is_channels_last
from fedfuse.data.rows import Array, ArraySplit
from fedfuse.data.stores import damaged_error
from fedfuse.errors import ConfigError
from fedfuse.tasks import CLASSIFICATION, Binary, Classification, Task

NPZ_KEYS = ("x_train", "y_train", "x_test", "y_test")
WHOLE_KEYS = ("x", "y")
_MOST_CLASSES = 1 << 20


def parse_idx(data: bytes, where: object) -> Array:
    """An array in the IDX format of MNIST: magic 0x0000 08 ndim, big-endian sizes, then bytes.

    Example:
        >>> parse_idx(bytes([0, 0, 8, 1, 0, 0, 0, 2, 7, 9]), "labels")
        array([7, 9], dtype=uint8)
    """
    if len(data) < 4 or data[:3] != b"\0\0\x08" or not 1 <= data[3] <= 4:
        raise damaged_error(where, f"it starts with {data[:4].hex() or 'nothing'}, an IDX file of bytes with 000008")
    head = 4 + 4 * data[3]
    if len(data) < head:
        raise damaged_error(where, f"its header ends after {len(data)} bytes, expected {head}")
    shape = struct.unpack(f">{data[3]}I", data[4:head])
    expected = head + int(np.prod(shape, dtype=np.int64))
    if len(data) != expected:
        raise damaged_error(where, f"it has {len(data)} bytes, its header promises {expected}")
    return np.frombuffer(data, np.uint8, offset=head).reshape(shape)


def parse_idx_pair(images: bytes, labels: bytes, where: object) -> ArraySplit:
    """Images (n, height, width) and labels (n,) of one half of an MNIST-like set."""
    x, y = parse_idx(images, f"the image file in {where}"), parse_idx(labels, f"the label file in {where}")
    if x.ndim != 3 or y.ndim != 1 or len(x) != len(y):
        raise damaged_error(
            where, f"images have shape {x.shape} and labels {y.shape}, expected (n, height, width) and (n,)"
        )
    return ArraySplit(x[:, None], y)


def parse_cifar(data: bytes, label_bytes: int, label_at: int, where: object) -> ArraySplit:
    """Records of a CIFAR binary file: label bytes, then 3072 bytes red, green, blue, row by row.

    Args:
        data: the file.
        label_bytes: 1 for CIFAR-10; 2 (coarse, fine) for CIFAR-100.
        label_at: which of them is the label.
        where: what to call the file in an error.

    Example:
        >>> parse_cifar(bytes([3]) + bytes(3072), 1, 0, "batch").y
        array([3], dtype=uint8)
    """
    record = label_bytes + 3 * 32 * 32
    if not data or len(data) % record:
        raise damaged_error(where, f"it has {len(data)} bytes, expected a multiple of {record}")
    table = np.frombuffer(data, np.uint8).reshape(-1, record)
    return ArraySplit(table[:, label_bytes:].reshape(-1, 3, 32, 32), table[:, label_at])


def parse_svhn(data: bytes, where: object) -> ArraySplit:
    """SVHN's cropped digits: X (32, 32, 3, n) and y (n, 1) in a MATLAB 5 file, where label 10 is digit 0."""
    try:
        content = read_arrays(data, ("X", "y"))
        x, y = content["X"], content["y"].reshape(-1)
    except (NotMatlab, KeyError) as error:
        raise damaged_error(where, f"it is no MATLAB 5 file with X and y ({error})") from error
    if x.dtype != np.uint8 or x.shape != (32, 32, 3, len(y)) or not np.isin(y, range(1, 11)).all():
        raise damaged_error(where, f"X is {x.dtype} of shape {x.shape}, y of shape {y.shape}, expected (32, 32, 3, n)")
    return ArraySplit(np.ascontiguousarray(x.transpose(3, 2, 0, 1)), y % 10)


def read_npz(path: Path) -> dict[str, Array]:
    """The arrays of an `.npz` file; arrays of objects, which would be pickles, are refused."""
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as archive:  # noqa: TID251
            return {key: archive[key] for key in archive.files if key in (*NPZ_KEYS, *WHOLE_KEYS, "classes")}
    except MemoryError as error:
        raise ConfigError(f"{path} promises arrays that do not fit into memory; check that they are meant") from error
    except Exception as error:  # a scrambled header surfaces as almost anything inside numpy, tokenize's errors too
        if "pickle" in str(error).lower():
            raise ConfigError(
                f"{path} holds Python objects (or is no .npz file), expected plain arrays; save them again "
                "with numpy.savez and numeric types"
            ) from error
        raise damaged_error(path, error) from error


def named_classes(arrays: Mapping[str, Array], where: object) -> tuple[str, ...] | None:
    """The names of classes that an `.npz` brings, or None where it brings none.

    Example:
        >>> named_classes({"classes": np.array(["cat", "dog"])}, "pets.npz")
        ('cat', 'dog')
    """
    if "classes" not in arrays:
        return None
    names = arrays["classes"]
    if names.ndim != 1 or names.dtype.kind not in "Uui":
        raise ConfigError(
            f"{where}: classes is {names.dtype} of shape {names.shape}, expected one name for each class; "
            "save it with classes=numpy.array(['cat', 'dog'])"
        )
    return tuple(map(str, names))


def splits_from_arrays(
    arrays: Mapping[str, object], where: object, task: Task = CLASSIFICATION
) -> tuple[ArraySplit, ArraySplit]:
    """Training and test rows from arrays named x_train, y_train, x_test, y_test."""
    if missing := [key for key in NPZ_KEYS if key not in arrays]:
        raise ConfigError(f"{where} holds no {' and no '.join(missing)}, expected {', '.join(NPZ_KEYS)}; add it")
    train, test = (split_from_arrays(arrays, f"x_{half}", f"y_{half}", where, task) for half in ("train", "test"))
    return train, test


def split_from_arrays(
    arrays: Mapping[str, object], inputs: str, labels: str, where: object, task: Task = CLASSIFICATION
) -> ArraySplit:
    """Rows from an array of inputs and one of targets; all labels are 0 where there are none."""
    if inputs not in arrays:
        raise ConfigError(f"{where} holds no {inputs}, expected {inputs} and {labels}; add it")
    x = _as_images(arrays[inputs], where)
    y = _as_targets(arrays[labels], where, task) if labels in arrays else np.zeros(len(x), dtype=np.int64)
    if len(x) != len(y):
        raise ConfigError(
            f"{where}: {inputs} has {len(x)} rows and {labels} {len(y)}, expected as many"
            " labels as rows; drop the extra ones"
        )
    return ArraySplit(x, y)


def _as_images(value: object, where: object) -> Array:
    """Rows as (n, features) or (n, channels, height, width); the channel axis may be missing or last."""
    x = _in_native_order(np.asarray(value))
    if x.dtype.kind not in "uif" or x.dtype.itemsize > 8 or x.ndim not in (2, 3, 4):
        raise ConfigError(
            f"{where}: x is {x.dtype} of shape {x.shape}, expected numbers of at most 64 bits and of shape "
            "(n, features), (n, height, width), (n, channels, height, width) or (n, height, width, channels)"
        )
    if x.dtype.kind == "f" and not np.isfinite(x).all():
        raise ConfigError(f"{where}: x holds values that are not finite, expected numbers; clean them")
    if x.ndim == 3:
        return x[:, None]
    if x.ndim == 4 and ((x.shape[3] in (1, 3) and x.shape[1] not in (1, 3)) or is_channels_last(x.shape[1:])):
        return x.transpose(0, 3, 1, 2)
    return x


def _in_native_order(x: Array) -> Array:
    """The same numbers with their bytes in this machine's order, the only one that torch reads."""
    return x if x.dtype.isnative else x.astype(x.dtype.newbyteorder("="))


def _as_targets(value: object, where: object, task: Task) -> Array:
    """Labels for classes, numbers for the other tasks."""
    y = np.asarray(value)
    if isinstance(task, Classification | Binary):
        return _as_labels(y, where)
    if y.dtype.kind not in "uifb" or y.ndim not in (1, 2):
        raise ConfigError(f"{where}: y is {y.dtype} of shape {y.shape}, expected numbers for the task {task.name}")
    return y.astype(np.float32)


def _as_labels(y: Array, where: object) -> Array:
    if y.dtype.kind not in "ui" or y.ndim != 1 or (y.size and y.min() < 0):
        raise ConfigError(
            f"{where}: y is {y.dtype} of shape {y.shape}, expected one whole number from 0 on for each row; "
            "number the classes 0, 1, 2, ..., or say task = 'regression'"
        )
    if y.size and y.max() >= _MOST_CLASSES:
        raise ConfigError(f"{where}: a label is {y.max()}, which would make so many classes; number them 0, 1, 2, ...")
    return y.astype(np.int64, copy=False)  # or a sum of labels further on would overflow eight bits


def empty_classes(y: Array) -> list[int]:
    """The first classes of those that labels count up to which no row has.

    Example:
        >>> empty_classes(np.array([1, 2, 5])), empty_classes(np.array([0, 1]))
        ([0, 3, 4], [])
    """
    return list(map(int, np.flatnonzero(np.bincount(y) == 0)[:20]))


def empty_classes_text(empty: Sequence[int], classes: int) -> str:
    """What was assumed of labels that leave out classes, as the beginning of a sentence.

    Example:
        >>> empty_classes_text([0], 11)
        'no row has the label 0 and the largest label is 10, which makes 11 classes'
    """
    some = f"{', '.join(map(str, empty[:5]))}{', …' if len(empty) > 5 else ''}"
    return f"no row has the label {some} and the largest label is {classes - 1}, which makes {classes} classes"


# MATLAB 5, of which SVHN needs plain arrays of numbers. A file may be forged: what an element promises is compared with
# what there is, and with the limit, before anything is unzipped, and arrays that were not asked for stay zipped.
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


def _byte_order(data: bytes) -> str:
    mark = data[126:128]
    if len(data) < _HEADER or mark not in (b"IM", b"MI"):
        raise NotMatlab("it does not begin as one does")
    return "<" if mark == b"IM" else ">"


class _Element(NamedTuple):
    type: int
    begin: int
    size: int

    @property
    def end(self) -> int:
        return self.begin + self.size


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
        """Read on until `body` has `end` bytes, or none are left."""
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

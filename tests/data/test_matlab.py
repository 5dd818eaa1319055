"""Our own reader of MATLAB 5 files: what scipy writes is read, and no damage does more than a sentence."""

from __future__ import annotations

import io
import random

import numpy as np
import pytest
from scipy.io import savemat

from fedfuse.data.formats import NotMatlab, parse_svhn, read_arrays
from fedfuse.errors import ConfigError


def written(compress: bool, **arrays: object) -> bytes:
    stream = io.BytesIO()
    savemat(stream, arrays, do_compression=compress)
    return stream.getvalue()


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("kind", ["u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f4", "f8"])
def test_what_scipy_writes_is_read(kind, compress):
    array = np.random.default_rng(0).integers(0, 100, (3, 2, 4)).astype(kind)
    found = read_arrays(written(compress, X=array, other="text", deep={"a": 1}, y=array[:, 0]), ("X", "y"))
    assert found["X"].dtype == array.dtype
    assert np.array_equal(found["X"], array)
    assert np.array_equal(found["y"], array[:, 0])
    assert list(found) == ["X", "y"]


def test_the_other_byte_order_is_read():
    """As MATLAB writes on a machine that puts the most significant byte first: one array, spelt out by hand."""
    numbers = np.array([[1, 3], [2, 4]], dtype=">f8")
    words = lambda *values: b"".join(v.to_bytes(4, "big") for v in values)
    inside = words(6, 8, 6, 0) + words(5, 8, 2, 2) + words(1, 1) + b"y".ljust(8, b"\0") + words(9, 32)
    inside += numbers.tobytes(order="F")
    data = bytes(124) + b"\x01\x00MI" + words(14, len(inside)) + inside
    assert read_arrays(data, "y")["y"].tolist() == [[1.0, 3.0], [2.0, 4.0]]


def svhn(compress: bool) -> bytes:
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3, 2), dtype=np.uint8)
    return written(compress, X=pixels, y=np.array([[10], [3]], dtype=np.uint8))


@pytest.mark.parametrize("compress", [False, True])
def test_whatever_one_byte_says_the_answer_is_rows_or_one_sentence(compress):
    """A scrambled file made scipy's parser crash the process: 20 of 880 changes of a single byte."""
    whole, chance, refused = svhn(compress), random.Random(0), set()
    places = [*range(300), *range(len(whole) - 100, len(whole)), *(chance.randrange(len(whole)) for _ in range(300))]
    for place in places:
        data = bytearray(whole)
        data[place] ^= 1 << chance.randrange(8) if place % 2 else 0xFF
        try:
            assert len(parse_svhn(bytes(data), "train.mat")) == 2
        except ConfigError as why:
            refused.add(str(why).partition(": ")[0])
    assert refused == {"train.mat is damaged"}


@pytest.mark.parametrize("compress", [False, True])
def test_a_cut_file_is_refused_wherever_it_was_cut(compress):
    whole = svhn(compress)
    for end in [*range(0, 400, 7), *range(400, len(whole), 97)]:
        with pytest.raises(ConfigError, match=r"train\.mat is damaged"):
            parse_svhn(whole[:end], "train.mat")


def test_sizes_are_compared_before_anything_is_unzipped():
    bomb = written(True, X=np.zeros((1000, 1000, 10), dtype=np.uint8))
    assert len(bomb) < 20_000
    with pytest.raises(NotMatlab, match="promises 10,000,0.. bytes, expected at most 1,000,000"):
        read_arrays(bomb, ("X",), limit=10**6)


def test_the_checksum_of_a_zipped_array_is_looked_at():
    data = bytearray(written(True, X=np.arange(12, dtype=np.uint8).reshape(3, 4)))
    data[-1] ^= 1
    with pytest.raises(NotMatlab, match="cannot be unzipped"):
        read_arrays(bytes(data), ("X",))


def test_what_is_no_plain_array_is_said():
    with pytest.raises(NotMatlab, match="complex"):
        read_arrays(written(False, X=np.array([[1j]])), ("X",))
    with pytest.raises(NotMatlab, match="something else than plain numbers"):
        read_arrays(written(False, X="text"), ("X",))

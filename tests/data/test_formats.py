from __future__ import annotations

import io
import pickle  # noqa: TID251 (a hostile file is made here)
import random
import zipfile

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from scipy.io import savemat

from fedfuse.data import formats
from fedfuse.data.formats import NotMatlab, parse_svhn, read_arrays
from fedfuse.data.site import read_site
from fedfuse.data.sources import load
from fedfuse.errors import ConfigError


@given(st.data())
def test_idx_reads_what_was_written(data):
    shape = data.draw(array_shapes(min_dims=1, max_dims=3, max_side=6))
    array = data.draw(arrays(np.uint8, shape))
    head = bytes([0, 0, 8, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in shape)
    assert np.array_equal(formats.parse_idx(head + array.tobytes(), "x"), array)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "starts with nothing"),
        (b"\x1f\x8b\x08\x00", "starts with 1f8b0800"),
        (b"\0\0\x0d\x01\0\0\0\0", "starts with 00000d01"),
        (b"\0\0\x08\x03\0\0", "header ends after 6 bytes, expected 16"),
        (b"\0\0\x08\x01\0\0\0\x05abc", "11 bytes, its header promises 13"),
        (b"\0\0\x08\x01\0\0\0\x02abc", "11 bytes, its header promises 10"),
        (b"\0\0\x08\x04" + b"\xff" * 16, "its header promises"),
    ],
)
def test_broken_idx_files_say_why(data, reason):
    with pytest.raises(ConfigError, match=f"labels is damaged: .*{reason}"):
        formats.parse_idx(data, "labels")


def test_idx_images_and_labels_must_fit(tiny):
    images, labels = tiny.idx_bytes(np.zeros((3, 2, 2))), tiny.idx_bytes(np.zeros(4))
    with pytest.raises(ConfigError, match=r"images have shape \(3, 2, 2\) and labels \(4,\)"):
        formats.parse_idx_pair(images, labels, "MNIST")


def test_cifar_records_are_label_then_red_green_blue(tiny):
    record = bytes([7]) + bytes([10]) * 1024 + bytes([20]) * 1024 + bytes([30]) * 1023 + b"\x1f"
    split = formats.parse_cifar(record * 2, 1, 0, "batch")
    assert split.y.tolist() == [7, 7]
    assert split.x.shape == (2, 3, 32, 32)
    assert [split.x[0, c, 0, 0] for c in range(3)] == [10, 20, 30]
    assert split.x[1, 2, 31, 31] == 31


def test_cifar100_has_a_coarse_and_a_fine_label(tiny):
    record = bytes([4, 77]) + bytes(3072)
    assert formats.parse_cifar(record, 2, 0, "x").y.tolist() == [4]
    assert formats.parse_cifar(record, 2, 1, "x").y.tolist() == [77]


@pytest.mark.parametrize("size", [0, 3072, 3074])
def test_cut_cifar_files_are_refused(size):
    with pytest.raises(ConfigError, match=f"batch is damaged: it has {size} bytes, expected a multiple of 3073"):
        formats.parse_cifar(bytes(size), 1, 0, "batch")


def test_svhn_ten_is_zero_and_axes_are_turned():
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3, 4), dtype=np.uint8)
    stream = io.BytesIO()
    savemat(stream, {"X": pixels, "y": np.array([[10], [1], [9], [10]], dtype=np.uint8)})
    split = formats.parse_svhn(stream.getvalue(), "train")
    assert split.y.tolist() == [0, 1, 9, 0]
    assert split.x[2, 1, 5, 6] == pixels[5, 6, 1, 2]


def test_broken_svhn_files_are_refused(tiny):
    whole = tiny.svhn_bytes(5)
    wrong = io.BytesIO()
    savemat(wrong, {"X": np.zeros((32, 32, 3, 2), dtype=np.uint8), "y": np.array([[1], [11]])})
    for data in (b"", b"text", whole[: len(whole) // 2], wrong.getvalue()):
        with pytest.raises(ConfigError, match=r"train\.mat is damaged"):
            formats.parse_svhn(data, "train.mat")


def test_rows_become_floats_in_zero_to_one():
    split = formats.ArraySplit(np.array([[0, 255], [51, 102]], dtype=np.uint8), np.array([0, 1], dtype=np.uint8))
    rows = split.take(np.array([1])).rows()
    assert torch.allclose(rows.x, torch.tensor([[0.2, 0.4]]))
    assert rows.y.dtype == torch.int64


def arrays_of(**changes: object) -> dict[str, object]:
    base = {"x_train": np.zeros((4, 3)), "y_train": np.arange(4), "x_test": np.zeros((2, 3)), "y_test": np.arange(2)}
    return base | changes


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((4, 5), (5,)),
        ((4, 8, 9), (1, 8, 9)),
        ((4, 3, 8, 9), (3, 8, 9)),
        ((4, 8, 9, 3), (3, 8, 9)),
        ((4, 8, 9, 1), (1, 8, 9)),
        ((4, 1, 8, 3), (1, 8, 3)),
        ((4, 6, 8, 9), (6, 8, 9)),
    ],
)
def test_arrays_find_their_channel_axis(shape, expected):
    x = np.arange(np.prod(shape), dtype=np.float64).reshape(shape)
    train, _ = formats.splits_from_arrays(arrays_of(x_train=x), "mine")
    assert train.x.shape[1:] == expected
    assert train.x.sum() == x.sum()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"x_train": np.array([["a"] * 3] * 4)}, "x is <U1"),
        ({"x_train": np.zeros(4)}, r"x is float64 of shape \(4,\)"),
        ({"x_train": np.full((4, 3), np.nan)}, "not finite"),
        ({"x_train": np.zeros((4, 3), dtype=np.longdouble)}, "expected numbers of at most 64 bits"),
        ({"y_train": np.zeros(4)}, "y is float64"),
        ({"y_train": np.array([-1, 0, 0, 0])}, "whole number from 0"),
        ({"y_train": np.zeros((4, 1), dtype=int)}, "y is int64 of shape"),
        ({"y_train": np.array([0, 1, 2, 10**12])}, "a label is 1000000000000"),
        ({"y_train": np.arange(3)}, "x_train has 4 rows and y_train 3"),
    ],
)
def test_arrays_that_cannot_be_rows_are_refused(changes, reason):
    with pytest.raises(ConfigError, match=f"mine: .*{reason}"):
        formats.splits_from_arrays(arrays_of(**changes), "mine")


def test_missing_arrays_are_named():
    arrays = arrays_of()
    del arrays["x_test"], arrays["y_test"]
    with pytest.raises(ConfigError, match="mine holds no x_test and no y_test"):
        formats.splits_from_arrays(arrays, "mine")
    with pytest.raises(ConfigError, match="mine holds no x, expected x and y"):  # renamed by a flipped bit
        formats.split_from_arrays({"y": arrays["y_train"]}, "x", "y", "mine")


def test_an_npz_with_pickles_is_refused_and_nothing_runs(tmp_path):
    marker = tmp_path / "ran"

    class Bomb:
        def __reduce__(self):
            return (marker.touch, ())

    np.savez(tmp_path / "bad.npz", **arrays_of(x_train=np.array([Bomb()], dtype=object)))
    with pytest.raises(ConfigError, match=r"bad\.npz holds Python objects"):
        formats.read_npz(tmp_path / "bad.npz")
    (tmp_path / "pickle.npz").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(ConfigError, match=r"pickle\.npz"):
        formats.read_npz(tmp_path / "pickle.npz")
    assert not marker.exists()


def test_a_cut_npz_is_damaged(tmp_path):
    np.savez_compressed(tmp_path / "x.npz", **arrays_of())
    whole = (tmp_path / "x.npz").read_bytes()
    for broken in (whole[:200], whole[:-30], b"", b"PK\x03\x04"):
        (tmp_path / "x.npz").write_bytes(broken)
        with pytest.raises(ConfigError, match=r"x\.npz"):
            formats.read_npz(tmp_path / "x.npz")


@pytest.mark.parametrize("kind", [">f4", ">f8", ">i4", ">u2", "u8", "f2", "i1"])
def test_numbers_of_any_width_and_byte_order_become_rows(kind):
    x = np.arange(12).reshape(4, 3).astype(kind)
    train, _ = formats.splits_from_arrays(arrays_of(x_train=x), "mine")
    assert train.rows().x.double().numpy() == pytest.approx(x.astype(np.float64))


@pytest.mark.parametrize("classes", [np.array("cat"), np.array([["cat", "dog"]]), np.array([0.5, 1.5]), np.array(3)])
def test_names_of_classes_are_a_list(classes, tmp_path):
    """An array without axes was walked through, which ended in a traceback."""
    np.savez(tmp_path / "x.npz", **arrays_of(), classes=classes)
    for read in (lambda: load(str(tmp_path / "x.npz")), lambda: read_site(str(tmp_path / "x.npz"))):
        with pytest.raises(ConfigError, match="x.npz: classes is .*, expected one name for each class"):
            read()


def test_an_array_larger_than_memory_is_one_sentence(tmp_path):
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive, archive.open("x.npy", "w") as member:
        np.lib.format.write_array_header_1_0(member, {"descr": "<f8", "fortran_order": False, "shape": (10**15,)})
    with pytest.raises(ConfigError, match=r"x\.npz (promises arrays that do not fit into memory|is damaged)"):
        formats.read_npz(tmp_path / "x.npz")


# --- Our own reader of MATLAB 5 files: what scipy writes is read, and no damage does more than a sentence ----------


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

"""Our files are safetensors files, what goes in comes out, and nothing that lies is believed."""

from __future__ import annotations

import errno
import json
import math
import os
import stat
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedfuse.core.files import write_atomically
from fedfuse.core.messages import Form
from fedfuse.errors import ConfigError
from fedfuse.wire import codec
from fedfuse.wire.codec import (
    DTYPES,
    LazyParams,
    Limits,
    Malformed,
    decode,
    encode,
    encoded_size,
    forms_of,
    forms_size,
    piece_of,
    read,
    write,
)


def same(a: Tensor, b: Tensor) -> bool:
    """Equal to the last bit, NaN included."""
    bits = (t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(*bits)


def forge(table: object, body: bytes = b"", length: int | None = None) -> bytes:
    """A message with any table, honest or not."""
    text = table if isinstance(table, bytes) else json.dumps(table).encode()
    text += b" " * (-len(text) % 8)
    return (len(text) if length is None else length).to_bytes(8, "little") + text + body


def entry(shape: list[Any], offsets: list[Any], dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Any tensor: every dtype, scalars, empty ones, transposed ones, any bit pattern."""
    dtype = draw(st.sampled_from(list(DTYPES.values())))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    fill = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    raw = torch.randint(0, 256, (math.prod(shape) * dtype.itemsize,), generator=fill, dtype=torch.uint8)
    if dtype == torch.bool:
        raw %= 2
    whole = raw.view(dtype).view(shape)
    return whole.transpose(0, -1) if len(shape) > 1 and draw(st.booleans()) else whole


names = st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(lambda n: n != "__metadata__")
headers = st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=5) | st.booleans(), max_size=3)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.dictionaries(names, tensors(), max_size=5), headers)
def test_what_is_written_is_what_is_read(params: dict[str, Tensor], header: dict[str, Any]) -> None:
    data = encode(params, header)
    packet = decode(data)
    assert len(data) == encoded_size(params, header) == packet.size
    assert dict(packet.header) == header
    assert list(packet.tensors) == list(params)
    assert all(same(packet.tensors[n], params[n]) for n in params)
    theirs = safetensors.torch.load(data)
    assert theirs.keys() == params.keys()
    assert all(same(theirs[n], params[n]) for n in params)


def test_files_are_read_like_bytes(tmp_path: Path) -> None:
    params = {n: torch.arange(6).to(d) for n, d in DTYPES.items()} | {"scalar": torch.tensor(2.5)}
    size = write(tmp_path / "deep" / "er" / "a.safetensors", params, {"num_examples": 3})
    path = tmp_path / "deep" / "er" / "a.safetensors"
    assert path.read_bytes() == encode(params, {"num_examples": 3})
    packet = read(path)
    assert (packet.size, packet.header["num_examples"]) == (size, 3)
    assert all(same(packet.tensors[n], params[n]) for n in params)
    again = tmp_path / "b.safetensors"
    write(again, packet.tensors, packet.header)  # from file to file, one tensor at a time
    assert again.read_bytes() == path.read_bytes()


def test_safetensors_opens_our_files_and_we_open_theirs(tmp_path: Path) -> None:
    params = {"w": torch.randn(3, 2), "b": torch.randn(3).bfloat16(), "n": torch.tensor(7), "e": torch.empty(0, 3)}
    write(tmp_path / "ours.safetensors", params, {"x": 1})
    theirs = safetensors.torch.load_file(tmp_path / "ours.safetensors")
    assert all(same(theirs[n], params[n]) for n in params)
    safetensors.torch.save_file(params, tmp_path / "theirs.safetensors", metadata={"format": "pt"})
    packet = read(tmp_path / "theirs.safetensors")
    assert dict(packet.header) == {}
    assert all(same(packet.tensors[n], params[n]) for n in params)


def test_tied_and_strided_tensors_are_written_by_value() -> None:
    base = torch.randn(4, 4, requires_grad=True)
    params = {"tied": base, "again": base, "row": base[1], "column": base[:, 2], "mirror": base.detach().flip(0).T}
    packet = decode(encode(params, {}))
    assert all(same(packet.tensors[n], params[n].detach()) for n in params)


def test_a_dtype_safetensors_lacks_is_refused_when_written() -> None:
    with pytest.raises(ConfigError, match=r"'z' is torch\.complex64"):
        encode({"z": torch.zeros(1, dtype=torch.complex64)}, {})


def test_pieces_are_runs_of_elements_and_may_cross_into_the_next_tensor(tmp_path: Path) -> None:
    params = {"a": torch.arange(6.0).view(2, 3), "n": torch.arange(3), "b": torch.arange(6.0, 10.0)}
    write(tmp_path / "x", params, {})
    for lazy in (decode(encode(params, {})).tensors, read(tmp_path / "x").tensors):
        assert lazy.piece("a", 2, 5).tolist() == [2.0, 3.0, 4.0]
        assert lazy.piece("a", 4, 8).tolist() == [4.0, 5.0, 6.0, 7.0]
        assert lazy.piece("b", 1, 1).numel() == 0
        assert piece_of(lazy, "b", 1, 3).equal(piece_of(params, "b", 1, 3))
        assert forms_of(lazy) == forms_of(params)
        assert lazy.offsets["b"] - lazy.offsets["a"] == 24
    assert forms_size(forms_of(params)) == 40 + 24


def test_runs_join_what_lies_together_and_are_read_in_pieces() -> None:
    params = {
        "a": torch.arange(6.0).view(2, 3),
        "n": torch.arange(3),
        "b": torch.arange(6.0, 10.0),
        "c": torch.ones(2).half(),
    }
    lazy = decode(encode(params, {})).tensors
    assert lazy.runs() == [("n",), ("a", "b"), ("c",)]
    assert [p.tolist() for p in lazy.pieces(("a", "b"), 4)] == [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0], [8.0, 9.0]]
    assert lazy.part(lambda n: n != "a").runs() == [("n",), ("b",), ("c",)]
    made = LazyParams(forms_of(params), lambda name, begin, end: params[name].reshape(-1)[begin:end])
    assert made.runs() == [("a",), ("n",), ("b",), ("c",)], "without places nothing is known to lie together"


def test_messages_of_one_layout_share_their_table_and_nothing_else() -> None:
    first, second = ({"a": torch.rand(3), "b": torch.rand(2, 2)} for _ in range(2))
    one, two = (decode(encode(p, {"num_examples": m})) for m, p in enumerate((first, second)))
    assert one.tensors.forms is two.tensors.forms
    assert [one.header["num_examples"], two.header["num_examples"]] == [0, 1]
    assert all(one.tensors[n].equal(first[n]) and two.tensors[n].equal(second[n]) for n in first)
    turned = decode(encode({"b": first["b"], "a": first["a"]}, {})).tensors
    assert list(turned) == ["b", "a"]
    assert turned["a"].equal(first["a"])
    with pytest.raises(Malformed, match="claim"):
        decode(encode(first, {})[:-4])


def test_a_part_keeps_places_and_renames() -> None:
    lazy = decode(encode({"a": torch.ones(2), "~b": torch.zeros(3), "~c": torch.ones(1)}, {})).tensors
    notes = lazy.part(lambda n: n.startswith("~"), lambda n: n.removeprefix("~"))
    assert list(notes) == ["b", "c"]
    assert notes["b"].equal(torch.zeros(3))
    assert notes.offsets == {"b": lazy.offsets["~b"], "c": lazy.offsets["~c"]}
    assert "~b" not in notes
    assert len(notes) == 2
    made = LazyParams({"x": Form((2,), torch.float32)}, lambda name, begin, end: torch.ones(end - begin))
    assert made["x"].tolist() == [1.0, 1.0]
    assert made.part(lambda n: True).offsets == {}


HUGE = 400 * 10**9
LIES: dict[str, bytes] = {
    "empty": b"",
    "seven bytes": b"\0" * 7,
    "header longer than the message": forge({}, length=1000),
    "header of exabytes": b"\xff" * 8,
    "header beyond the limit": forge({"__metadata__": {"x": "y" * 70_000}}),
    "unpadded header": (3).to_bytes(8, "little") + b"{ }",
    "no JSON": forge(b"not JSON"),
    "half a table": forge(b'{"a": {"dtype": "F32"'),
    "a list": forge([]),
    "a number": forge(b"3"),
    "null": forge(b"null"),
    "bad UTF-8": forge(b'{"\xff": 1}'),
    "a name twice": forge(b'{"a":{"dtype":"F32","shape":[],"data_offsets":[0,4]},"a":3}', b"\0" * 4),
    "an entry's word twice": forge(
        b'{"a":{"dtype":"F32","shape":[],"data_offsets":[0,4],"data_offsets":[0,4]}}', b"\0" * 4
    ),
    "an entry's word twice for another": forge(b'{"a":{"dtype":"F32","shape":[],"shape":[]}}', b"\0" * 4),
    "two headers": forge(b'{"__metadata__":{"fedfuse":"{}","fedfuse":"{}"}}'),
    "metadata twice": forge(b'{"__metadata__":{},"__metadata__":{}}'),
    "nested lists": forge(b"[" * 30_000 + b"]" * 30_000),
    "a nested dtype": forge(
        b'{"a":{"dtype":' + b"[" * 900 + b"]" * 900 + b',"shape":[],"data_offsets":[0,4]}}', b"0000"
    ),
    "an endless number": forge(b'{"a":{"dtype":"F32","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,4]}}'),
    "entry is a list": forge({"a": [1]}),
    "entry without a shape": forge({"a": {"dtype": "F32", "data_offsets": [0, 4]}}, b"0000"),
    "entry with more": forge({"a": entry([], [0, 4]) | {"x": 1}}, b"0000"),
    "unknown dtype": forge({"a": entry([], [0, 4], "F128")}, b"0000"),
    "dtype is a number": forge({"a": entry([], [0, 4], 32)}, b"0000"),
    "shape is text": forge({"a": {"dtype": "F32", "shape": "1", "data_offsets": [0, 4]}}, b"0000"),
    "negative shape": forge({"a": entry([-1, -1], [0, 4])}, b"0000"),
    "boolean shape": forge({"a": entry([True], [0, 4])}, b"0000"),
    "fractional shape": forge({"a": entry([1.0], [0, 4])}, b"0000"),
    "nine axes": forge({"a": entry([1] * 9, [0, 4])}, b"0000"),
    "three offsets": forge({"a": entry([], [0, 4, 8])}, b"0000"),
    "offsets swapped": forge({"a": entry([], [4, 0])}, b"0000"),
    "400 GB in the shape": forge({"a": entry([HUGE // 4], [0, 4])}, b"0000"),
    "400 GB in shape and place": forge({"a": entry([HUGE // 4], [0, HUGE])}, b"0000"),
    "a shape whose size wraps around": forge({"a": entry([2**32, 2**32], [0, 0])}, b""),
    "beyond the end": forge({"a": entry([2], [0, 8])}, b"0000"),
    "too few claimed": forge({"a": entry([1], [0, 4])}, b"00000000"),
    "a gap": forge({"a": entry([], [0, 4]), "b": entry([], [8, 12])}, b"0" * 12),
    "a gap at the start": forge({"a": entry([], [4, 8])}, b"0" * 8),
    "an overlap": forge({"a": entry([2], [0, 8]), "b": entry([2], [4, 12])}, b"0" * 12),
    "the same place twice": forge({"a": entry([1], [0, 4]), "b": entry([1], [0, 4])}, b"0000"),
    "off its grid": forge({"n": entry([2], [0, 2], "U8"), "a": entry([1], [2, 6])}, b"0" * 6),
    "metadata is a list": forge({"__metadata__": []}),
    "header is no text": forge({"__metadata__": {"fedfuse": 3}}),
    "header is no JSON": forge({"__metadata__": {"fedfuse": "{"}}),
    "header is a list": forge({"__metadata__": {"fedfuse": "[]"}}),
    "header has a key twice": forge({"__metadata__": {"fedfuse": '{"num_examples": 1, "num_examples": 2}'}}),
    "header holds half a letter": forge({"__metadata__": {"fedfuse": "\ud800"}}),
    "header is a pit": forge({"__metadata__": {"fedfuse": '{"a":' * 900 + "1" + "}" * 900}}),
    "pickle": b"\x80\x04\x95\x1a\0\0\0\0\0\0\0\x8c\x05posix\x94\x8c\x06system\x94\x93\x94\x8c\x02ls\x94\x85\x94R\x94.",
    "zip": b"PK\x03\x04" + b"\0" * 60,
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_called_one_before_any_tensor_exists(
    lie: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("a tensor was made before the table was believed")

    path = tmp_path / "lie"
    path.write_bytes(LIES[lie])
    for maker in ("empty", "frombuffer", "zeros", "tensor"):
        monkeypatch.setattr(codec.torch, maker, never)
    limits = Limits(header=65_536)
    for parse in (lambda: decode(LIES[lie], limits), lambda: read(path, limits)):
        with pytest.raises(Malformed) as why:
            parse()
        assert len(str(why.value)) < 400
        assert "\n" not in str(why.value)


def test_limits_come_before_parsing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    many = forge({f"t{i}": entry([], [4 * i, 4 * i + 4]) for i in range(50)}, b"0" * 200)
    with pytest.raises(Malformed, match="50 tensors are more than the 49 allowed"):
        decode(many, Limits(tensors=49))
    assert len(decode(many, Limits(tensors=50)).tensors) == 50
    monkeypatch.setattr(codec, "parse", lambda *_: pytest.fail("it was read although it is too long"))
    with pytest.raises(Malformed, match="more than the 100 that fit here"):
        decode(many, Limits(bytes=100))
    (tmp_path / "sparse").touch()
    os.truncate(tmp_path / "sparse", 2**42)  # a file of 4 TB that takes no room
    with pytest.raises(Malformed, match="that fit here"):
        read(tmp_path / "sparse")


def test_a_file_that_changes_or_disappears_is_called_out(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write(path, {"w": torch.ones(1000)}, {})
    lazy = read(path).tensors
    os.truncate(path, path.stat().st_size - 4)
    with pytest.raises(Malformed, match="changed while it was read"):
        lazy["w"]
    path.unlink()
    with pytest.raises(Malformed, match="cannot read"):
        lazy["w"]
    with pytest.raises(Malformed, match="cannot read"):
        read(path)
    with pytest.raises(Malformed, match="cannot read"):
        read(tmp_path)


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model"
    write(path, {"w": torch.ones(3)}, {})
    before = path.read_bytes()
    short = LazyParams({"w": Form((9,), torch.float32)}, lambda name, begin, end: full())  # type: ignore[arg-type,return-value]
    with pytest.raises(ConfigError, match="No space left on device; free some space"):
        write(path, short, {})
    monkeypatch.setattr(codec.os, "fsync", full)
    with pytest.raises(ConfigError, match="No space left"):
        write(path, {"w": torch.zeros(3)}, {})
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_an_interrupted_writer_leaves_nothing(tmp_path: Path) -> None:
    def interrupted() -> None:
        with write_atomically(tmp_path / "x") as file:
            file.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match="choose a folder that can be written"):
        write(tmp_path / "file" / "x", {}, {})

    def denied(self: Path, *_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "open", denied)
    with pytest.raises(ConfigError, match="Permission denied; choose a folder"):
        write(tmp_path / "x", {}, {})
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_files_are_as_readable_as_the_user_wants_new_files_to_be(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    write(tmp_path / "ours", {}, {})
    assert stat.S_IMODE((tmp_path / "ours").stat().st_mode) == stat.S_IMODE((tmp_path / "plain").stat().st_mode)


def test_a_single_number_of_an_odd_stride_is_written() -> None:
    odd = torch.arange(9.0).as_strided((1,), (9,), 3)
    assert decode(encode({"bias": odd}, {})).tensors["bias"].tolist() == [3.0]

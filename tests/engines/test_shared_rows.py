from __future__ import annotations

import errno
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fedfuse.core.rows import Rows
from fedfuse.engines import worker as shared_rows_module
from fedfuse.engines.worker import MappedRows, RowBuffer, RowFiles
from fedfuse.errors import ConfigError


def rows(n: int = 4) -> Rows:
    return Rows(torch.rand(n, 1, 3, 3).transpose(2, 3), torch.arange(n))


@pytest.fixture(params=["nameless", "named"])
def row_files(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[RowFiles]:
    if request.param == "named":  # a system that cannot open a file without a name
        monkeypatch.setattr(shared_rows_module, "_DESCRIPTORS", tmp_path / "none")
    row_files = RowFiles()
    yield row_files
    row_files.clear()


def exists(mapped: MappedRows) -> bool:
    return Path(mapped.x).exists() and Path(mapped.y).exists()


def test_rows_come_back_as_they_were_whatever_their_strides(row_files: RowFiles) -> None:
    mine = rows()
    back = row_files.add(mine).rows()
    assert torch.equal(back.x, mine.x)
    assert torch.equal(back.y, mine.y)
    assert back.x.is_contiguous()


def test_rows_are_written_once(row_files: RowFiles) -> None:
    mine = rows()
    assert row_files.add(mine) == row_files.add(Rows(mine.x, mine.y))


def test_only_the_last_used_stay(row_files: RowFiles) -> None:
    a, b, c = rows(), rows(), rows()
    first, second = row_files.add(a), row_files.add(b)
    row_files.add(a)
    held = second.rows()
    third = row_files.add(c)
    assert exists(first)
    assert exists(third)
    assert len(row_files._entries) == 2
    assert torch.equal(held.x, b.x)  # whoever has mapped them keeps them
    assert torch.equal(row_files.add(b).rows().x, b.x)


def test_nothing_stays(row_files: RowFiles) -> None:
    mapped = row_files.add(rows())
    assert exists(mapped)
    row_files.clear()
    assert not exists(mapped)
    with pytest.raises(ConfigError, match="rows .*workers=0"):
        mapped.rows()


def test_nobody_has_no_rows(row_files: RowFiles) -> None:
    back = row_files.add(Rows(torch.empty(0, 3), torch.empty(0, dtype=torch.int64))).rows()
    assert back.x.shape == (0, 3)
    assert len(back) == 0


def test_rows_go_to_disk_when_memory_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    room = {Path("/dev/shm"): 10, Path(tempfile.gettempdir()): 10**9}
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=room[path]))
    assert shared_rows_module._folder_with_room(1000) == Path(tempfile.gettempdir())
    assert shared_rows_module._folder_with_room(4) == Path("/dev/shm")
    assert shared_rows_module._folder_with_room(10**10) == Path(tempfile.gettempdir())


def test_a_full_disk_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    with pytest.raises(ConfigError, match="144 bytes .*No space left on device"):
        RowFiles().add(rows())


def test_large_rows_that_are_moved_are_in_memory_once() -> None:
    x, row_files = torch.randn(6_000, 784, generator=torch.Generator().manual_seed(0)), RowFiles()
    before, numbers, view = x.data_ptr(), x.clone(), x[:3]
    large = Rows(x, torch.arange(6_000))
    row_files.move(large)
    mapped = row_files.add(large).rows()
    assert x.data_ptr() != before
    assert all(got.equal(numbers) for got in (x, mapped.x))
    assert view.equal(numbers[:3])
    row_files.clear()
    assert x.equal(numbers), "the file is gone, its memory is not"


def test_small_rows_and_rows_that_only_are_shared_stay_where_they_are() -> None:
    small, large, row_files = torch.zeros(5, 784), torch.zeros(6_000, 784), RowFiles()
    before = small.data_ptr(), large.data_ptr()
    row_files.move(Rows(small, torch.zeros(5)))
    row_files.add(Rows(large, torch.zeros(6_000)))
    row_files.clear()
    assert (small.data_ptr(), large.data_ptr()) == before


def test_a_buffer_takes_what_rows_take_in_the_same_memory() -> None:
    buffer, mine = RowBuffer(), rows(8)
    whole = Rows(mine.x.contiguous(), mine.y)
    index = torch.tensor([5, 1, 6])
    first = buffer.take(whole, index)
    assert torch.equal(first.x, whole.x[index])
    assert torch.equal(first.y, whole.y[index])
    fewer = buffer.take(whole, torch.tensor([7, 2]))
    assert torch.equal(fewer.x, whole.x[[7, 2]])
    assert fewer.x.data_ptr() == first.x.data_ptr()
    buffer.clear()
    more = buffer.take(whole, torch.arange(8))
    assert torch.equal(more.x, whole.x)
    assert buffer.take(Rows(mine.x.double(), mine.y), index).x.dtype == torch.float64
    assert buffer.take(Rows(torch.rand(8, 5), mine.y), torch.tensor([], dtype=torch.int64)).x.shape == (0, 5)

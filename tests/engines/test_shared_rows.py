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
from fedfuse.engines import shared_rows as shelf_module
from fedfuse.engines.shared_rows import Placed, Shelf
from fedfuse.errors import ConfigError


def rows(n: int = 4) -> Rows:
    return Rows(torch.rand(n, 1, 3, 3).transpose(2, 3), torch.arange(n))


@pytest.fixture(params=["nameless", "named"])
def shelf(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Shelf]:
    if request.param == "named":  # a system that cannot open a file without a name
        monkeypatch.setattr(shelf_module, "_DESCRIPTORS", tmp_path / "none")
    shelf = Shelf()
    yield shelf
    shelf.clear()


def exists(placed: Placed) -> bool:
    return Path(placed.x).exists() and Path(placed.y).exists()


def test_rows_come_back_as_they_were_whatever_their_strides(shelf: Shelf) -> None:
    mine = rows()
    back = shelf.put(mine).rows()
    assert torch.equal(back.x, mine.x)
    assert torch.equal(back.y, mine.y)
    assert back.x.is_contiguous()


def test_rows_are_written_once(shelf: Shelf) -> None:
    mine = rows()
    assert shelf.put(mine) == shelf.put(Rows(mine.x, mine.y))


def test_only_the_last_used_stay(shelf: Shelf) -> None:
    a, b, c = rows(), rows(), rows()
    first, second = shelf.put(a), shelf.put(b)
    shelf.put(a)
    held = second.rows()
    third = shelf.put(c)
    assert exists(first)
    assert exists(third)
    assert len(shelf._entries) == 2
    assert torch.equal(held.x, b.x)  # whoever has mapped them keeps them
    assert torch.equal(shelf.put(b).rows().x, b.x)


def test_nothing_stays(shelf: Shelf) -> None:
    placed = shelf.put(rows())
    assert exists(placed)
    shelf.clear()
    assert not exists(placed)
    with pytest.raises(ConfigError, match=r"cannot find the rows .*workers=0"):
        placed.rows()


def test_nobody_has_no_rows(shelf: Shelf) -> None:
    back = shelf.put(Rows(torch.empty(0, 3), torch.empty(0, dtype=torch.int64))).rows()
    assert back.x.shape == (0, 3)
    assert len(back) == 0


def test_rows_go_to_disk_when_memory_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    room = {Path("/dev/shm"): 10, Path(tempfile.gettempdir()): 10**9}
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=room[path]))
    assert shelf_module._roomy(1000) == Path(tempfile.gettempdir())
    assert shelf_module._roomy(4) == Path("/dev/shm")
    assert shelf_module._roomy(10**10) == Path(tempfile.gettempdir())


def test_a_full_disk_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    with pytest.raises(ConfigError, match=r"144 bytes of rows .*No space left on device; free some space"):
        Shelf().put(rows())

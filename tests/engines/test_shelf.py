from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fedfuse.core.rows import Rows
from fedfuse.engines import shelf as shelf_module
from fedfuse.engines.shelf import Shelf
from fedfuse.errors import ConfigError


def rows(n: int = 4) -> Rows:
    return Rows(torch.rand(n, 1, 3, 3).transpose(2, 3), torch.arange(n))


@pytest.fixture
def shelf() -> Iterator[Shelf]:
    shelf = Shelf()
    yield shelf
    shelf.clear()
    assert not any(home.exists() for home in shelf.homes)


def test_rows_come_back_as_they_were_whatever_their_strides(shelf: Shelf) -> None:
    mine = rows()
    back = shelf.put(mine).rows()
    assert torch.equal(back.x, mine.x)
    assert torch.equal(back.y, mine.y)
    assert back.x.is_contiguous()


def test_rows_are_written_once(shelf: Shelf) -> None:
    mine = rows()
    assert shelf.put(mine) == shelf.put(Rows(mine.x, mine.y))
    assert len(files(shelf)) == 2


def test_only_the_last_used_stay(shelf: Shelf) -> None:
    a, b, c = rows(), rows(), rows()
    first, second = shelf.put(a), shelf.put(b)
    shelf.put(a)
    held = second.rows()
    third = shelf.put(c)
    assert files(shelf) == {first.x, first.y, third.x, third.y}
    assert torch.equal(held.x, b.x)  # whoever has mapped them keeps them
    assert torch.equal(shelf.put(b).rows().x, b.x)


def test_nobody_has_no_rows(shelf: Shelf) -> None:
    back = shelf.put(Rows(torch.empty(0, 3), torch.empty(0, dtype=torch.int64))).rows()
    assert back.x.shape == (0, 3)
    assert len(back) == 0


def test_rows_go_to_disk_when_memory_is_full(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    room = {shelf.homes[0].parent: 10, shelf.homes[-1].parent: 10**9}
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=room[path]))
    assert shelf.put(rows()).x.parent == shelf.homes[-1]


def test_a_full_disk_is_one_sentence_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    shelf = Shelf()

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shelf_module.Path, "mkdir", full)
    with pytest.raises(ConfigError, match=r"144 bytes of rows .*No space left on device; free some space"):
        shelf.put(rows())
    assert not any(home.exists() for home in shelf.homes)


def files(shelf: Shelf) -> set[Path]:
    return {path for home in shelf.homes if home.exists() for path in home.iterdir()}

"""Rows in files that worker processes map, so that no row is ever sent."""

from __future__ import annotations

import math
import secrets
import shutil
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fedfuse.core.rows import Rows
from fedfuse.errors import ConfigError


class Placed(NamedTuple):
    """Rows that lie in two files; any process may map them."""

    x: Path
    y: Path
    shape: tuple[int, ...]
    dtypes: tuple[torch.dtype, torch.dtype]

    def rows(self) -> Rows:
        """The rows as views of the files; nobody may write to them."""
        x, y = self.dtypes
        return Rows(_mapped(self.x, self.shape, x), _mapped(self.y, self.shape[:1], y))


def _mapped(path: Path, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    if not math.prod(shape):  # nothing cannot be mapped
        return torch.empty(shape, dtype=dtype)
    return torch.from_file(str(path), shared=True, size=math.prod(shape), dtype=dtype).view(shape)


class Shelf:
    """Where rows lie: in memory if it has room, else on disk; each written once, only the last used kept.

    Attributes:
        homes: the folders that may come to exist; whoever owns the shelf removes them.

    Example:
        >>> shelf = Shelf()
        >>> shelf.put(Rows(torch.ones(2, 3), torch.tensor([0, 1]))).rows().y.tolist()
        [0, 1]
        >>> shelf.clear()
    """

    def __init__(self, keep: int = 2) -> None:
        name = f"fedfuse-{secrets.token_hex(8)}"
        roots = (Path("/dev/shm"), Path(tempfile.gettempdir()))
        self.homes = tuple(root / name for root in roots if root.is_dir())
        self._keep = keep
        self._placed: dict[int, tuple[Rows, Placed]] = {}

    def put(self, rows: Rows) -> Placed:
        """The files of these rows, written unless they are there."""
        key = id(rows.x)  # an entry holds on to its rows, so no others can have their id
        entry = self._placed.pop(key, None)
        while entry is None and len(self._placed) >= self._keep:
            _, oldest = self._placed.pop(next(iter(self._placed)))
            for path in (oldest.x, oldest.y):
                path.unlink(missing_ok=True)
        self._placed[key] = entry or (rows, self._write(rows))
        return self._placed[key][1]

    def clear(self) -> None:
        """Remove everything."""
        self._placed.clear()
        remove(self.homes)

    def _write(self, rows: Rows) -> Placed:
        home, name = self._home(rows.x.nbytes + rows.y.nbytes), secrets.token_hex(8)
        placed = Placed(home / f"{name}.x", home / f"{name}.y", tuple(rows.x.shape), (rows.x.dtype, rows.y.dtype))
        try:
            home.mkdir(mode=0o700, exist_ok=True)
            for path, tensor in ((placed.x, rows.x), (placed.y, rows.y)):
                tensor.detach().cpu().contiguous().numpy().tofile(path)
        except OSError as why:
            remove([home])
            raise ConfigError(
                f"cannot write {rows.x.nbytes:,} bytes of rows to {home}: {why.strerror or why}; "
                "free some space, point TMPDIR elsewhere or use workers=0"
            ) from why
        return placed

    def _home(self, size: int) -> Path:
        """The first folder with room to spare."""
        roomy = [home for home in self.homes if shutil.disk_usage(home.parent).free > size + size // 4]
        return (roomy or self.homes[-1:])[0]


def remove(homes: tuple[Path, ...] | list[Path]) -> None:
    """Remove folders and what is in them, those that exist."""
    for home in homes:
        shutil.rmtree(home, ignore_errors=True)

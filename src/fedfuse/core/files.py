"""Files that appear whole or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from fedfuse.errors import ConfigError


@contextlib.contextmanager
def write_atomically(path: Path, durable: bool = True) -> Iterator[BinaryIO]:
    """A file that appears under its name only when complete, whatever kills us.

    A durable one is on disk by then; without it, a power cut may leave it torn, which its reader must be able to see.
    """
    half = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = half.open("xb")
    except OSError as why:
        raise ConfigError(f"cannot write {path}: {why.strerror or why}; choose a folder that can be written") from why
    try:
        with file:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
        half.replace(path)
    except BaseException as why:
        with contextlib.suppress(OSError):
            half.unlink()
        if isinstance(why, OSError):
            raise ConfigError(
                f"cannot write {path}: {why.strerror or why}; free some space or choose another folder"
            ) from why
        raise

"""Files that appear whole or not at all, take the place of nothing that is needed, and end when they are read."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from fedfuse.errors import ConfigError

STREAM = Path("-")
"""Standard output, where a command can write to it."""

_KINDS = {stat.S_IFIFO: "a pipe", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device", stat.S_IFSOCK: "a socket"}


def regular(path: Path) -> Path:
    """The path of what is to be read, if that is a regular file or a folder: a pipe or a device may never end.

    Example:
        >>> regular(Path("/dev/null"))
        Traceback (most recent call last):
        ...
        fedfuse.errors.ConfigError: /dev/null is a device, expected a regular file; write its contents to one first

    Raises:
        ConfigError: naming what it is.
        OSError: if there is nothing.
    """
    if kind := _KINDS.get(stat.S_IFMT(path.stat().st_mode)):
        raise ConfigError(f"{path} is {kind}, expected a regular file; write its contents to one first")
    return path


def check_output(output: Path, inputs: Iterable[Path] = (), streams: bool = False) -> None:
    """Refuse, before any work is done, an output that would take the place of an input, a folder, a pipe or a device.

    Args:
        output: the file to be written.
        inputs: files that are read for it; by whatever links, none may be the output.
        streams: whether `-` may stand for standard output.

    Raises:
        ConfigError: naming both.
    """
    if output == STREAM:
        if streams:
            return
        raise ConfigError("- is standard output, to which this cannot be written; name a file")
    found = _mode(output)
    if found is not None and not stat.S_ISREG(found):
        kind = _KINDS.get(stat.S_IFMT(found), "a folder")
        raise ConfigError(f"cannot write {output}: it is {kind}, expected a file's name; choose another")
    for path in inputs:
        if os.path.realpath(output) == os.path.realpath(path) or (found and _mode(path) and output.samefile(path)):
            raise ConfigError(f"{output} is to be written and is an input too ({path}); write to another file")


def _mode(path: Path) -> int | None:
    """What stands under a name, behind all links; None if nothing does."""
    try:
        return path.stat().st_mode
    except OSError:
        return None


def write_output(path: Path, data: bytes) -> Path:
    """Write a whole text at once, to a file or, for `-`, to standard output."""
    if path == STREAM:
        sys.stdout.write(data.decode())
        return path
    with write_atomically(path) as file:
        file.write(data)
    return path


@contextlib.contextmanager
def write_atomically(path: Path, durable: bool = True) -> Iterator[BinaryIO]:
    """A file that appears under its name only when complete, whatever kills us; it takes the place of files alone.

    A durable one is on disk by then; without it, a power cut may leave it torn, which its reader must be able to see.
    """
    check_output(path)
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

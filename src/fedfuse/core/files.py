"""Files and folders: written whole or not at all, locked by one process, lines that carry their checksum."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import stat
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import platformdirs

from fedfuse.errors import ConfigError


def cache_folder() -> Path:
    """Where downloads and compiled code go: the user's cache, on Linux `$XDG_CACHE_HOME` or `~/.cache`."""
    return platformdirs.user_cache_path("fedfuse")


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
            if durable:  # before the new name: else a power cut may keep the name and lose the bytes
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


@contextmanager
def hold_folder(folder: Path, wait: bool = True) -> Iterator[None]:
    """Hold a folder that is there against every other process that asks; however the holder ends, it is free again.

    The folder itself is locked, so that nothing is left in it.

    Args:
        folder: what to hold.
        wait: until another lets go of it; otherwise that is an error.

    Example:
        >>> with hold_folder(Path()):
        ...     pass
    """
    try:
        import fcntl
    except ImportError:  # Windows has no such lock: there two runs can write one folder
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield
    except BlockingIOError:
        raise ConfigError(
            f"{folder} is being written by another run; wait until that ends, or choose another --out"
        ) from None
    finally:
        os.close(handle)


_SEAL = re.compile(r',"check":"([0-9a-f]{8})"\}\s*$')


def seal_line(line: Mapping[str, Any]) -> str:
    """A line of JSON with its checksum as the last entry, without an end of line.

    Example:
        >>> seal_line({"round": 1})
        '{"round":1,"check":"0180a319"}'
    """
    body = json.dumps(line, separators=(",", ":"))
    return f'{body[:-1]},"check":"{_checksum(body)}"}}' if line else body


def open_line(text: str) -> Any:
    """What a line says, without its checksum; a line that has none is taken as it is.

    Raises:
        ValueError: if it is not JSON, or not what was written.

    Example:
        >>> open_line(seal_line({"round": 1})), open_line('{"round":1}')
        ({'round': 1}, {'round': 1})
        >>> open_line(seal_line({"round": 1}).replace("1,", "3,"))
        Traceback (most recent call last):
        ...
        ValueError: another checksum than was written
    """
    seal = _SEAL.search(text)
    if seal is None:
        return json.loads(text)
    body = text[: seal.start()] + "}"
    if _checksum(body) != seal[1]:
        raise ValueError("another checksum than was written")
    return json.loads(body)


def _checksum(body: str) -> str:
    return f"{zlib.crc32(body.encode(errors='replace')):08x}"

"""Where files lie: a folder, a zip or a tar, read by name and never unpacked; and the bar that shows slow reading.

Reading an archive in place leaves no half-unpacked folder behind and lets no member name reach the disk.
"""

from __future__ import annotations

import io
import sys
import tarfile
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from fedfuse.core.files import regular
from fedfuse.errors import ConfigError

ARCHIVE_ERRORS = (OSError, EOFError, zlib.error, zipfile.BadZipFile, tarfile.TarError, RuntimeError, ValueError)
"""What the standard library raises on an archive that is cut short, scrambled or locked."""

MOST_BYTES = 2**30
"""The most bytes that a file or an archive may unzip to, unless its reader sets another limit."""


class Store(Protocol):
    """Files by relative name."""

    @property
    def location(self) -> Path:
        """The folder or the archive."""
        ...

    def has(self, name: str) -> bool:
        """Whether there is a file or folder of this name."""
        ...

    def read(self, name: str, limit: int = MOST_BYTES) -> bytes:
        """The content of a file; one that would unzip to more than the limit is damaged."""
        ...

    def listing(self, folder: str) -> list[str]:
        """The names directly inside a folder, sorted."""
        ...


def damaged_error(location: object, reason: object) -> ConfigError:
    """The error for a file that is there but cannot be what it should be."""
    return ConfigError(f"{location} is damaged: {reason}; delete it and fetch it again")


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder on disk; a file may also lie there gzipped, under its name and `.gz`."""

    location: Path

    def has(self, name: str) -> bool:
        """Whether there is a file or folder of this name, plain or gzipped."""
        return self._path(name).exists() or self._path(f"{name}.gz").is_file()

    def read(self, name: str, limit: int = MOST_BYTES) -> bytes:
        """The content of a file, unzipped."""
        plain = self._path(name)
        path = plain if plain.exists() else self._path(f"{name}.gz")
        try:
            data = regular(path).read_bytes()
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be read: {error.strerror}; check that it is a file you may read"
            ) from error
        try:
            return data if path == plain else _gunzip(data, limit)
        except ARCHIVE_ERRORS as error:
            raise damaged_error(path, error) from error

    def listing(self, folder: str) -> list[str]:
        """The visible names directly inside a folder, sorted."""
        try:
            return sorted(entry.name for entry in self._path(folder).iterdir() if entry.name[0] != ".")
        except OSError as error:
            raise ConfigError(
                f"{self.location / folder} cannot be listed: {error.strerror}; check the folder"
            ) from error

    def _path(self, name: str) -> Path:
        """Where a file lies; names come from lists in the data, which may not lead out of the folder."""
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts or "\0" in name:
            raise damaged_error(self.location, f"it names the file {name!r}, which is not inside it")
        return self.location / name


def _gunzip(data: bytes, limit: int) -> bytes:
    """What a gzipped file holds, which may be several such files in a row; nothing beyond the limit is unzipped."""
    if not data:  # The standard library takes an empty file for an empty archive.
        raise EOFError("it is empty")
    out = io.BytesIO()
    while data:
        unzip = zlib.decompressobj(zlib.MAX_WBITS | 16)  # 16: with the header of gzip
        out.write(unzip.decompress(data, limit + 1 - out.tell()))
        if out.tell() > limit:
            raise ValueError(_too_large(limit))
        if not unzip.eof:
            raise EOFError("it ends before its last byte")
        data = unzip.unused_data.lstrip(b"\0")  # tapes and some tools pad with zeros
    return out.getvalue()


def _too_large(limit: int) -> str:
    return f"it unzips to more than {limit:,} bytes"


class Zip:
    """A zip archive; a single top folder is left out of the names."""

    def __init__(self, location: Path) -> None:
        self.location = location

    def has(self, name: str) -> bool:
        """Whether there is a file or folder of this name."""
        return name in self._members or name in self._children

    def read(self, name: str, limit: int = MOST_BYTES) -> bytes:
        """The content of a file."""
        try:
            member = self._archive.getinfo(self._members[name])
            if member.file_size > limit:
                raise ValueError(_too_large(limit))
            return self._archive.read(member)
        except (*ARCHIVE_ERRORS, KeyError) as error:
            raise damaged_error(f"{name} in {self.location}", error) from error

    def listing(self, folder: str) -> list[str]:
        """The names directly inside a folder, sorted."""
        return sorted(self._children.get(folder, ()))

    @cached_property
    def _archive(self) -> zipfile.ZipFile:
        try:
            return zipfile.ZipFile(self.location)
        except ARCHIVE_ERRORS as error:
            raise damaged_error(self.location, error) from error

    @cached_property
    def _members(self) -> dict[str, str]:
        names = [name for name in self._archive.namelist() if not name.endswith("/")]
        return _strip_top_folder(names)

    @cached_property
    def _children(self) -> dict[str, set[str]]:
        children: dict[str, set[str]] = defaultdict(set)
        for name in self._members:
            while name:
                name, _, last = name.rpartition("/")
                children[name].add(last)
        return dict(children)


def _strip_top_folder(names: list[str]) -> dict[str, str]:
    """Short name → name, where a top folder common to all names is dropped."""
    tops = {name.partition("/")[0] for name in names}
    drop = len(tops) == 1 and all("/" in name for name in names)
    return {name.partition("/")[2] if drop else name: name for name in names}


class Tar:
    """A tar archive, compressed or not, read whole in one pass because it has no index."""

    def __init__(self, location: Path) -> None:
        self.location = location

    def has(self, name: str) -> bool:
        """Whether there is a file of this name."""
        return name in self._content

    def read(self, name: str, limit: int = MOST_BYTES) -> bytes:  # noqa: ARG002 (all of it was limited when read)
        """The content of a file."""
        try:
            return self._content[name]
        except KeyError as error:
            raise damaged_error(self.location, f"it holds no {name}") from error

    def listing(self, folder: str) -> list[str]:
        """The files directly inside a folder, sorted."""
        return sorted(name.rpartition("/")[2] for name in self._content if name.rpartition("/")[0] == folder)

    @cached_property
    def _content(self) -> dict[str, bytes]:
        content: dict[str, bytes] = {}
        left = MOST_BYTES
        try:
            with tarfile.open(self.location) as archive:
                for member in archive:
                    if (left := left - member.size) < 0:
                        raise ValueError(_too_large(MOST_BYTES))
                    if member.isfile() and (stream := archive.extractfile(member)):
                        content[member.name] = stream.read()
        except ARCHIVE_ERRORS as error:
            raise damaged_error(self.location, error) from error
        return {short: content[name] for short, name in _strip_top_folder(list(content)).items()}


def open_store(location: Path) -> Store:
    """The store at a path, chosen by what lies there.

    Example:
        >>> open_store(Path("tiny-imagenet-200.zip")).location.name
        'tiny-imagenet-200.zip'
    """
    if location.suffix == ".zip":
        return Zip(location)
    return Tar(location) if ".tar" in location.suffixes else Folder(location)


@contextmanager
def bar(what: str, total: int | None, *, done: int = 0, in_bytes: bool = False) -> Iterator[Callable[[int], None]]:
    """A bar that fills as the function it gives is called with how much was done.

    Example:
        >>> with bar("reading", 3) as advance:
        ...     advance(3)
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn() if in_bytes else MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    hidden = not sys.stderr.isatty()
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=hidden) as progress:
        task = progress.add_task(what, total=total, completed=done)
        yield lambda amount: progress.advance(task, amount)

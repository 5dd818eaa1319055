"""Where files lie: a folder, a zip or a tar, read by name and never unpacked.

Reading an archive in place leaves no half-unpacked folder behind and lets no member name reach the disk.
"""

from __future__ import annotations

import gzip
import tarfile
import zipfile
import zlib
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

from fedfuse.errors import ConfigError

ARCHIVE_ERRORS = (OSError, EOFError, zlib.error, zipfile.BadZipFile, tarfile.TarError, RuntimeError, ValueError)
"""What the standard library raises on an archive that is cut short, scrambled or locked."""


class Store(Protocol):
    """Files by relative name."""

    @property
    def location(self) -> Path:
        """The folder or the archive."""
        ...

    def has(self, name: str) -> bool:
        """Whether there is a file or folder of this name."""
        ...

    def read(self, name: str) -> bytes:
        """The content of a file."""
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
        return (self.location / name).exists() or self._gzip_path(name).is_file()

    def read(self, name: str) -> bytes:
        """The content of a file, unzipped."""
        plain = self.location / name
        path = plain if plain.exists() else self._gzip_path(name)
        try:
            data = path.read_bytes()
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be read: {error.strerror}; check that it is a file you may read"
            ) from error
        try:
            return data if path == plain else _gunzip(data)
        except ARCHIVE_ERRORS as error:
            raise damaged_error(path, error) from error

    def listing(self, folder: str) -> list[str]:
        """The visible names directly inside a folder, sorted."""
        try:
            return sorted(entry.name for entry in (self.location / folder).iterdir() if entry.name[0] != ".")
        except OSError as error:
            raise ConfigError(
                f"{self.location / folder} cannot be listed: {error.strerror}; check the folder"
            ) from error

    def _gzip_path(self, name: str) -> Path:
        return self.location / f"{name}.gz"


class Zip:
    """A zip archive; a single top folder is left out of the names."""

    def __init__(self, location: Path) -> None:
        self.location = location

    def has(self, name: str) -> bool:
        """Whether there is a file or folder of this name."""
        return name in self._members or name in self._children

    def read(self, name: str) -> bytes:
        """The content of a file."""
        try:
            return self._archive.read(self._members[name])
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


class Tar:
    """A tar archive, compressed or not, read whole in one pass because it has no index."""

    def __init__(self, location: Path) -> None:
        self.location = location

    def has(self, name: str) -> bool:
        """Whether there is a file of this name."""
        return name in self._content

    def read(self, name: str) -> bytes:
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
        try:
            with tarfile.open(self.location) as archive:
                for member in archive:
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


def _gunzip(data: bytes) -> bytes:
    if not data:  # The standard library takes an empty file for an empty archive.
        raise EOFError("it is empty")
    return gzip.decompress(data)


def _strip_top_folder(names: list[str]) -> dict[str, str]:
    """Short name → name, where a top folder common to all names is dropped."""
    tops = {name.partition("/")[0] for name in names}
    drop = len(tops) == 1 and all("/" in name for name in names)
    return {name.partition("/")[2] if drop else name: name for name in names}

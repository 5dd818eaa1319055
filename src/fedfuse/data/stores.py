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

BROKEN = (OSError, EOFError, zlib.error, zipfile.BadZipFile, tarfile.TarError, RuntimeError, ValueError)
"""What the standard library raises on an archive that is cut short, scrambled or locked."""


class Store(Protocol):
    """Files by relative name."""

    @property
    def place(self) -> Path:
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


def damaged(place: object, reason: object) -> ConfigError:
    """The error for a file that is there but cannot be what it should be."""
    return ConfigError(f"{place} is damaged: {reason}; delete it and fetch it again")


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder on disk; a file may also lie there gzipped, under its name and `.gz`."""

    place: Path

    def has(self, name: str) -> bool:
        """Whether there is a file or folder of this name, plain or gzipped."""
        return (self.place / name).exists() or self._gzipped(name).is_file()

    def read(self, name: str) -> bytes:
        """The content of a file, unzipped."""
        plain = self.place / name
        path = plain if plain.exists() else self._gzipped(name)
        try:
            data = path.read_bytes()
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be read: {error.strerror}; check that it is a file you may read"
            ) from error
        try:
            return data if path == plain else _gunzip(data)
        except BROKEN as error:
            raise damaged(path, error) from error

    def listing(self, folder: str) -> list[str]:
        """The visible names directly inside a folder, sorted."""
        try:
            return sorted(entry.name for entry in (self.place / folder).iterdir() if entry.name[0] != ".")
        except OSError as error:
            raise ConfigError(f"{self.place / folder} cannot be listed: {error.strerror}; check the folder") from error

    def _gzipped(self, name: str) -> Path:
        return self.place / f"{name}.gz"


class Zip:
    """A zip archive; a single top folder is left out of the names."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def has(self, name: str) -> bool:
        """Whether there is a file or folder of this name."""
        return name in self._members or name in self._children

    def read(self, name: str) -> bytes:
        """The content of a file."""
        try:
            return self._archive.read(self._members[name])
        except (*BROKEN, KeyError) as error:
            raise damaged(f"{name} in {self.place}", error) from error

    def listing(self, folder: str) -> list[str]:
        """The names directly inside a folder, sorted."""
        return sorted(self._children.get(folder, ()))

    @cached_property
    def _archive(self) -> zipfile.ZipFile:
        try:
            return zipfile.ZipFile(self.place)
        except BROKEN as error:
            raise damaged(self.place, error) from error

    @cached_property
    def _members(self) -> dict[str, str]:
        names = [name for name in self._archive.namelist() if not name.endswith("/")]
        return _without_top(names)

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

    def __init__(self, place: Path) -> None:
        self.place = place

    def has(self, name: str) -> bool:
        """Whether there is a file of this name."""
        return name in self._content

    def read(self, name: str) -> bytes:
        """The content of a file."""
        try:
            return self._content[name]
        except KeyError as error:
            raise damaged(self.place, f"it holds no {name}") from error

    def listing(self, folder: str) -> list[str]:
        """The files directly inside a folder, sorted."""
        return sorted(name.rpartition("/")[2] for name in self._content if name.rpartition("/")[0] == folder)

    @cached_property
    def _content(self) -> dict[str, bytes]:
        content: dict[str, bytes] = {}
        try:
            with tarfile.open(self.place) as archive:
                for member in archive:
                    if member.isfile() and (stream := archive.extractfile(member)):
                        content[member.name] = stream.read()
        except BROKEN as error:
            raise damaged(self.place, error) from error
        return {short: content[name] for short, name in _without_top(list(content)).items()}


def open_store(place: Path) -> Store:
    """The store at a path, chosen by what lies there.

    Example:
        >>> open_store(Path("tiny-imagenet-200.zip")).place.name
        'tiny-imagenet-200.zip'
    """
    if place.suffix == ".zip":
        return Zip(place)
    return Tar(place) if ".tar" in place.suffixes else Folder(place)


def _gunzip(data: bytes) -> bytes:
    if not data:  # The standard library takes an empty file for an empty archive.
        raise EOFError("it is empty")
    return gzip.decompress(data)


def _without_top(names: list[str]) -> dict[str, str]:
    """Short name → name, where a top folder common to all names is dropped."""
    tops = {name.partition("/")[0] for name in names}
    drop = len(tops) == 1 and all("/" in name for name in names)
    return {name.partition("/")[2] if drop else name: name for name in names}

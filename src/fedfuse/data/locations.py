"""Searches for files in the user's own folder, the cache and the machine's shared folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from fedfuse.core.files import regular
from fedfuse.core.folders import cache_folder
from fedfuse.data.images import SUFFIXES as PICTURES
from fedfuse.data.official import Official, Part
from fedfuse.data.stores import Store, open_store
from fedfuse.data.tables import SUFFIXES
from fedfuse.data.text_source import SUFFIXES as TEXTS
from fedfuse.errors import ConfigError

SHARED = Path("/usr/share/datasets")


@dataclass(frozen=True, slots=True)
class LocatedDataset:
    """A store that holds at least one part of each half of a public set."""

    store: Store
    train: tuple[Part, ...]
    test: tuple[Part, ...]
    missing: tuple[str, ...]


def roots() -> Iterator[Path]:
    """Where to look, in order."""
    if own := os.environ.get("FEDFUSE_DATA"):
        if not Path(own).is_dir():
            raise ConfigError(f"FEDFUSE_DATA is {own!r}, which is no folder; point it at your data or unset it")
        yield Path(own)
    yield cache_folder()
    yield SHARED


def locate(official: Official) -> LocatedDataset | None:
    """The first location that holds the whole set, or else the first that holds a part of it."""
    partial = None
    for located in (located for root in roots() for located in _search_root(root, official)):
        if not located.missing:
            return located
        partial = partial or located
    return partial


def _search_root(root: Path, official: Official) -> Iterator[LocatedDataset]:
    """The locations below one root that hold some of the set: plain folders before archives."""
    folders = [root / folder for folder in official.folders if (root / folder).is_dir()]
    archives = [folder / name for folder in (*folders, root) for name in official.archives]
    for location in (*folders, *(archive for archive in archives if archive.is_file())):
        if located := _inspect_store(open_store(location), official):
            yield located


def _inspect_store(store: Store, official: Official) -> LocatedDataset | None:
    train, test = (
        tuple(part for part in half if all(store.has(name) for name in part))
        for half in (official.train, official.test)
    )
    wanted = dict.fromkeys(name for part in (*official.train, *official.test) for name in part)
    missing = tuple(name for name in wanted if not store.has(name))
    return LocatedDataset(store, train, test, missing) if train and test else None


_FILES = (".npz", *SUFFIXES, *TEXTS)


def files_at(source: str, output: Path) -> list[Path]:
    """The files of a source that an output could be: the source itself, or what is a row of it within its folder.

    Example:
        >>> files_at("digits", Path("out.csv"))
        []
    """
    location = find_local(source)
    if location is None or not location.is_dir():
        return [] if location is None else [location]
    rows = {*PICTURES, *TEXTS, ".gz", ".zip", ".tar", ".mat", ".bin"}
    inside = location.resolve() in output.resolve().parents
    return [output] if inside and output.exists() and output.suffix.lower() in rows else []


def find_local(name: str) -> Path | None:
    """The folder, `.npz` file, table or text of this name, from here or from a search root."""
    for base in chain([Path()], roots()):
        location = base / Path(name).expanduser()
        if location.exists():
            regular(location)
        if location.is_dir() or (location.is_file() and location.suffix in _FILES):
            return location
    return None

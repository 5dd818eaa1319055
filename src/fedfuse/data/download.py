"""Finding files in the search roots, and downloading official ones that are in none of them.

A download grows in `NAME.part`. A cut connection, a killed process or a full disk leaves that file behind,
and the next attempt asks the server for the rest. The final name appears by an atomic rename, once the
checksum is right.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import BinaryIO

from fedfuse.core.files import cache_folder, hold_folder, regular
from fedfuse.data.images import SUFFIXES as PICTURES
from fedfuse.data.official import Official, Part, Remote
from fedfuse.data.stores import Store, bar, open_store
from fedfuse.data.tables import SUFFIXES
from fedfuse.data.texts import SUFFIXES as TEXTS
from fedfuse.errors import ConfigError

SHARED = Path("/usr/share/datasets")
_FILES = (".npz", *SUFFIXES, *TEXTS)

CHUNK = 1 << 18
TIMEOUT = 30.0
ATTEMPTS = 5
PAUSE = 1.0
"""Seconds before a cut download is taken up again; doubles each time."""


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


def find_local(name: str) -> Path | None:
    """The folder, `.npz` file, table or text of this name, from here or from a search root."""
    for base in chain([Path()], roots()):
        location = base / Path(name).expanduser()
        if location.exists():
            regular(location)
        if location.is_dir() or (location.is_file() and location.suffix in _FILES):
            return location
    return None


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


def offline() -> bool:
    """Whether the user forbade downloads by setting FEDFUSE_OFFLINE to anything but 0."""
    return os.environ.get("FEDFUSE_OFFLINE", "0") not in ("", "0")


def fetch_all(official: Official, folder: Path) -> None:
    """Every file of a data set, into a folder."""
    if offline():
        raise ConfigError(
            f"{official.name} was found nowhere and FEDFUSE_OFFLINE forbids downloading; "
            f"{_manual_instructions(official)}, or unset FEDFUSE_OFFLINE"
        )
    for remote in official.remotes:
        fetch(remote, folder, _manual_instructions(official))


def _manual_instructions(official: Official) -> str:
    files = ", ".join(remote.name for remote in official.remotes)
    return (
        f"fetch {files} by hand ({official.homepage}) into a folder {official.folders[0]} and set "
        "FEDFUSE_DATA to the folder that holds it"
    )


def fetch(remote: Remote, folder: Path, otherwise: str = "fetch it by hand") -> Path:
    """One file, complete and with the right MD5 sum, in a folder.

    Args:
        remote: what to fetch, and the sum it must have.
        folder: where it goes.
        otherwise: what to advise when it cannot be had.
    """
    target, part = folder / remote.name, folder / f"{remote.name}.part"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with hold_folder(folder):
            if not target.exists():
                _fill(remote, part, otherwise)
                part.replace(target)
    except OSError as error:
        raise ConfigError(
            f"{remote.name} cannot be written to {folder}: {error.strerror or error}; free some space, or "
            "set XDG_CACHE_HOME to a folder you may write to"
        ) from error
    return target


def _fill(remote: Remote, part: Path, otherwise: str) -> None:
    """Download into `part` until its sum is right; a wrong sum after resuming gets one fresh start."""
    resumed = _size(part) > 0
    _download(remote, part, otherwise)
    if (got := _md5(part)) != remote.md5 and resumed:
        part.unlink()
        _download(remote, part, otherwise)
        got = _md5(part)
    if got != remote.md5:
        part.unlink()
        raise ConfigError(
            f"{remote.name} from {remote.url} has the MD5 sum {got}, expected {remote.md5}, and was thrown "
            f"away; try again later, or {otherwise}"
        )


def _download(remote: Remote, part: Path, otherwise: str) -> None:
    """Take the download up again after each cut, until attempts in a row bring nothing new."""
    reason: object = ""
    failures, furthest = 0, _size(part)
    while failures < ATTEMPTS:
        time.sleep(PAUSE * 2 ** (failures - 1) if failures else 0)
        try:
            if _continue(remote, part):
                return
            reason = "the connection was cut"
        except urllib.error.HTTPError as error:
            error.close()
            reason = f"the server answered {error.code} {error.reason}"
            if error.code < 500:
                raise _download_error(remote, reason, otherwise) from error
        except (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError) as error:
            reason = getattr(error, "reason", error)
        failures = 0 if _size(part) > furthest else failures + 1
        furthest = max(furthest, _size(part))
    kept = f" ({_size(part)} bytes are kept, and the next attempt resumes there)" if _size(part) else ""
    raise _download_error(remote, f"{reason}{kept}", otherwise)


def _download_error(remote: Remote, what: str, otherwise: str) -> ConfigError:
    return ConfigError(
        f"{remote.name} could not be fetched from {remote.url}: {what}; check the network, or {otherwise}"
    )


def _continue(remote: Remote, part: Path) -> bool:
    """Ask for what `part` lacks and append it; True when the server says nothing is missing."""
    have = _size(part)
    request = urllib.request.Request(remote.url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        response = urllib.request.urlopen(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        if error.code == 416 and have:  # Nothing lies beyond what we have: the sum decides whether it is right.
            error.close()
            return True
        raise
    with response:
        match = re.match(r"bytes (\d+)-", response.headers.get("Content-Range", ""))
        start = int(match[1]) if response.status == 206 and match else 0  # else it sends everything again
        length = response.headers.get("Content-Length")
        total = start + int(length) if length else None
        with part.open("r+b" if start else "wb") as out:
            out.truncate(out.seek(start))
            with bar(remote.name, total, done=start, in_bytes=True) as advance:
                whole = _copy(response, out, advance)
            return whole and total in (None, out.tell())


def _copy(response: http.client.HTTPResponse, out: BinaryIO, advance: Callable[[int], None]) -> bool:
    """Write what the server sends; False when it stopped in the middle."""
    try:
        while True:
            try:
                block = response.read(CHUNK)
            except (OSError, http.client.HTTPException):
                return False
            if not block:
                return True
            out.write(block)  # an OSError of the disk is not the server's and ends the download
            advance(len(block))
    finally:
        out.flush()
        os.fsync(out.fileno())


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _md5(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()

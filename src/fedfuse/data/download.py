"""Fetches an official file: resumes what was cut, checks the sum, and only then gives it its name.

A download grows in `NAME.part`. A cut connection, a killed process or a full disk leaves that file behind,
and the next attempt asks the server for the rest. The final name appears by an atomic rename.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from fedfuse.core.lock import hold_folder
from fedfuse.data.official import Official, Remote
from fedfuse.data.progress import bar
from fedfuse.errors import ConfigError

CHUNK = 1 << 18
TIMEOUT = 30.0
ATTEMPTS = 5
PAUSE = 1.0
"""Seconds before a cut download is taken up again; doubles each time."""


def offline() -> bool:
    """Whether the user forbade downloads by setting FEDFUSE_OFFLINE to anything but 0."""
    return os.environ.get("FEDFUSE_OFFLINE", "0") not in ("", "0")


def fetch_all(official: Official, folder: Path) -> None:
    """Every file of a data set, into a folder."""
    if offline():
        raise ConfigError(
            f"{official.name} was found nowhere and FEDFUSE_OFFLINE forbids downloading; "
            f"{_by_hand(official)}, or unset FEDFUSE_OFFLINE"
        )
    for remote in official.remotes:
        fetch(remote, folder, _by_hand(official))


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
    vain, furthest = 0, _size(part)
    while vain < ATTEMPTS:
        time.sleep(PAUSE * 2 ** (vain - 1) if vain else 0)
        try:
            if _continue(remote, part):
                return
            reason = "the connection was cut"
        except urllib.error.HTTPError as error:
            error.close()
            reason = f"the server answered {error.code} {error.reason}"
            if error.code < 500:
                raise _unreachable(remote, reason, otherwise) from error
        except (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError) as error:
            reason = getattr(error, "reason", error)
        vain = 0 if _size(part) > furthest else vain + 1
        furthest = max(furthest, _size(part))
    kept = f" ({_size(part)} bytes are kept, and the next attempt resumes there)" if _size(part) else ""
    raise _unreachable(remote, f"{reason}{kept}", otherwise)


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
        start = _start(response)  # 0 when the server cannot resume and sends everything again.
        length = response.headers.get("Content-Length")
        total = start + int(length) if length else None
        with part.open("r+b" if start else "wb") as out:
            out.truncate(out.seek(start))
            with bar(remote.name, total, done=start, in_bytes=True) as advance:
                whole = _copy(response, out, advance)
            return whole and total in (None, out.tell())


def _start(response: http.client.HTTPResponse) -> int:
    """The position in the file where the server's answer begins."""
    match = re.match(r"bytes (\d+)-", response.headers.get("Content-Range", ""))
    return int(match[1]) if response.status == 206 and match else 0


def _copy(response: http.client.HTTPResponse, out: BinaryIO, advance: Callable[[int], None]) -> bool:
    """Write what the server sends; False when it stopped in the middle."""
    try:
        while block := _read(response):
            out.write(block)
            advance(len(block))
    finally:
        out.flush()
        os.fsync(out.fileno())
    return block is not None


def _read(response: http.client.HTTPResponse) -> bytes | None:
    """The next block, nothing at the end, None when the connection broke."""
    try:
        return response.read(CHUNK)
    except (OSError, http.client.HTTPException):
        return None


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _md5(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def _unreachable(remote: Remote, what: str, otherwise: str) -> ConfigError:
    return ConfigError(
        f"{remote.name} could not be fetched from {remote.url}: {what}; check the network, or {otherwise}"
    )


def _by_hand(official: Official) -> str:
    files = ", ".join(remote.name for remote in official.remotes)
    return (
        f"fetch {files} by hand ({official.homepage}) into a folder {official.folders[0]} and set "
        "FEDFUSE_DATA to the folder that holds it"
    )

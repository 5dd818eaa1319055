"""Pieces of files, read often and little at a time, and whole files, read once for their checksum."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

_BLOCK = 1 << 20  # bytes that stay in a core's cache between the read and the hash


def fill(path: Path, place: int, room: memoryview) -> bool:
    """Fill a buffer with what a file has at a place, without one of our own between; false if it ends before.

    Raises:
        OSError: if the file cannot be read.
    """
    file = os.open(path, os.O_RDONLY)
    try:
        while room and (got := os.preadv(file, [room], place)):
            room, place = room[got:], place + got
    finally:
        os.close(file)
    return not room


def sha256_of(path: Path, start: int, instead: tuple[bytes, bytes]) -> str:
    """SHA-256 of a file, one text of which, before `start`, is read as another.

    Raises:
        OSError: if the file cannot be read.
    """
    with path.open("rb", buffering=0) as file:
        digest = hashlib.sha256(file.read(start).replace(*instead, 1))
        room = memoryview(bytearray(_BLOCK))
        while got := file.readinto(room):
            digest.update(room[:got])
    return digest.hexdigest()

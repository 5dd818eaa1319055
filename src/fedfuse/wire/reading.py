"""Pieces of files, read often and little at a time."""

from __future__ import annotations

import os
from pathlib import Path


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

"""Lines of JSON that carry a checksum of themselves, so that a flipped bit is seen."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping
from typing import Any

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

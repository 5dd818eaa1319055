"""Where compiled code is kept between processes."""

from __future__ import annotations

import hashlib
import os
import tempfile
from functools import cache
from pathlib import Path

from fedfuse.core.files import cache_folder


@cache
def _digest() -> str:
    """Of all sources here: numba looks at a function's own file only, and would keep code of helpers that changed."""
    sources = sorted(Path(__file__).parent.rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]


def _preferred_folder() -> Path:
    """Below `$NUMBA_CACHE_DIR` if that is set, else below our cache folder."""
    own = os.environ.get("NUMBA_CACHE_DIR")
    return (Path(own) if own else cache_folder() / "kernels") / _digest()


def is_cold() -> bool:
    """Whether nothing was compiled here yet."""
    return not _preferred_folder().is_dir()


@cache
def code_folder() -> Path:
    """The folder for code of exactly these sources; one for this process alone where the usual cannot be written."""
    try:
        _preferred_folder().mkdir(parents=True, exist_ok=True)
        if os.access(_preferred_folder(), os.W_OK):
            return _preferred_folder()
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="fedfuse-kernels-"))

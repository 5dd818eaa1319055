"""One process at a time in a folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedfuse.errors import ConfigError


@contextmanager
def hold_folder(folder: Path, wait: bool = True) -> Iterator[None]:
    """Hold a folder that is there against every other process that asks; however the holder ends, it is free again.

    The folder itself is locked, so that nothing is left in it.

    Args:
        folder: what to hold.
        wait: until another lets go of it; otherwise that is an error.

    Example:
        >>> with hold_folder(Path()):
        ...     pass
    """
    try:
        import fcntl
    except ImportError:  # not on Windows: there nobody is kept out
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield
    except BlockingIOError:
        raise ConfigError(
            f"{folder} is being written by another run; wait until that ends, or choose another --out"
        ) from None
    finally:
        os.close(handle)

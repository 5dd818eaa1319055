"""One process at a time in a folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from fedfuse.errors import ConfigError


@contextmanager
def hold_folder(folder: Path, wait: bool = True) -> Iterator[None]:
    """Hold a folder that is there against every other process that asks; however the holder ends, it is free again.

    Args:
        folder: what to hold.
        wait: until another lets go of it; otherwise that is an error.

    Example:
        >>> import tempfile
        >>> with hold_folder(Path(tempfile.mkdtemp())):
        ...     pass
    """
    try:
        with FileLock(folder / ".lock", timeout=-1 if wait else 0):
            yield
    except Timeout:
        raise ConfigError(
            f"{folder} is being written by another run; wait until that ends, or choose another --out"
        ) from None

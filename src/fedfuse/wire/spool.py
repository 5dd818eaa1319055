"""Updates that outgrow memory wait in files."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from dataclasses import replace
from pathlib import Path

from fedfuse.core.messages import Envelope
from fedfuse.errors import ConfigError


class Spool:
    """Keeps payloads in memory up to a limit, and in a temporary folder beyond it.

    The folder disappears with the spool, so whoever reads the files must hold on to it.

    Example:
        >>> spool = Spool(limit=4)
        >>> isinstance(spool.keep(Envelope("a", b"123")).payload, bytes)
        True
        >>> isinstance(spool.keep(Envelope("b", b"45")).payload, Path)
        True
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._bytes_in_memory = 0
        self._files = 0
        self._folder: Path | None = None

    def keep(self, envelope: Envelope, largest: int | None = None) -> Envelope:
        """The envelope itself, or one whose payload is a file; a payload larger than allowed is left to the door."""
        payload = envelope.payload
        if not isinstance(payload, bytes) or (largest is not None and len(payload) > largest):
            return envelope
        if self._bytes_in_memory + len(payload) <= self.limit:
            self._bytes_in_memory += len(payload)
            return envelope
        self._files += 1
        try:
            path = self._waiting_folder() / f"{self._files}.safetensors"
            path.write_bytes(payload)
        except OSError as why:
            raise ConfigError(
                f"updates that outgrow memory cannot wait in {tempfile.gettempdir()}: {why.strerror or why}; "
                "free some space, name another folder in TMPDIR or raise the memory limit"
            ) from why
        return replace(envelope, payload=path)

    def _waiting_folder(self) -> Path:
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="fedfuse-spool-"))
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        return self._folder

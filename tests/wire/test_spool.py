"""Updates that outgrow memory wait in files, and the files go away."""

from __future__ import annotations

import gc
import tempfile
from pathlib import Path

import pytest

from fedfuse.core.messages import Envelope
from fedfuse.errors import ConfigError
from fedfuse.server.admission.admit import Spool


def test_payloads_beyond_the_limit_go_to_files_and_disappear_with_the_spool() -> None:
    spool = Spool(limit=10)
    kept = [spool.keep(Envelope(c, c.encode() * 4, seconds=1.5)) for c in "abcd"]
    assert [type(e.payload) for e in kept[:2]] == [bytes, bytes]
    files = [e.payload for e in kept[2:]]
    assert all(isinstance(f, Path) for f in files)
    assert [Path(str(f)).read_bytes() for f in files] == [b"cccc", b"dddd"]
    assert [(e.client, e.seconds) for e in kept] == [(c, 1.5) for c in "abcd"]
    folder = Path(str(files[0])).parent
    del spool
    gc.collect()
    assert not folder.exists()


def test_what_is_already_a_file_or_too_long_is_left_to_the_door(tmp_path: Path) -> None:
    spool = Spool(limit=0)
    for envelope in (Envelope("a", tmp_path), Envelope("b", None), Envelope("c", b"12345")):
        assert spool.keep(envelope, largest=4) is envelope


def test_a_full_disk_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(ConfigError, match=f"cannot wait in {tempfile.gettempdir()}: No space left on device; free"):
        Spool(limit=0).keep(Envelope("a", b"1"))

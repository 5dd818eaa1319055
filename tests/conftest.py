"""What all tests share: one thread, no network, data only where the user put it."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import hypothesis
import pytest
import torch

from fedfuse import cli
from fedfuse.core import registry
from fedfuse.core.files import cache_folder

torch.set_num_threads(1)
# nothing is timed in tests: a busy machine fails none of them
hypothesis.settings.register_profile("patient", deadline=None)
hypothesis.settings.load_profile("patient")
# kernels are compiled once for all sessions and subprocesses, even where a test moves the cache elsewhere
os.environ.setdefault("NUMBA_CACHE_DIR", str(cache_folder() / "kernels"))


class Said(NamedTuple):
    """What a command answered: its exit code, and what it printed."""

    code: int
    out: str
    err: str


Fedfuse = Callable[..., Said]


def _is_local(address: object) -> bool:
    host = address[0] if isinstance(address, tuple) else ""
    return not isinstance(address, tuple) or str(host).startswith("127.") or host in ("localhost", "::1")


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that reaches for the network fails; loopback is allowed."""
    connect = socket.socket.connect

    def guarded(self: socket.socket, address: object) -> None:
        if not _is_local(address):
            raise AssertionError(f"a test tried to reach {address!r}; tests run offline")
        connect(self, address)  # type: ignore[arg-type]

    monkeypatch.setattr(socket.socket, "connect", guarded)


@pytest.fixture(autouse=True)
def _registry() -> Iterator[None]:
    """Methods of a test's own are gone with it."""
    yield
    for name in [n for n, m in registry._METHODS.items() if not m.make.__module__.startswith("fedfuse.")]:
        del registry._METHODS[name]


@pytest.fixture
def real_data() -> Path:
    """The folder of real data sets; a test that needs it skips, loudly, without it."""
    root = os.environ.get("FEDFUSE_DATA")
    if not root or not Path(root).is_dir():
        pytest.skip("FEDFUSE_DATA is not set to a folder with data sets: a real-data test did not run")
    return Path(root).resolve()


@pytest.fixture
def fedfuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Fedfuse:
    """Types one command in a fresh folder, whose Python files can be imported and are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "fsync", lambda _: None)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    monkeypatch.setenv("COLUMNS", "200")

    def call(*words: str | Path) -> Said:
        monkeypatch.setattr(sys, "argv", ["fedfuse", *map(str, words)])
        capsys.readouterr()
        try:
            cli.main()
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        return Said(code, *capsys.readouterr())

    return call

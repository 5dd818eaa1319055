"""The server that workers are forked off: started before torch, deaf to Ctrl-C, and leaving no trace here."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from fedfuse.engines.starting import start_conditions, start_early


def test_starting_early_needs_no_torch() -> None:
    code = "import sys; from fedfuse.engines.starting import start_early; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_nothing_of_this_process_changes() -> None:
    before = dict(os.environ), signal.pthread_sigmask(signal.SIG_BLOCK, ())
    start_early()
    start_early()  # the second time it is there already
    assert (dict(os.environ), signal.pthread_sigmask(signal.SIG_BLOCK, ())) == before


def test_workers_have_one_thread_whatever_their_parent_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    with start_conditions():
        assert os.environ["OMP_NUM_THREADS"] == "1"
    assert os.environ["OMP_NUM_THREADS"] == "7"

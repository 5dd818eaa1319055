"""What tests of Flower share: where helpers and examples lie, small experiments, and that no process is left behind."""

from __future__ import annotations

import os
import runpy
import secrets
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
for folder in ("examples/flower", "examples/flower_quickstart", "tests/flower"):
    sys.path.insert(0, str(ROOT / folder))


_SMALL = runpy.run_path(str(ROOT / "tests" / "experiment" / "conftest.py"))
tiny, _quick = _SMALL["tiny"], _SMALL["_quick"]


@pytest.fixture(scope="module", autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    """Whatever a module's processes start inherits a mark; when the module ends, nobody has it but us."""
    os.environ["FEDFUSE_TEST_MARK"] = mark = secrets.token_hex(8)
    yield
    del os.environ["FEDFUSE_TEST_MARK"]
    ends = time.monotonic() + 20
    while (left := _marked(mark)) and time.monotonic() < ends:
        time.sleep(0.5)
    words = [process.cmdline() for process in left]
    for process in left:
        process.kill()
    assert not words


def _marked(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            mine = process.environ().get("FEDFUSE_TEST_MARK") == mark and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            continue
        if mine and process.pid != os.getpid():
            found.append(process)
    return found

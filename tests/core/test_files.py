"""Files and folders: what one process holds, no other writes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fedfuse.core.files import hold_folder
from fedfuse.errors import ConfigError

HOLD = """
import sys, pathlib
from fedfuse.core.files import hold_folder
with hold_folder(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_folder_is_held_against_other_processes_until_the_holder_is_gone(tmp_path: Path) -> None:
    words = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(ConfigError, match="is being written by another run"), hold_folder(tmp_path, wait=False):
            pytest.fail("two held one folder")
        other.kill()
        other.wait()
    with hold_folder(tmp_path, wait=False):
        pass

"""A few mutants of every kind, every time; `make fuzz` runs a million."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from mutants import FILES, METHODS, fate


@pytest.mark.parametrize("kind", FILES)
def test_a_spoilt_file_is_refused_in_one_sentence_or_harmless(kind: str) -> None:
    found = [fate(kind, seed) for seed in range(60)]
    assert not [why for what, why in found if what == "foreign"]
    assert any(what == "refused" for what, _ in found) or kind == "jsonl"


@pytest.mark.parametrize("method", METHODS)
def test_a_spoilt_reply_costs_nobody_but_its_sender(method: str) -> None:
    found = [fate(method, seed) for seed in range(3)]
    assert not [why for what, why in found if what == "foreign"]


@pytest.mark.slow
def test_the_script_counts_in_parts() -> None:
    script = Path(__file__).with_name("fuzz.py")
    command = [sys.executable, str(script), "idx.gz", "jsonl", "--count", "40", "--part", "25"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1].startswith("40 mutants: ")
    assert ", 0 foreign" in done.stdout

"""Flower's simulation engine gives the bytes of one process; `tests/parity` holds all methods to it without Ray."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fedfuse.experiment.config import load_experiment
from fedfuse.experiment.run import execute

pytestmark = pytest.mark.flower
TIMES = ("train_seconds", "server_seconds", "diagnostic_seconds")
EXPERIMENT = """
name = "three"
rounds = 2
seeds = [1]
[data]
clients = 3
train_limit = 90
test_limit = 40
server_fraction = 0.2
[model]
name = "lenet"
maps = [4, 6]
hidden = [8]
[local]
batch_size = 16
optimizer = { lr = 0.1 }

[[methods]]  # clients remember
name = "scaffold"

[[methods]]  # the network changes its shape
name = "hrank"
at = 1

[[methods]]  # one method hands over to another, which ends with a mixture
name = "fedavg"
rounds = 1
then = { name = "ensemble" }
"""


def models(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "models").iterdir()}


def test_a_simulation_gives_the_same_bytes(tmp_path: Path) -> None:
    """As a user types it: `fedfuse flower FILE --run`."""
    path = tmp_path / "three.toml"
    path.write_text(EXPERIMENT)
    command = [sys.executable, "-m", "fedfuse", "flower", path, "--run", "--out", tmp_path / "flower", "--json"]
    alone = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*map(str, command), "--workers", "2"], capture_output=True, text=True, env=alone, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    theirs = json.loads(done.stdout.splitlines()[-1])["rows"]
    ours = execute(load_experiment(path), tmp_path / "here", workers=0).rows
    assert models(tmp_path / "flower") == models(tmp_path / "here")
    assert len(ours) == len(theirs) == 3 * 2
    for one, other in zip(ours, theirs, strict=True):
        shared = one.keys() & other.keys() - {*TIMES, "refused"}
        assert {key: one[key] for key in shared} == {key: other[key] for key in shared}

"""Flower's simulation engine gives the bytes of one process, for every method a federation can run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_grid import small_options

from fedfuse.core.registry import all_methods
from fedfuse.experiment.config import load_experiment
from fedfuse.experiment.run import execute
from fedfuse.server.steps.prune import Prune

pytestmark = pytest.mark.flower
TIMES = ("train_seconds", "server_seconds", "diagnostic_seconds")
HEAD = """
name = "all"
rounds = {rounds}
seeds = [1]
[data]
clients = 3
train_limit = 90
test_limit = 40
server_fraction = 0.2
unlabelled = "digits"
unlabelled_limit = 20
[model]
{model}
[local]
batch_size = 16
optimizer = {{ lr = 0.1 }}
"""
MLP = 'name = "mlp"\nhidden = [4]'
CONV = 'name = "lenet"\nmaps = [4, 6]\nhidden = [8]'


def is_remote(name: str) -> bool:
    return "to every client" not in getattr(all_methods()[name].recipe().roster, "reveals", "")


def kind(name: str) -> str:
    """What a method ends a round with, or that it wants channels to remove."""
    recipe = all_methods()[name].recipe()
    if any(isinstance(step, Prune) for step in recipe.steps):
        return "channels"
    return "mixtures" if recipe.result == "mixture" else "networks"


def written(path: Path, rounds: int, model: str, names: list[str]) -> Path:
    tables = []
    for name in names:
        options = small_options(all_methods()[name])
        tables.append("\n".join(["[[methods]]", f'name = "{name}"', *(f"{k} = {v}" for k, v in options.items())]))
    path.write_text(HEAD.format(rounds=rounds, model=model) + "\n".join(tables) + "\n")
    return path


def is_simulated(path: Path, out: Path, *more: str) -> dict[str, Any]:
    """`fedfuse flower FILE --run` as a user types it."""
    command = [sys.executable, "-m", "fedfuse", "flower", str(path), "--run", "--out", str(out), "--json", *more]
    alone = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500, env=alone, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


def models(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "models").iterdir()}


@pytest.mark.parametrize("which", ["networks", "mixtures", "channels"])
def test_every_method_gives_the_same_bytes(which: str, tmp_path: Path) -> None:
    names = [name for name in sorted(all_methods()) if is_remote(name) and kind(name) == which]
    rounds, model = 1 if which == "mixtures" else 2, CONV if which == "channels" else MLP
    path = written(tmp_path / "all.toml", rounds, model, names)
    theirs = is_simulated(path, tmp_path / "flower", "--workers", "2")
    ours = execute(load_experiment(path), tmp_path / "here", workers=0)
    assert models(tmp_path / "flower") == models(tmp_path / "here")
    assert len(ours.rows) == len(theirs["rows"]) == len(names) * rounds
    for one, other in zip(ours.rows, theirs["rows"], strict=True):
        assert {k: one[k] for k in other if k in one and k not in (*TIMES, "refused")} == {
            k: v for k, v in other.items() if k in one and k not in (*TIMES, "refused")
        }

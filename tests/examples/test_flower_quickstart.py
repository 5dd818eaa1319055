"""The quickstart's own functions over a grid of this process, and the whole of it on Flower's simulation engine."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr")
ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "flower_quickstart"
for folder in (EXAMPLE, ROOT / "tests" / "flower"):
    sys.path.insert(0, str(folder))

import client_app  # noqa: E402
import fused_client_app  # noqa: E402
import fused_server_app  # noqa: E402
import server_app  # noqa: E402
import task  # noqa: E402
from fake_grid import Gathering  # noqa: E402
from flwr.app import Context, RecordDict  # noqa: E402
from flwr.cli.config_utils import load_and_validate  # noqa: E402
from flwr.clientapp import ClientApp  # noqa: E402
from flwr.serverapp import ServerApp  # noqa: E402


def accuracies(said: str) -> dict[tuple[str, int], int]:
    found = re.findall(r"(\w+): (\d+)% after (\d+) round", said)
    return {(method, int(rounds)): int(share) for method, share, rounds in found}


def run(server: ServerApp, client: ClientApp, **config: str | int) -> None:
    grid = Gathering()
    for place in range(task.CLIENTS):
        grid.add(client, f"client-{place}", **{"partition-id": place})
    torch.manual_seed(0)
    server(grid, Context(1, 1, {}, RecordDict(), dict(config)))


def test_every_client_has_rows_of_its_own() -> None:
    parts = [task.load_part(place) for place in range(task.CLIENTS)]
    assert sum(len(y) for _, y in parts) == len(task.load_rows()[1])
    assert all(len(y.unique()) > 6 for _, y in parts)
    assert all((y.bincount().sort(descending=True).values[:2].sum() / len(y)) > 0.8 for _, y in parts)


def test_ten_changed_lines_are_worth_something(capsys: pytest.CaptureFixture[str]) -> None:
    run(server_app.app, client_app.app, rounds=1)
    run(fused_server_app.app, fused_client_app.app, rounds=1, method="fedlpa")
    found = accuracies(capsys.readouterr().out)
    assert found.keys() == {("FedAvg", 1), ("fedlpa", 1)}
    assert found["fedlpa", 1] > found["FedAvg", 1] + 10


def test_rounds_with_client_memory(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_client_app, "load_part", lambda part: tuple(t[:32] for t in task.load_part(part)))
    run(fused_server_app.app, fused_client_app.app, rounds=2, method="scaffold")
    assert accuracies(capsys.readouterr().out).keys() == {("scaffold", 2)}


def test_flower_takes_it_for_an_app() -> None:
    config, _ = load_and_validate(EXAMPLE / "pyproject.toml")
    assert config["tool"]["flwr"]["app"]["components"]["clientapp"] == "fused_client_app:app"


@pytest.mark.flower
def test_it_runs_on_the_simulation_engine() -> None:
    alone = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, EXAMPLE / "run.py"], env=alone, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = accuracies(done.stdout)
    assert found.keys() == {("FedAvg", 3), ("scaffold", 3), ("FedAvg", 1), ("fedlpa", 1)}
    assert found["fedlpa", 1] > found["FedAvg", 1]

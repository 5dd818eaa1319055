"""Whoever watches is told everything, in order; nobody need watch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedfuse.experiment.config import Experiment
from fedfuse.experiment.execute import execute
from fedfuse.experiment.watch import Quiet, Watcher


class Diary:
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []

    def method_started(self, label: str, seed: int, done: int, rounds: int, clients: int) -> None:
        self.told.append((label, seed, done, rounds, clients))

    def client_done(self, client: str, seconds: float, remembered: bool) -> None:
        self.told.append((client, remembered))

    def round_done(self, label: str, seed: int, round_: int, accuracy: float | None) -> None:
        assert accuracy is not None
        self.told.append((label, seed, round_))


def test_a_watcher_is_told_everything(tiny: Callable[..., Experiment], tmp_path: Path) -> None:
    diary = Diary()
    experiment = tiny("fedavg", "fednova", rounds=1, seeds=[5])
    execute(experiment, tmp_path / "run", workers=0, memo=tmp_path / "memo", watch=diary)
    clients = ("client-00", "client-01", "client-02")
    assert diary.told == [
        ("fedavg", 5, 0, 1, 3),
        *((client, False) for client in clients),
        ("fedavg", 5, 1),
        ("fednova", 5, 0, 1, 3),
        *((client, True) for client in clients),
        ("fednova", 5, 1),
    ]


def test_nobody_is_a_watcher_too() -> None:
    nobody: Watcher = Quiet()
    nobody.method_started("fedavg", 0, 0, 1, 3)
    nobody.client_done("a", 0.1, remembered=False)
    nobody.round_done("fedavg", 0, 1, None)

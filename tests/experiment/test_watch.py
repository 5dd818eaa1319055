"""Whoever watches is told everything, in order; nobody need watch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedfuse.experiment.callbacks import Callback, Several, Watcher
from fedfuse.experiment.config import Experiment
from fedfuse.experiment.run import execute


class Diary(Callback):
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []

    def method_started(self, label: str, seed: int, done: int, rounds: int, clients: int) -> None:
        self.told.append((label, seed, done, rounds, clients))

    def client_done(self, client: str, seconds: float, remembered: bool) -> None:
        self.told.append((client, remembered))

    def round_done(self, label: str, seed: int, round_: int, scores: Mapping[str, Any]) -> None:
        assert scores["parameters"] > 0
        assert 0 <= scores["accuracy"] <= 1
        self.told.append((label, seed, round_))

    def run_started(self, name: str, folder: Path, config: Mapping[str, Any]) -> None:
        self.told.append((name, folder.name, config["seeds"]))

    def run_done(self) -> None:
        self.told.append(("done",))


def test_a_watcher_is_told_everything(tiny: Callable[..., Experiment], tmp_path: Path) -> None:
    diary = Diary()
    experiment = tiny("fedavg", "fednova", rounds=1, seeds=[5])
    execute(experiment, tmp_path / "run", workers=0, memo=tmp_path / "memo", watch=diary)
    clients = ("client-00", "client-01", "client-02")
    assert diary.told == [
        ("tiny", "run", [5]),
        ("fedavg", 5, 0, 1, 3),
        *((client, False) for client in clients),
        ("fedavg", 5, 1),
        ("fednova", 5, 0, 1, 3),
        *((client, True) for client in clients),
        ("fednova", 5, 1),
        ("done",),
    ]


def test_nobody_is_a_watcher_too() -> None:
    nobody: Watcher = Callback()
    nobody.method_started("fedavg", 0, 0, 1, 3)
    nobody.client_done("a", 0.1, remembered=False)
    nobody.round_done("fedavg", 0, 1, {})


class Steps(Callback):
    """Notes how far long steps of the server are."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int, int]] = []

    def server_progress(self, what: str, done: int, total: int) -> None:
        self.seen.append((what, done, total))


def test_long_steps_of_the_server_say_how_far_they_are(tiny: Callable[..., Experiment], tmp_path: Path) -> None:
    watch = Steps()
    said = [{"name": "ensemble", "distill": "impressions", "inputs": 40, "epochs": 2}]
    execute(tiny(methods=said, rounds=1), tmp_path / "run", workers=0, watch=watch)
    made = [(done, total) for what, done, total in watch.seen if what.startswith("impressions")]
    assert made[-1] == (40, 40)
    assert len(made) >= 3  # one for each client's network
    assert [seen for seen in watch.seen if seen[0].startswith("distilling")] == [
        ("distilling, epoch", 1, 2),
        ("distilling, epoch", 2, 2),
    ]


def test_several_watchers_are_told_the_same(tiny: Callable[..., Experiment], tmp_path: Path) -> None:
    one, other = Diary(), Diary()
    execute(tiny("fedavg", rounds=1), tmp_path / "run", workers=0, watch=Several(one, other))
    assert one.told == other.told
    assert len(one.told) == 7

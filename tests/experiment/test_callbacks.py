"""Callbacks see everything in order, and show it as bars or lines."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from fedfuse.experiment.callbacks import Bars, Callback, Several, Text, Watcher, in_notebook, lines, show_progress
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


class Clock:
    """A clock that goes when it is told to."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def told(clock: Clock, **options: object) -> tuple[Text, list[str]]:
    shown: list[str] = []
    return Text(4, "study", shown.append, clock=clock, **options), shown  # type: ignore[arg-type]


def test_a_line_now_and_then_with_what_is_left(clock: Clock) -> None:
    text, shown = told(clock)
    text.run_started("study", Path("runs/study"), {})
    text.method_started("fedavg", 0, 0, 2, 5)
    for clock.now in (3.0, 6.0, 9.0):  # type: ignore[assignment]
        text.client_done("a", 3.0, remembered=False)
    clock.now = 30.0
    text.round_done("fedavg", 0, 1, {"accuracy": 0.5})
    clock.now = 35.0
    text.client_done("a", 3.0, remembered=False)
    clock.now = 45.0
    text.client_done("b", 3.0, remembered=False)
    clock.now = 60.0
    text.server_progress("distilling, epoch", 3, 200)
    assert shown == [
        "study: 4 runs of a method on a seed, into runs/study",
        "study: run 1 of 4, fedavg, seed 0, round 1 of 2, accuracy 50.00%, about 4 min left",
        "study: run 1 of 4, fedavg, seed 0, round 2 of 2, client 2 of 5, accuracy 50.00%, about 5 min left",
        "study: run 1 of 4, fedavg, seed 0, round 2 of 2, distilling, epoch 3 of 200, accuracy 50.00%, "
        "about 7 min left",
    ]


def test_what_was_done_before_does_not_make_the_rest_look_quick(clock: Clock) -> None:
    text, shown = told(clock)
    text.method_started("fedavg", 0, 2, 2, 5)  # both rounds were done before
    text.method_started("fedavg", 1, 0, 2, 5)
    clock.now = 60.0
    text.round_done("fedavg", 1, 1, {})
    assert shown[-1].endswith("round 1 of 2, about 5 min left")  # a minute for each of the five rounds to come


def test_every_round_and_nothing_else(clock: Clock) -> None:
    text, shown = told(clock, seconds=0.0, rounds_only=True)
    text.method_started("fedavg", 0, 0, 1, 2)
    text.client_done("a", 1.0, remembered=False)
    text.server_progress("distilling, epoch", 1, 2)
    text.round_done("fedavg", 0, 1, {"accuracy": 0.25})
    assert [line.partition(", about")[0] for line in shown] == [
        "study: run 1 of 4, fedavg, seed 0, round 1 of 1, accuracy 25.00%"
    ]


def test_lines_go_to_the_stream_they_are_given() -> None:
    stream = io.StringIO()
    lines(1, "study", stream).run_started("study", Path("here"), {})
    assert stream.getvalue() == "study: one run of a method on a seed, into here\n"


def test_a_notebook_gets_one_line_that_changes_and_no_widget(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kernel = type("ZMQInteractiveShell", (), {})()
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: kernel))  # type: ignore[arg-type]
    assert in_notebook()
    monkeypatch.setattr("fedfuse.experiment.callbacks._BAR_SECONDS", 0.0)
    with show_progress(2, "study") as watch:
        watch.method_started("fedavg", 0, 0, 2, 1)
        watch.round_done("fedavg", 0, 1, {"accuracy": 0.5})
        watch.round_done("fedavg", 0, 2, {"accuracy": 0.75})
    drawn = capsys.readouterr().out
    assert drawn.count("\n") == 1
    assert drawn.split("\r")[-1].startswith("█" * 12 + "░" * 12 + " study: run 1 of 2, fedavg, seed 0, round 2 of 2")


def test_the_line_of_a_notebook_ends_where_the_run_did(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kernel = type("ZMQInteractiveShell", (), {})()
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: kernel))  # type: ignore[arg-type]
    monkeypatch.setattr("fedfuse.experiment.callbacks._BAR_SECONDS", 1e9)
    with show_progress(1, "study") as watch:
        watch.method_started("fedavg", 0, 0, 1, 1)
        watch.round_done("fedavg", 0, 1, {"accuracy": 0.5})
    last = capsys.readouterr().out.split("\r")[-1]
    assert last.startswith("█" * 24 + " study: run 1 of 1, fedavg, seed 0, round 1 of 1, accuracy 50.00%")
    assert "left" not in last


@pytest.mark.slow
def test_a_real_kernel_shows_progress_and_tables(tmp_path: Path) -> None:
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    run = """import fedfuse
results = fedfuse.run({"data": {"source": "digits", "train_limit": 100, "clients": 2},
    "model": {"name": "mlp", "hidden": [4]}, "methods": [{"name": "fedavg"}]}, out="run", workers=0)"""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in (run, "results")])
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    said, shown = (cell.outputs for cell in notebook.cells)
    words = "".join(out.text for out in said if out.output_type == "stream" and out.name == "stdout")
    assert words.count("\n") == 1
    assert words.split("\r")[-1].startswith("█" * 24 + " experiment: run 1 of 1, fedavg")
    assert "\x1b" not in words
    assert shown[-1].data["text/html"].count("<td>fedavg</td>") == 1
    assert shown[-1].data["text/plain"].startswith("Results('experiment': fedavg")


def test_a_terminal_shows_the_servers_step_while_it_lasts() -> None:
    screen = io.StringIO()
    with show_progress(1, "study", Console(file=screen, force_terminal=True, width=120)) as bars:
        assert isinstance(bars, Bars)
        bars.method_started("dense", 0, 0, 1, 2)
        bars.server_progress("distilling, epoch", 3, 200)
        bars._progress.refresh()
        assert "3/200" in screen.getvalue()
        bars.server_progress("distilling, epoch", 200, 200)
    assert not in_notebook()


def test_a_round_says_how_many_clients_were_left_out_or_weakened(clock: Clock) -> None:
    text, shown = told(clock, rounds_only=True, seconds=0.0)
    text.method_started("fedavg", 0, 0, 2, 5)
    for accuracy in ({}, {"accuracy": 0.5}):
        line = {"refused": [{"client": "a"}], "clipped": [{"client": "b"}] * 4, "dropped": [], **accuracy}
        text.round_done("fedavg", 0, 1, line)
    assert all("1 refused, 1 clipped" in each and "dropped" not in each for each in shown)
    assert len(shown) == 2

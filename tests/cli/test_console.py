"""What a person sees, and what they do not when nobody looks on."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import pytest
from rich.console import Console

from fedfuse.cli import console
from fedfuse.experiment.callbacks import Bars


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """A terminal that keeps what was drawn."""
    seen = io.StringIO()
    monkeypatch.setattr(console, "err", Console(file=seen, force_terminal=True, width=120))
    return seen


def test_bars_count_courses_rounds_and_clients(screen: io.StringIO) -> None:
    with console.watcher(2, "study") as bars:
        assert isinstance(bars, Bars)
        for seed in (0, 1):
            bars.method_started("fedavg", seed, 3, 5, 2)
            for client in ("site-1", "site-2"):
                bars.client_done(client, 1.5, remembered=client == "site-2")
            bars._progress.refresh()
            bars.round_done("fedavg", seed, 4, {"accuracy": 0.875})
            bars._progress.refresh()
    drawn = screen.getvalue()
    for words in ("study: methods × seeds", "fedavg, seed 1", "1/2", "3/5", "4/5", "2/2"):
        assert words in drawn, words
    assert "site-2 remembered" in drawn
    assert "accuracy 87.50%" in drawn


def test_a_round_without_a_score_is_counted_all_the_same(screen: io.StringIO) -> None:
    with console.watcher(1, "study") as bars:
        bars.method_started("fedavg", 0, 0, 1, 1)
        bars.round_done("fedavg", 0, 1, {})
    assert "1/1" in screen.getvalue()


def test_lines_are_written_where_nobody_looks_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = io.StringIO()
    monkeypatch.setattr(console, "err", Console(file=seen, force_terminal=False))
    with console.watcher(1, "study") as watch:
        watch.run_started("study", Path("runs/study"), {})
        watch.method_started("fedavg", 0, 0, 1, 1)
        watch.round_done("fedavg", 0, 1, {"accuracy": 0.5})
    assert seen.getvalue() == "study: one run of a method on a seed, into runs/study\n"  # it took less than ten seconds


def test_brackets_in_a_sentence_are_not_markup(capsys: pytest.CaptureFixture[str]) -> None:
    console.say("the key [data] and [red]more[/red]")
    console.complain("no [bold]way " + "very " * 60)
    told = capsys.readouterr()
    assert told.out == "the key [data] and [red]more[/red]\n"
    assert told.err == "error: no [bold]way " + "very " * 60 + "\n"


def test_json_has_no_word_for_infinity(capsys: pytest.CaptureFixture[str]) -> None:
    console.say_json({"nll": math.inf, "rows": (1, 2)})
    assert json.loads(capsys.readouterr().out) == {"nll": None, "rows": [1, 2]}


def test_scores_stand_in_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    scores = {"accuracy": 0.5, "confidence": 0.9, "nll": 1.25, "ece": 0.1, "brier": 0.75}
    scores |= {"rows": 1200, "classes": ["ill", "well"], "class_rows": [1200, 0], "per_class": [0.25, None]}
    console.show_scores("digits", {"a.safetensors": scores})
    told = capsys.readouterr().out
    for words in ("digits", "a.safetensors", "50.00%", "1.2500", "0.1000", "0.7500", "1,200 rows", "90.00%", "25.0%"):
        assert words in told


def test_a_hint_is_for_who_looks_on(screen: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    console.hint("")
    assert screen.getvalue() == ""
    console.hint("wait a little")
    assert screen.getvalue() == "wait a little\n"
    quiet = io.StringIO()
    monkeypatch.setattr(console, "err", Console(file=quiet, force_terminal=False))
    console.hint("wait a little")
    assert quiet.getvalue() == ""


def test_what_others_call_their_files_does_nothing_to_a_terminal(
    screen: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file called `x<ESC>[2J` cleared the screen of whoever fused it."""
    for name in ("out", "err"):
        monkeypatch.setattr(console, name, Console(file=screen, width=120, highlight=False))
    name = "site\x1b[2J\x07[/red]\u202e.safetensors"
    for show in (console.say, console.complain, console.warn, console.note):
        show(name)
    console.table(name, (name, "n"), [(name, 1)])
    drawn = screen.getvalue()
    assert drawn.count("site\\x1b[2J\\x07[/red]\\u202e.safetensors") == 7
    assert "\x1b[2J" not in drawn
    assert not set("\x07\u202e") & set(drawn)

"""Callbacks: what a run calls as it makes progress, and those that show it as bars or as lines of text."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import IO, Any, TypeAlias

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Callback:
    """Is called as a run makes progress, and does nothing: override what you want to know of.

    The methods must return quickly, for the run waits for them.

    Example:
        >>> class Best(Callback):
        ...     accuracy = 0.0
        ...
        ...     def round_done(self, label, seed, round_, scores):
        ...         self.accuracy = max(self.accuracy, scores["accuracy"])
    """

    def run_started(self, name: str, folder: Path, config: Mapping[str, Any]) -> None:
        """An experiment starts in a run directory, with these settings."""

    def method_started(self, label: str, seed: int, done: int, rounds: int, clients: int) -> None:
        """A method starts on a seed, with some rounds done already and so many clients to ask in each."""

    def client_done(self, client: str, seconds: float, remembered: bool) -> None:
        """A client answered."""

    def server_progress(self, what: str, done: int, total: int) -> None:
        """A long step of the server's has come so far."""

    def round_done(self, label: str, seed: int, round_: int, scores: Mapping[str, Any]) -> None:
        """A round was written to the ledger; the scores are its line."""

    def run_done(self) -> None:
        """Every method has run on every seed."""


Watcher: TypeAlias = Callback
"""What a run calls."""


class Several(Callback):
    """Several callbacks as one: each event goes to all of them, in their order."""

    def __init__(self, *callbacks: Callback) -> None:
        for event in (name for name in vars(Callback) if not name.startswith("_")):
            setattr(self, event, partial(_call_each, [getattr(callback, event) for callback in callbacks]))


def _call_each(calls: Iterable[Callable[..., None]], *what: object, **named: object) -> None:
    for call in calls:
        call(*what, **named)


LINE_SECONDS = 10.0  # between two lines: a log of a long run stays readable
_BAR_SECONDS = 0.2
_BAR_WIDTH = 24


def time_text(seconds: float) -> str:
    """A duration as a person would say it.

    Example:
        >>> time_text(42), time_text(600), time_text(9000)
        ('42 s', '10 min', '2 h 30 min')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


def score_text(scores: Mapping[str, Any]) -> str:
    """How well a round went, if that was scored, by what its task is judged by first.

    Example:
        >>> score_text({"accuracy": 0.875, "nll": 0.4}), score_text({"rmse": 0.25}), score_text({})
        ('accuracy 87.50%', 'rmse 0.2500', '')
        >>> score_text({"perplexity": 7.25, "accuracy": 0.4})
        'perplexity 7.25'
    """
    if scores.get("perplexity") is not None:
        return f"perplexity {scores['perplexity']:.2f}"
    if scores.get("accuracy") is not None:
        return f"accuracy {scores['accuracy']:.2%}"
    return "" if scores.get("rmse") is None else f"rmse {scores['rmse']:.4f}"


def round_text(line: Mapping[str, Any]) -> str:
    """How well a round went, and how many clients it refused, weakened or lost, if any.

    Example:
        >>> round_text({"accuracy": 0.875, "clipped": [{"client": "a"}, {"client": "a"}, {"client": "b"}]})
        'accuracy 87.50%, 2 clipped'
    """
    found = {what: {entry["client"] for entry in line.get(what, ())} for what in ("refused", "clipped", "dropped")}
    words = [score_text(line), *(f"{len(clients)} {what}" for what, clients in found.items() if clients)]
    return ", ".join(word for word in words if word)


class Text(Callback):
    """Progress as text: which method, seed and round, how well it goes, and how long it may still take.

    Args:
        method_runs: methods × seeds.
        name: the experiment's.
        show: what to do with a text.
        seconds: at least so many between two texts.
        bar: begin with a bar drawn in characters.
        rounds_only: say nothing of single clients and steps.
        clock: tells the time, in seconds.
    """

    def __init__(
        self,
        method_runs: int,
        name: str,
        show: Callable[[str], None],
        seconds: float = LINE_SECONDS,
        bar: bool = False,
        rounds_only: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._method_runs, self._name, self._show = method_runs, name, show
        self._seconds, self._bar, self._rounds_only, self._clock = seconds, bar, rounds_only, clock
        self._begun = self._shown = clock()
        self._runs = self._rounds = self._done = self._asked = self._answered = 0
        self._fresh = 0.0  # shares of runs that were done since the start, not before it
        self._who = self._note = ""

    def run_started(self, name: str, folder: Path, config: Mapping[str, Any]) -> None:
        """Say at once that there is something to wait for."""
        runs = "one run" if self._method_runs == 1 else f"{self._method_runs} runs"
        self._show(f"{self._name}: {runs} of a method on a seed, into {folder}")

    def method_started(self, label: str, seed: int, done: int, rounds: int, clients: int) -> None:
        """Remember who is at work."""
        self._runs, self._who, self._note = self._runs + 1, f"{label}, seed {seed}", ""
        self._done, self._rounds, self._asked, self._answered = done, rounds, clients, 0
        self._tell()

    def client_done(self, client: str, seconds: float, remembered: bool) -> None:
        """Count the client."""
        self._answered += 1
        self._tell(f"client {self._answered} of {self._asked}")

    def server_progress(self, what: str, done: int, total: int) -> None:
        """Say how far the server has come."""
        self._tell(f"{what} {done} of {total}")

    def round_done(self, label: str, seed: int, round_: int, scores: Mapping[str, Any]) -> None:
        """Count the round and say how well it went."""
        self._done, self._answered = round_, 0
        self._note = round_text(scores)
        self._fresh += 1 / max(self._rounds, 1)
        self._tell()

    def _tell(self, step: str = "") -> None:
        if self._rounds_only and (step or not self._note):
            return
        if self._clock() - self._shown >= self._seconds:
            self._shown = self._clock()
            round_ = f"round {min(self._done + bool(step), self._rounds)} of {self._rounds}"
            words = [f"run {self._runs} of {self._method_runs}", self._who, round_, step, self._note, self._time_left()]
            self._show(self._drawn_bar() + f"{self._name}: " + ", ".join(word for word in words if word))

    def finish(self) -> None:
        """Say how it ended, however short ago something was said."""
        self._shown = -math.inf
        self._tell()

    def _share(self) -> float:
        """The share of all runs that is done."""
        return (self._runs - 1 + self._done / max(self._rounds, 1)) / max(self._method_runs, 1)

    def _drawn_bar(self) -> str:
        full = round(_BAR_WIDTH * self._share())
        return f"{'█' * full}{'░' * (_BAR_WIDTH - full)} " if self._bar else ""

    def _time_left(self) -> str:
        """How long it may still take, by what was done since the start."""
        if not self._fresh:
            return ""
        ahead = self._method_runs * (1 - self._share())
        return f"about {time_text((self._clock() - self._begun) / self._fresh * ahead)} left" if ahead > 0 else ""


class Bars(Callback):
    """Progress as bars: all methods × seeds, the rounds of this one, the clients of this round, the server's step."""

    def __init__(self, method_runs: int, name: str, console: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=console,
            transient=True,
        )
        self._all = self._progress.add_task(f"{name}: methods × seeds", total=method_runs, note="")
        self._rounds = self._progress.add_task("rounds", total=None, note="")
        self._clients = self._progress.add_task("clients", total=None, note="")
        self._server = self._progress.add_task("server", total=None, note="", visible=False)
        self._begun = self._asked = 0

    def __enter__(self) -> Bars:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def method_started(self, label: str, seed: int, done: int, rounds: int, clients: int) -> None:
        """Name the method and the seed at work."""
        self._progress.update(self._all, completed=self._begun, note=f"{label}, seed {seed}")
        self._progress.reset(self._rounds, total=rounds, completed=done, note="")
        self._progress.reset(self._clients, total=clients, note="")
        self._begun, self._asked = self._begun + 1, clients

    def client_done(self, client: str, seconds: float, remembered: bool) -> None:
        """Count the client."""
        note = f"{client} remembered" if remembered else f"{client} {seconds:.1f} s"
        self._progress.update(self._clients, advance=1, note=note)

    def server_progress(self, what: str, done: int, total: int) -> None:
        """Show the server's step while it is at it."""
        self._progress.update(self._server, completed=done, total=total, note=what, visible=done < total)

    def round_done(self, label: str, seed: int, round_: int, scores: Mapping[str, Any]) -> None:
        """Count the round and show how well it went."""
        self._progress.update(self._rounds, completed=round_, note=round_text(scores))
        self._progress.reset(self._clients, total=self._asked)


def lines(
    method_runs: int,
    name: str,
    stream: IO[str] | None = None,
    seconds: float = LINE_SECONDS,
    rounds_only: bool = False,
) -> Watcher:
    """Lines of text for a log; with `rounds_only` nothing is said of single clients and steps."""

    def show(text: str) -> None:
        print(text, file=stream or sys.stderr, flush=True)

    return Text(method_runs, name, show, seconds, rounds_only=rounds_only)


@contextmanager
def show_progress(method_runs: int, name: str, console: Console | None = None) -> Iterator[Watcher]:
    """Bars where a person looks on, a line that changes in a notebook, lines elsewhere."""
    console = console or Console(stderr=True, highlight=False)
    if console.is_terminal and not in_notebook():
        with Bars(method_runs, name, console) as bars:
            yield bars
    elif in_notebook():
        line = Text(method_runs, name, _rewrite_line, _BAR_SECONDS, bar=True)
        yield line
        line.finish()
        sys.stdout.write("\n")
    else:
        yield lines(method_runs, name, console.file)


def in_notebook() -> bool:
    """Whether this is a notebook's kernel, where carriage returns work and terminal codes do not."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return type(shell).__name__ == "ZMQInteractiveShell"


def _rewrite_line(text: str) -> None:
    sys.stdout.write(f"\r{text[:110]:<110}")
    sys.stdout.flush()

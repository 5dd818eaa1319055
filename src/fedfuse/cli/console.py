"""What a person sees in the terminal: progress, tables, one-sentence errors."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from fedfuse.experiment.ledger import flat, plain
from fedfuse.experiment.watch import Quiet, Watcher

if TYPE_CHECKING:  # it brings torch, which a person who asks for help need not wait for
    from fedfuse.experiment.execute import Results

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


def say(text: str) -> None:
    """One line for a person."""
    out.print(text, markup=False, soft_wrap=True)


def complain(text: str) -> None:
    """One sentence about what went wrong."""
    err.print(f"error: {text}", style="red", markup=False, soft_wrap=True)


def hint(text: str) -> None:
    """One line that only a person who looks on needs, if there is anything to say."""
    if text and err.is_terminal:
        err.print(text, markup=False, soft_wrap=True)


def say_json(value: object) -> None:
    """One JSON value for a machine; numbers that are not finite become null."""
    sys.stdout.write(json.dumps(plain(value)) + "\n")


def table(title: str, heads: Sequence[str], rows: Iterable[Sequence[object]], right: int = 1) -> None:
    """A table; columns from the `right`-th on are numbers."""
    grid = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for column, head in enumerate(heads):
        grid.add_column(head, justify="right" if column >= right else "left", overflow="fold")
    for row in rows:
        grid.add_row(*(str(cell) for cell in row))
    out.print(grid)


class Bars:
    """Progress as bars: all methods × seeds, the rounds of this one, the clients of this round."""

    def __init__(self, method_runs: int, name: str) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=err,
            transient=True,
        )
        self._all = self._progress.add_task(f"{name}: methods × seeds", total=method_runs, note="")
        self._rounds = self._progress.add_task("rounds", total=None, note="")
        self._clients = self._progress.add_task("clients", total=None, note="")
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

    def round_done(self, label: str, seed: int, round_: int, accuracy: float | None) -> None:  # noqa: ARG002
        """Count the round and show how well it went."""
        note = "" if accuracy is None else f"accuracy {accuracy:.1%}"
        self._progress.update(self._rounds, completed=round_, note=note)
        self._progress.reset(self._clients, total=self._asked)


@contextmanager
def watcher(method_runs: int, name: str) -> Iterator[Watcher]:
    """Bars where a person looks on, silence elsewhere."""
    if not err.is_terminal:
        yield Quiet()
        return
    with Bars(method_runs, name) as bars:
        yield bars


def show_scores(title: str, scores: Mapping[str, Mapping[str, Any]]) -> None:
    """Accuracy, NLL, ECE and Brier of several models."""
    rows = [
        (name, f"{s['accuracy']:.2%}", f"{s['nll']:.4f}", f"{s['ece']:.4f}", f"{s['brier']:.4f}")
        for name, s in scores.items()
    ]
    table(title, ("model", "accuracy", "NLL", "ECE", "Brier"), rows)


def results_json(results: Results, page: Path | None) -> dict[str, Any]:
    """A run's results as one JSON value: the rows of results.json, each with its experiment's name."""
    rows = [{"experiment": row["experiment"], **flat(row)} for row in results.rows]
    return {"name": results.name, "folder": str(results.folder), "page": page and str(page), "rows": rows}

"""What a person sees in the terminal: progress, tables, one-sentence errors."""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedfuse.errors import printable
from fedfuse.experiment.callbacks import Watcher, show_progress
from fedfuse.experiment.results import flat, plain

if TYPE_CHECKING:
    from fedfuse.experiment.results import Results


class Terminated(KeyboardInterrupt):
    """A signal ended the process; it stops as by Ctrl-C and leaves nothing behind."""

    def __init__(self, number: int) -> None:
        self.exit_code = 128 + number  # as shells tell it
        super().__init__(number)


def stop_code(why: KeyboardInterrupt) -> int:
    """The exit code of a command that was stopped: 1 after Ctrl-C, a shell's own for any other signal."""
    return why.exit_code if isinstance(why, Terminated) else 1


def interruption(end: BaseException) -> KeyboardInterrupt | None:
    """What stopped a command, where it was stopped and has not said so: typer makes an exit of its own of it."""
    made_by_typer = isinstance(end, SystemExit) and end.code == 130  # its code for any interruption
    found: BaseException | None = end if not isinstance(end, SystemExit) or made_by_typer else None
    while found is not None and not isinstance(found, KeyboardInterrupt):
        found = found.__context__
    return found


@contextmanager
def stop_cleanly() -> Iterator[None]:
    """Within, the signals that end a process are an exception, so that workers and temporary folders go with it."""

    def stop(number: int, _frame: object) -> None:
        signal.signal(number, signal.SIG_IGN)  # a second one must not interrupt the tidying up
        raise Terminated(number)

    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]  # Windows lacks one
    ours = [number for number in numbers if signal.getsignal(number) is signal.SIG_DFL]  # `nohup` says otherwise
    if threading.current_thread() is not threading.main_thread():
        ours = []  # only the main thread may set handlers
    for number in ours:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


def say(text: str) -> None:
    """One line for a person."""
    out.print(_visible(text), markup=False, soft_wrap=True)


def complain(text: str) -> None:
    """One sentence about what went wrong."""
    err.print(f"error: {_visible(text)}", style="red", markup=False, soft_wrap=True)


def warn(text: str) -> None:
    """One sentence that a person should read before going on."""
    err.print(f"warning: {_visible(text)}", style="yellow", markup=False, soft_wrap=True)


def hint(text: str) -> None:
    """One line that only a person who looks on needs, if there is anything to say."""
    if text and err.is_terminal:
        err.print(_visible(text), markup=False, soft_wrap=True)


def note(text: str, style: str = "") -> None:
    """One line that is not the result: what was left out, or how long something may take."""
    err.print(_visible(text), style=style, markup=False, soft_wrap=True)


def _visible(text: str) -> str:
    """Text that says what it says and does nothing to a terminal; names of files and sites are others' words."""
    return printable(text, keep="\n\t")


def _plain_words(value: object) -> Text:
    """A cell that is never taken for markup: `[/]` is a fine name for a file."""
    return Text(_visible(str(value)))


def say_json(value: object) -> None:
    """One JSON value for a machine; numbers that are not finite become null."""
    sys.stdout.write(json.dumps(plain(value)) + "\n")


def table(title: str, heads: Sequence[str], rows: Iterable[Sequence[object]], right: int = 1) -> None:
    """A table; columns from the `right`-th on are numbers."""
    grid = Table(title=_plain_words(title), title_justify="left", box=None, padding=(0, 2, 0, 0))
    for column, head in enumerate(heads):
        words, number = _plain_words(head), column >= right
        grid.add_column(words, justify="right" if number else "left", overflow="fold", no_wrap=number)
    for row in rows:
        grid.add_row(*map(_plain_words, row))
    out.print(grid)


def watcher(method_runs: int, name: str) -> AbstractContextManager[Watcher]:
    """Bars where a person looks on, lines of text elsewhere."""
    return show_progress(method_runs, name, err)


def show_scores(source: str, scores: Mapping[str, Mapping[str, Any]]) -> None:
    """The scores of several models, those that their task has, and how each class fares."""
    keys = [key for key in _SCORES if any(s.get(key) is not None for s in scores.values())]
    rows = [(name, *(_score_words(key, s.get(key)) for key in keys)) for name, s in scores.items()]
    first = next(iter(scores.values()))
    half = f", its {first['half']} rows" if "half" in first else ""
    table(f"{source}{half}: {first['rows']:,} rows", ("model", *(_SCORES[key] for key in keys)), rows)
    for classes in dict.fromkeys(tuple(s["classes"]) for s in scores.values() if "class_rows" in s):
        say("")
        _show_classes(classes, {name: s for name, s in scores.items() if tuple(s.get("classes", ())) == classes})


def show_sites(scores: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> None:
    """The scores of several models on the rows of several sites, a line each."""
    every = [s for each in scores.values() for s in each.values()]
    keys = [key for key in _SCORES if any(s.get(key) is not None for s in every)]
    rows = [
        (source, name, f"{s['rows']:,}", *(_score_words(key, s.get(key)) for key in keys))
        for source, each in scores.items()
        for name, s in each.items()
    ]
    table("", ("rows of", "model", "rows", *(_SCORES[key] for key in keys)), rows, right=2)


_SCORES = {
    "accuracy": "accuracy",
    "confidence": "sure",
    "exact": "all labels right",
    "auroc": "AUROC",
    "perplexity": "perplexity",
    "nll": "NLL",
    "ece": "ECE",
    "brier": "Brier",
    "rmse": "RMSE",
    "mae": "MAE",
    "r2": "R²",
}


def _score_words(key: str, value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.2%}" if key in ("accuracy", "confidence", "exact") else f"{value:.4f}"


def _show_classes(classes: Sequence[str], scores: Mapping[str, Mapping[str, Any]]) -> None:
    """For each class its rows and the share that each model gets right."""
    counts = next(iter(scores.values()))["class_rows"]
    rows = [
        (name, count, *("–" if s["per_class"][k] is None else f"{s['per_class'][k]:.1%}" for s in scores.values()))
        for k, (name, count) in enumerate(zip(classes, counts, strict=True))
    ]
    heads = ["right"] if len(scores) == 1 else [f"right: {Path(name).stem}" for name in scores]
    table("", ("class", "rows", *heads), rows)


def results_json(results: Results, page: Path | None) -> dict[str, Any]:
    """A run's results as one JSON value: the rows of results.json, each with its experiment's name."""
    rows = [{"experiment": row["experiment"], **flat(row)} for row in results.rows]
    return {"name": results.name, "folder": str(results.folder), "page": page and str(page), "rows": rows}

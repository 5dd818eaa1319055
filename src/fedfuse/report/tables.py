"""Summaries laid out for the terminal, for Markdown and for the page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedfuse.report.scores import COLUMNS, Column, Kind, Spread, SummaryRow, summary

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["Cell", "Grid", "Heading", "SummaryRow", "byte_unit", "grid", "markdown", "rich_table", "summary"]

TERMINAL = (
    "accuracy",
    "nll",
    "ece",
    "own_accuracy_worst10",
    "bytes_up",
    "trained",
    "remembered",
    "server_seconds",
    "client_accuracy_worst10",
    "brier",
    "own_accuracy_mean",
    "client_accuracy_mean",
    "train_seconds",
    "bytes_down",
    "flops",
)
"""The terminal's columns, the most telling first: what does not fit is left to the page."""

GAP = 2
"""Characters between the terminal's columns."""


@dataclass(frozen=True, slots=True)
class Heading:
    """A column as shown: its unit fits its numbers."""

    column: Column
    unit: str

    @property
    def text(self) -> str:
        """Title and unit."""
        return f"{self.column.title}, {self.unit}" if self.unit else self.column.title


@dataclass(frozen=True, slots=True)
class Cell:
    """A number as shown; `sd` is padded so that the column's means stand under each other."""

    mean: str
    sd: str = ""
    of: str = ""
    value: float | None = None
    best: bool = False

    def __str__(self) -> str:
        return " ".join(word for word in (self.mean, self.sd, self.of) if word)


@dataclass(frozen=True, slots=True)
class Grid:
    """A summary laid out: headings, and per row its cells in the same order."""

    headings: tuple[Heading, ...]
    lines: tuple[tuple[SummaryRow, tuple[Cell, ...]], ...]


def grid(table: Sequence[SummaryRow], keys: Sequence[str] | None = None) -> Grid:
    """Lay a summary out: columns nobody recorded are dropped, the best of each column is marked.

    Example:
        >>> rows = [{"method": "wb", "seed": s, "round": 1, "accuracy": 0.7 + 0.2 * s} for s in (0, 1)]
        >>> [str(cell) for _, cells in grid(summary(rows)).lines for cell in cells]
        ['80.0 ± 14.1']
    """
    known = {column.key: column for column in COLUMNS}
    columns = [known[key] for key in keys] if keys is not None else list(COLUMNS)
    columns = [column for column in columns if any(column.key in row.values for row in table)]
    laid = [_lay(column, table) for column in columns]
    lines = tuple((row, tuple(cells[at] for _, cells in laid)) for at, row in enumerate(table))
    return Grid(tuple(heading for heading, _ in laid), lines)


def _lay(column: Column, table: Sequence[SummaryRow]) -> tuple[Heading, list[Cell]]:
    log_variances = [row.values.get(column.key) for row in table]
    factor, places, unit = _scale(column.kind, [value.mean for value in log_variances if value])
    shown = [None if value is None else round(value.mean / factor, places) for value in log_variances]
    best = _best(column, [value for value in shown if value is not None])
    deviations = [_deviation(value, column.kind, factor, places) for value in log_variances]
    width = max(map(len, deviations))
    cells = [
        Cell("–")
        if value is None or figure is None
        else Cell(
            mean=f"{figure:,.{places}f}",
            sd=("± " + deviation.rjust(width)) if deviation else " " * (width + 2 if width else 0),
            of=f"({value.n} of {len(row.seeds)} seeds)" if value.n < len(row.seeds) else "",
            value=value.mean,
            best=figure == best,
        )
        for row, value, figure, deviation in zip(table, log_variances, shown, deviations, strict=True)
    ]
    return Heading(column, unit), cells


def _best(column: Column, shown: Sequence[float]) -> float | None:
    """The best printed number: ties share the mark, and where all are equal none deserves it."""
    if not column.better or len(set(shown)) < 2:
        return None
    return max(shown) if column.better == "high" else min(shown)


def _deviation(value: Spread | None, kind: Kind, factor: float, places: int) -> str:
    """The printed deviation; a cost whose deviation prints as zero does without."""
    if value is None or value.sd is None:
        return ""
    visible = round(value.sd / factor, places) > 0 or kind in ("share", "number")
    return f"{value.sd / factor:,.{places}f}" if visible else ""


def _scale(kind: Kind, means: Sequence[float]) -> tuple[float, int, str]:
    """Divisor, decimal places and unit for a column, the same for all its numbers."""
    largest = max(map(abs, means), default=0.0)
    if kind == "share":
        return 0.01, 1, "%"
    if kind == "number":
        return 1.0, 3, ""
    if kind == "count":
        return 1.0, 0 if all(mean.is_integer() for mean in means) else 1, ""
    if kind == "seconds":
        return 1.0, 3 if largest < 1 else 2 if largest < 100 else 0, "s"
    size, unit = (flop_unit if kind == "flops" else byte_unit)(largest)
    return size, 2 if size > 1 else 0, unit


def byte_unit(largest: float) -> tuple[float, str]:
    """The unit in which a count of bytes is read best, and its size.

    Example:
        >>> byte_unit(1_777_040)
        (1000000.0, 'MB')
    """
    units = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
    return next(((size, unit) for size, unit in units if largest >= size), (1.0, "B"))


def flop_unit(largest: float) -> tuple[float, str]:
    """The unit in which a number of floating point operations is read best, and its size.

    Example:
        >>> flop_unit(3e13)
        (1000000000000.0, 'TFLOP')
    """
    units = ((1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"))
    return next(((size, unit) for size, unit in units if largest >= size), (1.0, "FLOP"))


def rich_table(table: Sequence[SummaryRow], title: str | None = None, width: int | None = None) -> Table:
    """The summary for a terminal, the best of each column bold and starred.

    With a `width`, the least telling columns are left out until the rest fits.

    Example:
        >>> from rich.console import Console
        >>> scores = {"fedavg": 0.7, "wb": 0.8}
        >>> rows = [{"method": m, "seed": 0, "round": 1, "accuracy": a} for m, a in scores.items()]
        >>> Console(width=40).print(rich_table(summary(rows)))
        <BLANKLINE>
                 accuracy
         method         %
         ────────────────
         fedavg      70.0
         wb        ★ 80.0
        <BLANKLINE>
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    laid = grid(table, TERMINAL)
    kept = _that_fit(laid, width)
    drawn = Table(title=title, box=box.SIMPLE, padding=(0, GAP - 1, 0, 0), pad_edge=False)
    drawn.caption, drawn.caption_justify = _seeds_line(table), "left"
    drawn.add_column("method", overflow="fold")
    for at in kept:
        drawn.add_column(Text(_stacked(laid.headings[at])), justify="right", no_wrap=True)
    for row, cells in laid.lines:
        drawn.add_row(Text(row.label), *(Text(_starred(cells[at]), "bold" if cells[at].best else "") for at in kept))
    return drawn


def _stacked(heading: Heading) -> str:
    """The title with its unit below: narrow enough to stand over its numbers."""
    return f"{heading.column.title}\n{heading.unit}" if heading.unit else heading.column.title


def _starred(cell: Cell) -> str:
    return f"★ {cell}" if cell.best else str(cell)


def _that_fit(laid: Grid, width: int | None) -> list[int]:
    """Positions of the leading columns that fit."""
    used = GAP + max((len(row.label) for row, _ in laid.lines), default=0)
    kept: list[int] = []
    for at, heading in enumerate(laid.headings):
        used += GAP + max(len(heading.column.title), *(len(_starred(cells[at])) for _, cells in laid.lines))
        if kept and width is not None and used > width:
            break
        kept.append(at)
    return kept


def _seeds_line(table: Sequence[SummaryRow]) -> str | None:
    """How many seeds the means are over, when there are any to speak of."""
    counts = sorted({len(row.seeds) for row in table})
    if not counts or counts == [1]:
        return None
    return f"mean ± standard deviation over {'–'.join(str(n) for n in {counts[0]: 0, counts[-1]: 0})} seeds"


def markdown(table: Sequence[SummaryRow], keys: Sequence[str] = TERMINAL[:5]) -> str:
    r"""The summary as a Markdown table, the best of each column bold.

    Example:
        >>> scores = {"fedavg": 0.7, "wb": 0.8}
        >>> rows = [{"method": m, "seed": 0, "round": 1, "accuracy": a} for m, a in scores.items()]
        >>> print(markdown(summary(rows)))
        | method | accuracy, % |
        |---|---:|
        | fedavg | 70.0 |
        | wb | **80.0** |
    """
    laid = grid(table, keys)
    head = ["method", *(heading.text for heading in laid.headings)]
    lines = [_piped(head), "|---|" + "---:|" * len(laid.headings)]
    for row, cells in laid.lines:
        texts = (" ".join(str(cell).split()) for cell in cells)
        words = (f"**{text}**" if cell.best else text for text, cell in zip(texts, cells, strict=True))
        lines.append(_piped([row.label.replace("|", "\\|"), *words]))
    return "\n".join(lines)


def _piped(words: Iterable[str]) -> str:
    return f"| {' | '.join(words)} |"

"""Summaries laid out for the terminal, for Markdown and for the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from fedfuse.report.scores import (
    COLUMNS,
    EXPLAINED,
    SAME_COST,
    Column,
    Kind,
    Mark,
    MeanSd,
    SummaryRow,
    marks_of,
    summary,
)
from fedfuse.report.stats import half_width

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["Cell", "Grid", "Heading", "Spread", "SummaryRow", "byte_unit", "grid", "rich_table", "summary"]

Spread: TypeAlias = Literal["sd", "interval"]

TELLING = (
    *("perplexity", "accuracy", "rmse", "mae", "r2", "exact", "auroc", "nll", "ece"),
    *("own_accuracy_worst10", "own_rmse_worst10", "bytes_up"),
)
"""The columns of a first table, of which every task has its own."""

TERMINAL = (
    *TELLING,
    "trained",
    "remembered",
    "server_seconds",
    "client_accuracy_worst10",
    "client_rmse_worst10",
    "brier",
    "own_accuracy_mean",
    "own_rmse_mean",
    "own_perplexity_worst10",
    "own_perplexity_mean",
    "client_perplexity_mean",
    "client_accuracy_mean",
    "client_rmse_mean",
    "train_seconds",
    "bytes_down",
    "flops",
)
"""The terminal's columns, the most telling first: what does not fit is left to the page."""

GAP = 2
"""Characters between the terminal's columns."""

STARS: Mapping[Mark, str] = {"best": "★", "tie": "☆", "": ""}
_STYLES: Mapping[Mark, str] = {"best": "bold", "tie": "", "": ""}


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
    mark: Mark = ""

    def __str__(self) -> str:
        return " ".join(word for word in (self.mean, self.sd, self.of) if word)


@dataclass(frozen=True, slots=True)
class Grid:
    """A summary laid out: headings, and per row its cells in the same order."""

    headings: tuple[Heading, ...]
    lines: tuple[tuple[SummaryRow, tuple[Cell, ...]], ...]


def grid(table: Sequence[SummaryRow], keys: Sequence[str] | None = None, spread: Spread = "sd") -> Grid:
    """Lay a summary out: columns nobody recorded are dropped, the best of each column and its ties are marked.

    Args:
        table: the summary.
        keys: the columns, in this order; by default all.
        spread: what stands behind ±: the standard deviation, or half of the 95 % interval of the mean.

    Example:
        >>> rows = [{"method": "wb", "seed": s, "round": 1, "accuracy": 0.7 + 0.2 * s} for s in (0, 1)]
        >>> [str(cell) for _, cells in grid(summary(rows)).lines for cell in cells]
        ['80.0 ± 14.1']
    """
    known = {column.key: column for column in COLUMNS}
    columns = [known[key] for key in keys] if keys is not None else list(COLUMNS)
    columns = [column for column in columns if any(column.key in row.values for row in table)]
    layout = [_lay_out_column(column, _kin(column, columns), table, spread) for column in columns]
    lines = tuple((row, tuple(cells[at] for _, cells in layout)) for at, row in enumerate(table))
    return Grid(tuple(heading for heading, _ in layout), lines)


def _kin(column: Column, columns: Sequence[Column]) -> list[str]:
    """The columns that share a unit: bytes up and down would mislead in two."""
    return [other.key for other in columns if other.kind == column.kind]


def _lay_out_column(
    column: Column, kin: Sequence[str], table: Sequence[SummaryRow], spread: Spread
) -> tuple[Heading, list[Cell]]:
    statistics = [row.values.get(column.key) for row in table]
    factor, decimals, unit = _scale_with_kin(column, kin, table)
    shown = [None if value is None else round(value.mean / factor, decimals) for value in statistics]
    marks = marks_of(column, table, decimals=decimals, factor=factor)
    spreads = [_spread_text(value, column.kind, factor, decimals, spread) for value in statistics]
    width = max(map(len, spreads))
    cells = [
        Cell("–")
        if value is None or figure is None
        else Cell(
            mean=f"{figure:,.{decimals}f}",
            sd=("± " + text.rjust(width)) if text else " " * (width + 2 if width else 0),
            of=f"({value.n} of {len(row.seeds)} seeds)" if value.n < len(row.seeds) else "",
            value=value.mean,
            mark=mark,
        )
        for row, value, figure, text, mark in zip(table, statistics, shown, spreads, marks, strict=True)
    ]
    return Heading(column, unit), cells


def _spread_text(value: MeanSd | None, kind: Kind, factor: float, decimals: int, spread: Spread) -> str:
    """The number behind ±; a cost does without whose spread prints as zero or is what names and headers differ by."""
    if value is None or value.sd is None:
        return ""
    width = value.sd if spread == "sd" else half_width(value.sd, value.n)
    noise = SAME_COST * abs(value.mean) if kind in ("bytes", "flops") else 0.0
    visible = (width > noise and round(width / factor, decimals) > 0) or kind in ("share", "number")
    return f"{width / factor:,.{decimals}f}" if visible else ""


def _scale_with_kin(column: Column, kin: Sequence[str], table: Sequence[SummaryRow]) -> tuple[float, int, str]:
    """The scale of all columns of a kind, unless this column's numbers would vanish in it."""
    own = [row.values[column.key].mean for row in table if column.key in row.values]
    if column.kind not in ("bytes", "flops"):
        return _scale(column.kind, own)
    shared = _scale(column.kind, [row.values[key].mean for row in table for key in kin if key in row.values])
    return shared if max(map(abs, own), default=0.0) >= 0.1 * shared[0] else _scale(column.kind, own)


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
    """The summary for a terminal, the best of each column bold and starred, its ties with an open star.

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

    layout = grid(table, TERMINAL)
    kept = _fitting_columns(layout, width)
    drawn = Table(title=title, box=box.SIMPLE, padding=(0, GAP - 1, 0, 0), pad_edge=False)
    drawn.caption, drawn.caption_justify = _seeds_line(table), "left"
    drawn.add_column("method", overflow="fold")
    for at in kept:
        drawn.add_column(Text(_stacked_title(layout.headings[at])), justify="right", no_wrap=True)
    for row, cells in layout.lines:
        drawn.add_row(Text(row.label), *(Text(_cell_text(cells[at]), _STYLES[cells[at].mark]) for at in kept))
    return drawn


def _stacked_title(heading: Heading) -> str:
    """The title with its unit below: narrow enough to stand over its numbers."""
    return f"{heading.column.title}\n{heading.unit}" if heading.unit else heading.column.title


def _cell_text(cell: Cell) -> str:
    return f"{STARS[cell.mark]} {cell}" if cell.mark else str(cell)


def _fitting_columns(layout: Grid, width: int | None) -> list[int]:
    """Positions of the leading columns that fit."""
    used = GAP + max((len(row.label) for row, _ in layout.lines), default=0)
    kept: list[int] = []
    for at, heading in enumerate(layout.headings):
        used += GAP + max(len(heading.column.title), *(len(_cell_text(cells[at])) for _, cells in layout.lines))
        if kept and width is not None and used > width:
            break
        kept.append(at)
    return kept


def _seeds_line(table: Sequence[SummaryRow]) -> str | None:
    """How many seeds the means are over and what the stars say, when there are any to speak of."""
    counts = sorted({len(row.seeds) for row in table})
    if not counts or counts == [1]:
        return None
    seeds = "–".join(str(n) for n in {counts[0]: 0, counts[-1]: 0})
    return f"mean ± standard deviation over {seeds} seeds\n★ best, ☆ {EXPLAINED}"

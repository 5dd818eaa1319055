"""Tables of summaries: laid out once (`grid`), then written for the terminal, as Markdown, LaTeX, CSV or JSON.

`rich_table` and `markdown` show one summary; a `Sheet` is the table of a paper, of one run or of several side by side.
"""

from __future__ import annotations

import csv
import fnmatch
import io
import json
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from fedfuse.core.escape import markdown_text, spreadsheet_cell
from fedfuse.errors import ConfigError
from fedfuse.report.read import Run, run_titles
from fedfuse.report.scores import (
    COLUMNS,
    EXPLAINED,
    SAME_COST,
    Column,
    Kind,
    Mark,
    MeanSd,
    SummaryRow,
    headline_of,
    marks_of,
    summary,
)
from fedfuse.report.stats import half_width
from fedfuse.report.svg import legible

if TYPE_CHECKING:
    from rich.table import Table


Spread: TypeAlias = Literal["sd", "interval"]

TELLING = (
    *("perplexity", "accuracy", "rmse", "mae", "r2", "exact", "auroc", "nll", "ece"),
    *("own_accuracy_worst10", "own_rmse_worst10", "bytes_up"),
)
"""The columns of a first table, of which every task has its own."""


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
    """Lay a summary out: columns without a value are dropped, the best of each column and its ties are marked.

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
    layout = [
        _lay_out_column(column, [c.key for c in columns if c.kind == column.kind], table, spread) for column in columns
    ]
    lines = tuple((row, tuple(cells[at] for _, cells in layout)) for at, row in enumerate(table))
    return Grid(tuple(heading for heading, _ in layout), lines)


def _lay_out_column(
    column: Column, kin: Sequence[str], table: Sequence[SummaryRow], spread: Spread
) -> tuple[Heading, list[Cell]]:
    """A column's heading and cells; it shares its unit with its kin, for bytes up and down in two would mislead."""
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


def _spread_text(value: MeanSd | None, kind: Kind, factor: float, decimals: int, spread: Spread) -> str:
    """The text after ±; none for costs whose spread prints as zero or is what names and headers differ by."""
    if value is None or value.sd is None:
        return ""
    width = value.sd if spread == "sd" else half_width(value.sd, value.n)
    noise = SAME_COST * abs(value.mean) if kind in ("bytes", "flops") else 0.0
    visible = (width > noise and round(width / factor, decimals) > 0) or kind in ("share", "number")
    return f"{width / factor:,.{decimals}f}" if visible else ""


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
    counts = sorted({len(row.seeds) for row in table})
    if counts and counts != [1]:
        seeds = "–".join(str(n) for n in dict.fromkeys((counts[0], counts[-1])))
        drawn.caption = f"mean ± standard deviation over {seeds} seeds\n★ best, ☆ {EXPLAINED}"
        drawn.caption_justify = "left"
    drawn.add_column("method", overflow="fold")
    for at in kept:
        heading = layout.headings[at]  # the unit stands below the title, so that columns are narrow
        above = f"{heading.column.title}\n{heading.unit}" if heading.unit else heading.column.title
        drawn.add_column(Text(above), justify="right", no_wrap=True)
    for row, cells in layout.lines:
        drawn.add_row(
            Text(row.label), *(Text(_cell_text(cells[at]), "bold" if cells[at].mark == "best" else "") for at in kept)
        )
    return drawn


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


def _cell_text(cell: Cell) -> str:
    return f"{STARS[cell.mark]} {cell}" if cell.mark else str(cell)


def markdown(table: Sequence[SummaryRow], keys: Sequence[str] = TELLING[:6]) -> str:
    r"""A summary as a Markdown table, the best of each column bold, its ties in italics.

    Example:
        >>> scores = {"fedavg": 0.7, "wb": 0.8}
        >>> rows = [{"method": m, "seed": 0, "round": 1, "accuracy": a} for m, a in scores.items()]
        >>> print(markdown(summary(rows)))
        | method | accuracy, % |
        |---|---:|
        | fedavg | 70.0 |
        | wb | **80.0** |
    """
    return write_markdown(Sheet(tuple(row.label for row in table), (("", grid(table, keys)),)))


Format: TypeAlias = Literal["md", "latex", "csv", "json"]
SUFFIXES: Mapping[str, Format] = {".md": "md", ".tex": "latex", ".csv": "csv", ".json": "json"}


@dataclass(frozen=True, slots=True)
class Sheet:
    """Runs side by side: the labels that are its rows, and per run a title and its grid."""

    labels: tuple[str, ...]
    parts: tuple[tuple[str, Grid], ...]
    spread: Spread = "sd"

    @property
    def columns(self) -> list[tuple[str, Heading, dict[str, Cell]]]:
        """Every column: its run's title, its heading, and its cells by label."""
        return [
            (title, heading, {row.label: cells[at] for row, cells in layout.lines})
            for title, layout in self.parts
            for at, heading in enumerate(layout.headings)
        ]

    @property
    def shared_heading(self) -> str | None:
        """What all columns of several runs show, where that is one score in one unit."""
        texts = {heading.text for _, heading, _ in self.columns}
        return texts.pop() if len(texts) == 1 and len(self.parts) > 1 else None

    @property
    def note(self) -> str:
        """What stands behind ± and what the marks mean."""
        width = "standard deviation" if self.spread == "sd" else "half of the 95 % interval"
        return f"mean ± {width} over seeds; bold: best of the column, {{tie}}: {EXPLAINED}"


def make_sheet(
    runs: Sequence[Run],
    rows: Sequence[str] = (),
    columns: Sequence[str] = (),
    spread: Spread = "sd",
) -> Sheet:
    """Lay out a table of runs.

    Args:
        runs: one gives a column per score, several a column per run and score.
        rows: labels of methods, in this order; patterns such as `fed*` will do. By default all.
        columns: keys of scores, in this order; by default the most telling of one run, of several the first.
        spread: what stands behind ±.

    Raises:
        ConfigError: if there is no such method or score.
    """
    first = headline_of(row for run in runs for row in run.rows).key
    known = [column.key for column in COLUMNS]
    for key in columns:
        if key not in known:
            raise ConfigError(f"there is no column {key!r}; expected some of {', '.join(known)}")
    keys = tuple(columns) or (TELLING if len(runs) == 1 else (first,))
    labels = choose_labels(runs, rows)
    titles = run_titles(runs) if len(runs) > 1 else [run.name for run in runs]
    tables = [{row.label: row for row in summary(run.rows)} for run in runs]
    grids = [grid([table[label] for label in labels if label in table], keys, spread) for table in tables]
    parts = tuple(zip(titles, grids, strict=True))
    if not any(layout.headings for _, layout in parts):
        raise ConfigError(f"no run recorded {', '.join(keys)}; choose other columns")
    return Sheet(tuple(labels), parts, spread)


def choose_labels(runs: Sequence[Run], patterns: Sequence[str]) -> list[str]:
    """The labels of runs that patterns name, in the patterns' order; without any, all.

    Raises:
        ConfigError: if a pattern names none.
    """
    labels = list(dict.fromkeys(row["label"] for run in runs for row in run.rows))
    if not patterns:
        return labels
    chosen: dict[str, None] = {}
    for pattern in patterns:
        found = [label for label in labels if label == pattern or fnmatch.fnmatchcase(label, pattern)]
        if not found:
            raise ConfigError(f"there is no method {pattern!r} in these runs; they have {', '.join(labels)}")
        chosen |= dict.fromkeys(found)
    return list(chosen)


def write_markdown(sheet: Sheet) -> str:
    """Bold where best, in italics where tied."""
    shared, several = sheet.shared_heading, len(sheet.parts) > 1
    heads = [shared or "method"]
    for title, heading, _ in sheet.columns:
        name = markdown_text(title)  # what all columns share stands over the methods
        heads.append(name if shared is not None else f"{name}: {heading.text}" if several else heading.text)
    lines = [f"| {' | '.join(heads)} |", "|---|" + "---:|" * (len(heads) - 1)]
    for label in sheet.labels:
        words = [markdown_text(label)]
        for _, _, found in sheet.columns:
            cell = found.get(label, Cell("–"))
            text = " ".join(str(cell).split())
            words.append({"best": f"**{text}**", "tie": f"*{text}*", "": text}[cell.mark])
        lines.append(f"| {' | '.join(words)} |")
    return "\n".join(lines)


def write_latex(sheet: Sheet) -> str:
    """A `tabular` with rules of the package booktabs: bold where best, underlined where tied."""
    columns = sheet.columns
    lines = [
        "% needs \\usepackage{booktabs}",
        f"% {sheet.note.format(tie='underlined')}",
        f"\\begin{{tabular}}{{l{'r' * len(columns)}}}",
        "\\toprule",
        *_latex_heads(sheet),
        "\\midrule",
    ]
    for label in sheet.labels:
        cells = [latex_cell(found.get(label, Cell("–"))) for _, _, found in columns]
        lines.append(_latex_line([latex_text(label), *cells]))
    return "\n".join([*lines, "\\bottomrule", "\\end{tabular}"])


def _latex_heads(sheet: Sheet) -> list[str]:
    """One line of headings; of several runs with several scores a line of titles above it, each over its columns."""
    if sheet.shared_heading is not None:
        return [_latex_line([latex_text(sheet.shared_heading), *(latex_text(title) for title, _, _ in sheet.columns)])]
    texts = [latex_text(heading.text) for _, heading, _ in sheet.columns]
    below = _latex_line(["method", *texts])
    if len(sheet.parts) == 1:
        return [below]
    above, rules, at = [""], list[str](), 2
    for title, layout in sheet.parts:
        if width := len(layout.headings):
            above.append(f"\\multicolumn{{{width}}}{{c}}{{{latex_text(title)}}}")
            rules.append(f"\\cmidrule(lr){{{at}-{at + width - 1}}}")
            at += width
    return [_latex_line(above), " ".join(rules), below]


def _latex_line(words: Sequence[str]) -> str:
    return " & ".join(words) + r" \\"


def latex_cell(cell: Cell) -> str:
    r"""A number with its spread: bold where best, underlined where tied.

    Example:
        >>> print(latex_cell(Cell("1,234.5", "± 2.0", mark="best")))
        $\mathbf{1{,}234.5 \pm 2.0}$
    """
    if cell.value is None and cell.mean == "–":
        return "--"
    inside = f"{latex_number(cell.mean)} \\pm {latex_number(spread)}" if (spread := cell.sd.strip(" ±")) else ""
    inside = inside or latex_number(cell.mean)
    shown = {"best": f"$\\mathbf{{{inside}}}$", "tie": f"\\underline{{${inside}$}}", "": f"${inside}$"}[cell.mark]
    return f"{shown} {latex_text(cell.of)}" if cell.of else shown


def latex_number(number: str) -> str:
    """A number whose separators of thousands take no extra room."""
    return number.replace(",", "{,}")


_SPECIAL = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"\textquotedbl{}",
    "–": "--",
    "±": r"\ensuremath{\pm}",
    "×": r"\ensuremath{\times}",
    "≤": r"\ensuremath{\leq}",
    "≥": r"\ensuremath{\geq}",
    "∞": r"\ensuremath{\infty}",
    **{letter: f"\\{letter}" for letter in "&%$#_{}"},
}

_LATIN = dict(zip("ΑΒΕΖΗΙΚΜΝΟΡΤΧ", "ABEZHIKMNOPTX", strict=True))


def latex_text(text: str) -> str:
    r"""Words for LaTeX.

    Example:
        >>> print(latex_text("fedprox(mu=0.1) & 5 %_{α}"))
        fedprox(mu=0.1) \& 5 \%\_\{\ensuremath{\alpha}\}
    """
    return "".join(_SPECIAL.get(letter) or _greek(letter) or _plain(letter) for letter in legible(text))


def _greek(letter: str) -> str:
    """A Greek letter as a command, nothing for any other; capitals that look Latin are Latin."""
    name = unicodedata.name(letter, "")
    if not name.startswith("GREEK ") or " LETTER " not in name or " WITH " in name:
        return ""
    size, _, word = name.removeprefix("GREEK ").lower().partition(" letter ")
    word = {"lamda": "lambda", "final sigma": "varsigma"}.get(word, word)
    if size == "capital" and letter in _LATIN:
        return _LATIN[letter]
    return "o" if word == "omicron" else f"\\ensuremath{{\\{word.capitalize() if size == 'capital' else word}}}"


def _plain(letter: str) -> str:
    """A letter that LaTeX has by itself: those of Europe stay, others lose what makes them special."""
    if ord(letter) < 0x250:
        return letter
    return unicodedata.normalize("NFKD", letter).encode("ascii", "ignore").decode() or "?"


@dataclass(frozen=True, slots=True)
class Figures:
    """One number of a table with all that was found out about it, as files for machines have it."""

    run: str
    label: str
    method: str
    column: str
    mean: float
    sd: float | None
    low: float | None
    high: float | None
    n: int
    best: bool
    tie: bool


def figures(sheet: Sheet) -> Iterator[Figures]:
    """Every number of the sheet in its own unit: shares as shares, bytes as bytes."""
    for title, layout in sheet.parts:
        for row, cells in layout.lines:
            for heading, cell in zip(layout.headings, cells, strict=True):
                value = row.values.get(heading.column.key)
                if value is not None:
                    half = None if value.sd is None else half_width(value.sd, value.n)
                    yield Figures(
                        run=title,
                        label=row.label,
                        method=row.method,
                        column=heading.column.key,
                        mean=value.mean,
                        sd=value.sd,
                        low=None if half is None else value.mean - half,
                        high=None if half is None else value.mean + half,
                        n=value.n,
                        best=cell.mark == "best",
                        tie=cell.mark == "tie",
                    )


def as_data(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Every number of every run, for a machine: per run its name and what each method came to, seed by seed."""
    found = []
    for run in runs:
        sheet = make_sheet([run], columns=[column.key for column in COLUMNS])
        seeds = {row.label: row.by_seed for row in summary(run.rows)}
        entries = [{**asdict(f), "seeds": dict(seeds[f.label][f.column])} for f in figures(sheet)]
        found.append({"name": run.name, "scores": [{k: e[k] for k in e if k != "run"} for e in entries]})
    return found


def write_csv(sheet: Sheet) -> str:
    """One line per number, with everything known about it."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(Figures.__dataclass_fields__), lineterminator="\n")
    writer.writeheader()
    for found in figures(sheet):
        writer.writerow({k: spreadsheet_cell(v) if isinstance(v, str) else v for k, v in asdict(found).items()})
    return text.getvalue().rstrip("\n")


def write_json(sheet: Sheet) -> str:
    """The same as a list of objects."""
    return json.dumps([asdict(found) for found in figures(sheet)], indent=1, ensure_ascii=False)


WRITERS: Mapping[Format, Callable[[Sheet], str]] = {
    "md": write_markdown,
    "latex": write_latex,
    "csv": write_csv,
    "json": write_json,
}

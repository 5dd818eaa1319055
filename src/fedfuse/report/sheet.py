"""A table for a paper: methods by scores, of one run or several, as Markdown, LaTeX, CSV or JSON."""

from __future__ import annotations

import csv
import fnmatch
import io
import json
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

from fedfuse.core.escape import markdown_text, spreadsheet_cell
from fedfuse.errors import ConfigError
from fedfuse.report.read import Run
from fedfuse.report.scores import COLUMNS, EXPLAINED, SummaryRow, headline_of, summary
from fedfuse.report.stats import half_width
from fedfuse.report.svg import legible
from fedfuse.report.sweeps import run_titles
from fedfuse.report.tables import TELLING, Cell, Grid, Heading, Spread, grid

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


Format: TypeAlias = Literal["md", "latex", "csv", "json"]
SUFFIXES: Mapping[str, Format] = {".md": "md", ".tex": "latex", ".csv": "csv", ".json": "json"}


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
    keys = _known_columns(columns) or (TELLING if len(runs) == 1 else (first,))
    labels = choose_labels(runs, rows)
    titles = run_titles(runs) if len(runs) > 1 else [run.name for run in runs]
    grids = [grid(_in_order(summary(run.rows), labels), keys, spread) for run in runs]
    parts = tuple(zip(titles, grids, strict=True))
    if not any(layout.headings for _, layout in parts):
        raise ConfigError(f"no run recorded {', '.join(keys)}; choose other columns")
    return Sheet(tuple(labels), parts, spread)


def _known_columns(keys: Sequence[str]) -> tuple[str, ...]:
    known = [column.key for column in COLUMNS]
    for key in keys:
        if key not in known:
            raise ConfigError(f"there is no column {key!r}; expected some of {', '.join(known)}")
    return tuple(keys)


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


def _in_order(table: Sequence[SummaryRow], labels: Sequence[str]) -> list[SummaryRow]:
    rows = {row.label: row for row in table}
    return [rows[label] for label in labels if label in rows]


def figures(sheet: Sheet) -> Iterator[Figures]:
    """Every number of the sheet in its own unit: shares as shares, bytes as bytes."""
    for title, layout in sheet.parts:
        for row, cells in layout.lines:
            for heading, cell in zip(layout.headings, cells, strict=True):
                value = row.values.get(heading.column.key)
                if value is not None:
                    half = None if value.sd is None else half_width(value.sd, value.n)
                    low, high = (None, None) if half is None else (value.mean - half, value.mean + half)
                    marks = (cell.mark == "best", cell.mark == "tie")
                    ends = (value.mean, value.sd, low, high, value.n, *marks)
                    yield Figures(title, row.label, row.method, heading.column.key, *ends)


def as_data(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Every number of every run, for a machine: per run its name and what each method came to, seed by seed."""
    found = []
    for run in runs:
        sheet = make_sheet([run], columns=[column.key for column in COLUMNS])
        seeds = {row.label: row.by_seed for row in summary(run.rows)}
        entries = [{**asdict(f), "seeds": dict(seeds[f.label][f.column])} for f in figures(sheet)]
        found.append({"name": run.name, "scores": [{k: e[k] for k in e if k != "run"} for e in entries]})
    return found


def write_markdown(sheet: Sheet) -> str:
    """Bold where best, in italics where tied."""
    shared = sheet.shared_heading
    texts = [_flat_heading(title, heading, shared, len(sheet.parts) > 1) for title, heading, _ in sheet.columns]
    lines = [_markdown_line([shared or "method", *texts]), "|---|" + "---:|" * len(texts)]
    for label in sheet.labels:
        cells = [found.get(label, Cell("–")) for _, _, found in sheet.columns]
        lines.append(_markdown_line([markdown_text(label), *map(_markdown_cell, cells)]))
    return "\n".join(lines)


def _flat_heading(title: str, heading: Heading, shared: str | None, several: bool) -> str:
    """What a column has over it, in one line; what all columns share stands over the methods."""
    if shared is not None:
        return markdown_text(title)
    return f"{markdown_text(title)}: {heading.text}" if several else heading.text


def _markdown_cell(cell: Cell) -> str:
    text = " ".join(str(cell).split())
    return {"best": f"**{text}**", "tie": f"*{text}*", "": text}[cell.mark]


def _markdown_line(words: Iterable[str]) -> str:
    return f"| {' | '.join(words)} |"


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

"""Figures for papers, as PDF, SVG or PNG: one column wide, told apart without colour, fonts embedded."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedfuse.core.files import write_atomically
from fedfuse.errors import ConfigError
from fedfuse.report.costs import EPSILON, privacy_curves, spent_paths
from fedfuse.report.plots import SHARES, Groups, by_round, by_value, class_names, pooled_bins, spans_decades
from fedfuse.report.read import Run, differing_keys, finite, items, number, part, run_titles, sweep_panels
from fedfuse.report.scores import COLUMNS, MeanSd, by_label, last_rows, mean_sd, summary
from fedfuse.report.stats import Ranking
from fedfuse.report.svg import COLOURS, legible, look, short, wide
from fedfuse.report.tables import byte_unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


ENDINGS = (".pdf", ".svg", ".png")

STYLE = {
    "font.size": 8,
    "axes.labelsize": 8,
    "axes.titlesize": 8,
    "legend.fontsize": 7,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.5,
    "lines.linewidth": 1.3,
    "pdf.fonttype": 42,  # as text and not as curves: publishers ask for it
    "svg.fonttype": "none",
    "svg.hashsalt": "fedfuse",  # the same ledger, the same bytes
    "savefig.dpi": 300,
    "text.parse_math": False,  # a label is text, whatever it says
}

MARKERS = {"circle": "o", "square": "s", "up": "^", "diamond": "D", "down": "v", "plus": "P"}


@dataclass(frozen=True, slots=True)
class Plot:
    """What to draw of which runs.

    Attributes:
        runs: what they left.
        score: the key of the score on the axis.
        rows: labels to draw, all by default.
        width: inches; 3.35 is a column of most conferences.
        seed: whose partition.
        along: the key that a sweep's curves run along; by default the one with most values.
    """

    runs: Sequence[Run]
    score: str = "accuracy"
    rows: tuple[str, ...] = ()
    width: float = 3.35
    seed: int | None = None
    along: str = ""

    @property
    def run(self) -> Run:
        """The one run, for what shows one.

        Raises:
            ConfigError: if there are several.
        """
        if len(self.runs) > 1:
            raise ConfigError(f"this kind shows one run and {len(self.runs)} were given; choose one of them")
        return self.runs[0]

    @property
    def groups(self) -> Groups:
        """The one run's rows by label."""
        return {label: rows for label, rows in by_label(self.run.rows).items() if self.shows(label)}

    @property
    def indices(self) -> dict[str, int]:
        """Each label's look, the same whichever rows are chosen."""
        return {label: at for at, label in enumerate(dict.fromkeys(r["label"] for run in self.runs for r in run.rows))}

    @property
    def axis(self) -> str:
        """The score's name with its unit."""
        title = next((column.title for column in COLUMNS if column.key == self.score), self.score.replace("_", " "))
        return f"{title} (%)" if self.factor == 100 else title

    @property
    def factor(self) -> float:
        """100 for shares, which are drawn in per cent."""
        kinds = {column.key: column.kind for column in COLUMNS}
        return 100.0 if kinds.get(self.score) == "share" or self.score in SHARES else 1.0

    def shows(self, label: str) -> bool:
        """Whether a method is wanted."""
        return not self.rows or label in self.rows


def save_figure(kind: str, plot: Plot, out: Path) -> Path:
    """Draw a kind of figure into a file, whose ending says its format.

    Raises:
        ConfigError: if there is no such kind or format, or nothing to draw.
    """
    if kind not in KINDS:
        raise ConfigError(f"--kind is {kind!r}, expected one of {', '.join(KINDS)}")
    with paper_style() as figure:
        KINDS[kind](figure, plot)
        return save_to(figure, out)


@contextmanager
def paper_style() -> Iterator[Figure]:
    """An empty figure in the style of all."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):  # type: ignore[arg-type]
        yield Figure(layout="constrained")


def save_to(figure: Figure, out: Path) -> Path:
    """Write a figure, the same bytes for the same figure."""
    if out.suffix not in ENDINGS:
        raise ConfigError(f"{out} ends with {out.suffix or 'nothing'!r}, expected one of {', '.join(ENDINGS)}")
    dates: dict[str, dict[str, Any]] = {".pdf": {"CreationDate": None}, ".svg": {"Date": None}, ".png": {}}
    with write_atomically(out) as file:
        figure.savefig(file, format=out.suffix[1:], metadata=dates[out.suffix])
    return out


def draw_curve(figure: Figure, plot: Plot) -> None:
    """A score against the round: mean over seeds, and one standard deviation."""
    curves = {label: curve for label, rows in plot.groups.items() if (curve := by_round(rows, plot.score))}
    curves = {label: curve for label, curve in curves.items() if len(curve) > 1}
    _need(curves, f"no method of this run has {plot.score} in two rounds; --kind sweep or heat shows one round")
    from matplotlib.ticker import MaxNLocator

    axes = _axes(figure, plot, list(curves))
    rounds = max(len(curve) for curve in curves.values())
    _draw_bands(axes, curves, plot, every=max(1, rounds // 8))
    _widen(axes, plot.factor)
    axes.set(xlabel="round", ylabel=plot.axis)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _legend(figure, [axes], plot)


def draw_sweep(figure: Figure, plot: Plot) -> None:
    """A score of the last round against a key with numbers that the runs differ in, a panel per value of the others."""
    panels = sweep_panels(plot.runs, plot.along)
    if not panels:
        differ = ", ".join(differing_keys(plot.runs)) or "nothing"
        raise ConfigError(
            f"these runs differ in {differ}, expected those of a sweep with a key of numbers"
            f"{f' {plot.along!r}' if plot.along else ''} at which runs differ in nothing else"
        )
    each = [by_value(panel.runs, panel.swept, plot.score) for panel in panels]
    each = [{label: curve for label, curve in curves.items() if plot.shows(label)} for curves in each]
    labels = dict.fromkeys(label for curves in each for label in curves)
    _need(labels, f"no run has {plot.score}")
    grid = _panel_axes(figure, plot, list(labels), len(panels))
    for axes, panel, curves in zip(grid, panels, each, strict=True):
        _draw_bands(axes, curves, plot)
        if spans_decades(panel.swept):
            _set_decades(axes)
        axes.set_title(short(legible(panel.title), 28))
        axes.set_xlabel(panel.swept.title)
        axes.label_outer(remove_inner_ticks=False)
    grid[0].set_ylabel(plot.axis)
    _widen(grid[0], plot.factor)
    _legend(figure, grid, plot)


def _panel_axes(figure: Figure, plot: Plot, labels: Sequence[str], count: int) -> list[Axes]:
    """As many axes as panels, side by side as far as the width goes, with one axis of scores."""
    if count == 1:
        return [_axes(figure, plot, labels)]
    across = min(count, max(2, round(plot.width / 1.7)))
    down = math.ceil(count / across)
    lines = math.ceil(len(labels) / _legend_columns(labels, plot.width))
    figure.set_size_inches(plot.width, down * (0.85 * plot.width / across + 0.3) + 0.14 * lines + 0.1)
    grid = figure.subplots(down, across, sharex=True, sharey=True, squeeze=False)
    for axes in grid.flat[count:]:
        axes.set_axis_off()
    return list(grid.flat[:count])


def draw_privacy(figure: Figure, plot: Plot) -> None:
    """A score of the last round against ε, on a logarithmic axis; level lines are without noise."""
    found = {name: c for name, c in privacy_curves(plot.runs, plot.score).items() if plot.shows(c.label)}
    _need(found, f"no method has {plot.score} at two values of epsilon")
    axes = _axes(figure, plot, [words for name in found for words in (name, f"{name}, no noise")])
    for at, (name, curve) in enumerate(found.items()):
        values, style = curve.by_epsilon, _look(at)
        mean = plot.factor * np.array([value.mean for value in values.values()])
        sd = plot.factor * np.array([value.sd or 0.0 for value in values.values()])
        axes.errorbar(list(values), mean, sd, label=name, capsize=2, elinewidth=0.8, **style)
        if curve.plain is not None:
            level, spread = plot.factor * curve.plain.mean, plot.factor * (curve.plain.sd or 0.0)
            axes.axhline(level, label=f"{name}, no noise", color=style["color"], linestyle=(0, (4, 3)), linewidth=0.9)
            axes.axhspan(level - spread, level + spread, color=style["color"], alpha=0.13, linewidth=0)
    _set_decades(axes)
    _widen(axes, plot.factor)
    axes.set(xlabel=EPSILON, ylabel=plot.axis)
    _legend(figure, [axes], plot)


def draw_bytes(figure: Figure, plot: Plot) -> None:
    """Accuracy against the bytes sent so far, both ways, round after round."""
    paths = {label: path for label, path in spent_paths(plot.groups, ("bytes_up", "bytes_down")).items() if path[-1][0]}
    _need(paths, "no method of this run has accuracy and bytes")
    spent = [at for path in paths.values() for at, _ in path]
    size, unit = byte_unit(max(spent))
    axes = _axes(figure, plot, list(paths))
    for label, path in paths.items():
        style = _look(plot.indices[label])
        x, y = [at / size for at, _ in path], [100 * value.mean for _, value in path]
        axes.plot(x, y, label=label, markevery=[len(x) - 1], **style)
        axes.errorbar(x[-1], y[-1], 100 * (path[-1][1].sd or 0.0), color=style["color"], linewidth=0.8, capsize=2)
    if wide(spent):
        _set_decades(axes)
    axes.set(xlabel=f"sent up and down ({unit})", ylabel="accuracy (%)")
    _legend(figure, [axes], plot)


def draw_reliability(figure: Figure, plot: Plot) -> None:
    """How often each model is right when it says so, one square per method."""
    found = {label: bins for label, rows in plot.groups.items() if (bins := pooled_bins(last_rows(rows)))}
    _need(found, "this run recorded no reliability")
    across = min(len(found), max(1, round(plot.width / 1.15)))
    down = math.ceil(len(found) / across)
    figure.set_size_inches(plot.width, plot.width / across * down + 0.25 * down)
    grid = figure.subplots(down, across, sharex=True, sharey=True, squeeze=False)
    for axes, (label, bins) in zip(grid.flat, found.items(), strict=False):
        said, right, _ = (np.array(column) for column in zip(*bins, strict=True))
        colour = COLOURS[look(plot.indices[label]).colour]
        axes.bar(said, right, 0.06, color=colour, alpha=0.85, linewidth=0)
        axes.bar(said, said - right, 0.06, bottom=right, color=colour, alpha=0.22, linewidth=0)
        axes.plot([0, 1], [0, 1], color="#333333", linewidth=0.7, linestyle=(0, (4, 3)))
        ece = mean_sd(number(row, "ece") for row in last_rows(plot.groups[label]))
        words = "" if ece is None else f"\nECE {100 * ece.mean:.1f} %"
        axes.set_title(short(legible(label), 18) + words, fontsize=7)
        axes.set(xlim=(0, 1), ylim=(0, 1), aspect="equal", xticks=(0, 0.5, 1), yticks=(0, 0.5, 1))
    for axes in grid.flat[len(found) :]:
        axes.set_axis_off()
    figure.supxlabel("confidence", fontsize=8)
    figure.supylabel("accuracy", fontsize=8)


def draw_partition(figure: Figure, plot: Plot) -> None:
    """Rows of each class at each client: the area of a disc is the number of rows."""
    seeds = part(plot.run.partition, "seeds")
    chosen = str(plot.seed) if plot.seed is not None else next(iter(seeds), "")
    if chosen not in seeds:
        has = ", ".join(seeds) or "none"
        raise ConfigError(f"{plot.run.name} has no partition of seed {chosen or 'any'}; it has those of {has}")
    clients = part(part(seeds, chosen), "clients")
    counts = np.array([[finite(n) or 0.0 for n in items(clients, name)] for name in clients])
    classes = class_names([str(name) for name in items(plot.run.partition, "classes")], counts.shape[1])
    _need(clients, "this run recorded no partition")
    step = plot.width * 0.8 / max(len(clients), len(classes) * 1.2)
    figure.set_size_inches(plot.width, min(9.0, max(1.6, step * len(classes) + 0.7)))
    axes = figure.subplots()
    x, y = np.meshgrid(np.arange(len(clients)), np.arange(len(classes)), indexing="ij")
    side = 72 * step * 0.95  # points
    axes.scatter(x, y, s=(side**2) * counts / counts.max(), color=COLOURS[0], linewidth=0, clip_on=False)
    names = [short(legible(name), 12) for name in clients]
    shown = range(len(names)) if len(names) <= 15 else range(0, len(names), math.ceil(len(names) / 10))
    axes.set_xticks(list(shown), [names[at] for at in shown], **_tick_style(names))
    axes.set_yticks(range(len(classes)), [short(legible(name), 14) for name in classes])
    axes.set(xlim=(-0.6, len(clients) - 0.4), ylim=(len(classes) - 0.4, -0.6), xlabel="client", ylabel="class")


def draw_heat(figure: Figure, plot: Plot) -> None:
    """Of one run the accuracy of each method on each class; of several each method's score in each run."""
    if len(plot.runs) == 1:
        found = {label: _class_accuracy(rows) for label, rows in plot.groups.items()}
        found = {label: row for label, row in found.items() if row}
        _need(found, "this run recorded no accuracy per class")
        width = max(map(len, found.values()))
        columns = class_names([str(name) for name in items(plot.run.partition, "classes")], width)
        values = 100 * np.array([row + [math.nan] * (width - len(row)) for row in found.values()])
        words = "accuracy (%)"
    else:
        columns, words = run_titles(plot.runs), plot.axis
        tables = [{row.label: row.values for row in summary(run.rows)} for run in plot.runs]
        found = {
            label: [t[label][plot.score].mean if plot.score in t.get(label, {}) else math.nan for t in tables]
            for label in plot.indices
            if plot.shows(label)
        }
        _need({key: row for key, row in found.items() if not all(map(math.isnan, row))}, f"no run has {plot.score}")
        values = plot.factor * np.array(list(found.values()))
    _draw_cells(figure, plot, list(found), columns, values, words)


def _class_accuracy(rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """Mean over seeds for each class."""
    lists = [items(row, "per_class") for row in last_rows(rows)]
    size = max(map(len, lists), default=0)
    means = [mean_sd(finite(scores[at]) for scores in lists if at < len(scores)) for at in range(size)]
    return [math.nan if value is None else value.mean for value in means]


def _draw_cells(
    figure: Figure, plot: Plot, rows: Sequence[str], columns: Sequence[str], values: np.ndarray, words: str
) -> None:
    figure.set_size_inches(plot.width, min(9.0, 0.2 * len(rows) + 0.95))
    axes = figure.subplots()
    image = axes.imshow(values, cmap="cividis", aspect="auto")
    low, high = float(np.nanmin(values)), float(np.nanmax(values))
    names = [short(legible(name), 24) for name in rows]
    room = plot.width - 0.055 * max(map(len, names)) - 0.75  # what names and the colour bar leave
    size = min(7.0, 72 * room / len(columns) / 2.3)
    for (i, j), value in np.ndenumerate(values):
        if size >= 4 and not math.isnan(value):
            bright = (value - low) / ((high - low) or 1.0) > 0.55
            text = f"{value:.0f}" if high > 10 else f"{value:.2f}"
            axes.text(j, i, text, ha="center", va="center", fontsize=size, color="black" if bright else "white")
    axes.set_xticks(range(len(columns)), [short(legible(name), 16) for name in columns], **_tick_style(columns))
    axes.set_yticks(range(len(rows)), names)
    axes.grid(visible=False)
    figure.colorbar(image, ax=axes, label=words, pad=0.02)


KINDS: Mapping[str, Callable[[Figure, Plot], None]] = {
    "curve": draw_curve,
    "sweep": draw_sweep,
    "privacy": draw_privacy,
    "bytes": draw_bytes,
    "reliability": draw_reliability,
    "partition": draw_partition,
    "heat": draw_heat,
}


def _look(index: int) -> dict[str, Any]:
    """How matplotlib draws a method's curve."""
    found = look(index)
    dash = (0, tuple(length / 2 for length in found.dash)) if found.dash else "-"
    return {"color": COLOURS[found.colour], "linestyle": dash, "marker": MARKERS[found.shape], "markersize": 3.6}


def _axes(figure: Figure, plot: Plot, labels: Sequence[str], ratio: float = 0.68) -> Axes:
    """One pair of axes with room for the legend below them."""
    columns = _legend_columns(labels, plot.width)
    lines = math.ceil(len(labels) / columns)
    figure.set_size_inches(plot.width, plot.width * ratio + 0.14 * lines + 0.1)
    return figure.subplots()


def _legend_columns(labels: Sequence[str], width: float) -> int:
    longest = max(len(short(label, 28)) for label in labels)
    return max(1, min(len(labels), int(width / (0.055 * longest + 0.42))))


def _legend(figure: Figure, grid: Sequence[Axes], plot: Plot) -> None:
    """One legend for all axes, which may not show the same methods."""
    named: dict[str, Any] = {}
    for axes in grid:
        handles, words = axes.get_legend_handles_labels()
        named |= dict(zip(words, handles, strict=True))
    labels = list(named)
    columns = _legend_columns(labels, plot.width)
    figure.legend(
        list(named.values()),
        [short(legible(label), 28) for label in labels],
        loc="outside lower center",
        ncols=columns,
        frameon=False,
        handlelength=2.6,
        columnspacing=1.0,
        labelspacing=0.25,
    )


def _need(found: Mapping[str, Any], words: str) -> None:
    if not found:
        raise ConfigError(f"there is nothing to draw: {words}")


def _draw_bands(axes: Axes, curves: Mapping[str, Mapping[float, MeanSd]], plot: Plot, every: int = 1) -> None:
    for label, curve in curves.items():
        at = np.array(list(curve))
        mean = plot.factor * np.array([value.mean for value in curve.values()])
        sd = plot.factor * np.array([value.sd or 0.0 for value in curve.values()])
        style = _look(plot.indices[label])
        axes.plot(at, mean, label=label, markevery=every, **style)
        axes.fill_between(at, mean - sd, mean + sd, color=style["color"], alpha=0.13, linewidth=0)


def _set_decades(axes: Axes) -> None:
    """A logarithmic axis below, with numbers in plain words: signs of mathematics are not read in labels."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axes.set_xscale("log")
    low, high = axes.get_xlim()
    if high < 100 * low:
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _widen(axes: Axes, factor: float) -> None:
    """An axis of shares spans four points at least, and stays within 0 and 100 %."""
    low, high = axes.get_ylim()
    if factor != 100:
        return
    room = max(0.0, 4.0 - (high - low)) / 2
    axes.set_ylim(max(0.0, low - room) if low >= -5 else low, min(100.0, high + room) if high <= 110 else high)


def _tick_style(names: Sequence[str]) -> dict[str, Any]:
    """How names stand below an axis: those that are longer than numbers lean."""
    return {"rotation": 35, "ha": "right"} if max(map(len, names)) > 3 else {}


def save_diagram(ranking: Ranking, out: Path, width: float = 3.35) -> Path:
    """Draw mean ranks on a line, with bars over those that are not told apart, into a .pdf, .svg or .png file.

    Raises:
        ConfigError: if the file has another ending or cannot be written.
    """
    with paper_style() as figure:
        _draw_diagram(figure, ranking, width)
        return save_to(figure, out)


def _draw_diagram(figure: Figure, ranking: Ranking, width: float) -> None:
    """Names left and right of the line, each joined to its mean rank, as Demšar draws them."""
    names, count = list(ranking.ranks), len(ranking.ranks)
    half = math.ceil(count / 2)
    figure.set_size_inches(width, 0.62 + 0.17 * half + 0.1 * len(ranking.alike))
    axes = figure.subplots()
    depth = 0.55 * len(ranking.alike) + 0.6
    axes.set(xlim=(count + 0.05, 0.95), ylim=(-(depth + half), 1.9))
    axes.set_axis_off()
    axes.plot([1, count], [0, 0], color="black", linewidth=0.9)
    for rank in range(1, count + 1):
        axes.plot([rank, rank], [0, 0.18], color="black", linewidth=0.9)
        axes.text(rank, 0.28, str(rank), ha="center", va="bottom", fontsize=7)
    axes.plot([1, min(count, 1 + ranking.distance)], [1.35, 1.35], color="black", linewidth=1.2)
    axes.text(1, 1.45, f"critical difference {ranking.distance:.2f}", ha="right", va="bottom", fontsize=6.5)
    for at, name in enumerate(names):
        left = at >= half
        level = -(depth + (count - 1 - at if left else at) + 0.2)
        end, side = (count, "right") if left else (1, "left")
        axes.plot([ranking.ranks[name]] * 2 + [end], [0, level, level], color="#444444", linewidth=0.7)
        text = f"{short(legible(name), 22)} {ranking.ranks[name]:.2f}"
        axes.text(end + (0.04 if left else -0.04), level, text, ha=side, va="center", fontsize=7)
    for at, group in enumerate(ranking.alike):
        ends = [ranking.ranks[group[0]] - 0.04, ranking.ranks[group[-1]] + 0.04]
        axes.plot(ends, [-0.45 - 0.55 * at] * 2, color="black", linewidth=2.6, solid_capstyle="round")

"""Who holds what, as a heat map: in the terminal and as a picture.

Colour follows the square root of the count, so that a handful of rows shows next to thousands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.style import Style
from rich.table import Table
from rich.text import Text
from torch import Tensor

from fedfuse.core.files import write_atomically
from fedfuse.errors import ConfigError

# Dark blue-green to pale yellow; light enough at the start to be told from a black terminal.
PALETTE = ("#1d3b53", "#1f5673", "#1f7288", "#238f91", "#43ab8e", "#7ac47f", "#b9d86f", "#f4e76e")
NOTHING = "#151b22"
SHADES = " ░▒▓█"
COMPACT_ROWS = 40
LAYOUTS = ((10, True), (6, True), (4, True), (4, False))
"""How far class names are shortened, and whether bars are drawn, before numbers give way to dots."""
PAPER = ("#f1f4f3", "#cfe6dd", "#8fcabb", "#43a3a0", "#1f7288", "#1d4a68", "#14283f")
INK = "#24333d"
UPRIGHT = 30
"""Up to this many clients, each is a line of the picture; beyond, each is a column."""
MARKS = 40
"""The most names along an axis."""


@dataclass(frozen=True, slots=True, eq=False)
class HeatMap:
    """Counts (clients × classes) that rich can print: numbers if they fit, coloured dots if not."""

    counts: Tensor
    client_ids: tuple[str, ...]
    class_names: tuple[str, ...]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        few = len(self.client_ids) <= COMPACT_ROWS and len(self.class_names) <= COMPACT_ROWS
        for table in (self._table(*layout) for layout in LAYOUTS if few):
            if Measurement.get(console, options.update(width=10_000), table).maximum <= options.max_width:
                yield table
                return
        yield from self._compact(console, options.max_width)

    def _table(self, name_width: int, with_bars: bool) -> Table:
        """One line per client, one column per class, the number of rows in each cell."""
        table = Table(box=None, padding=(0, 0), pad_edge=False)
        table.add_column("client ", style="bold", no_wrap=True)
        names = [_short(name, name_width) for name in self.class_names]
        widths = [max(len(str(int(c.max()))), len(n)) for c, n in zip(self.counts.T, names, strict=True)]
        for name in names:
            table.add_column(Text(f" {name}"), justify="right", no_wrap=True)
        table.add_column(" rows", justify="right", no_wrap=True)
        table.add_column("")
        total, heat = self.counts.sum(1), _heat(self.counts)
        for row, client in enumerate(self.client_ids):
            values = zip(self.counts[row].tolist(), heat[row].tolist(), widths, strict=True)
            length = max(1, round(12 * int(total[row]) / max(1, int(total.max())))) if with_bars else 0
            bar = Text(" " * with_bars + "━" * length, style=PALETTE[3])
            table.add_row(f"{client} ", *(_cell(*value) for value in values), f" {int(total[row])}", bar)
        return table

    def _compact(self, console: Console, width: int) -> RenderResult:
        """One line per class (or per client when classes are more), the others side by side as dots."""
        wide = len(self.client_ids) >= len(self.class_names)
        heat = _heat(self.counts).T if wide else _heat(self.counts)
        names, across = (self.class_names, "clients") if wide else (self.client_ids, "classes")
        label = min(16, max(map(len, names))) + 1
        dots = _dots(console, heat.shape[1], width - label)
        step, group = _group_size(heat.shape[0], COMPACT_ROWS), _group_size(heat.shape[1], dots.room(width - label))
        image = _average_lines(_average_lines(heat, step).T, group).T
        brightest = float(image.max()) or 1.0  # Means are paler than what they are means of.
        for line, values in enumerate((image / brightest).tolist()):
            text = Text(no_wrap=True)
            text.append(_short(names[line * step], label - 1).ljust(label), "bold")
            yield text.append_text(dots.draw(values))
        means = f", each dot the mean of {group}" if group > 1 else ""
        yield Text(f"{heat.shape[1]} {across} from left to right{means}", style="dim")


def heat_map(counts: Tensor, client_ids: Sequence[str], class_names: Sequence[str]) -> HeatMap:
    """A heat map for the terminal: print it with rich.

    Args:
        counts: rows per client and class.
        client_ids: the names of the rows of `counts`.
        class_names: the names of its columns.

    Example:
        >>> Console(width=60).print(heat_map(torch.tensor([[5, 0], [0, 7]]), ["a", "b"], ["cat", "dog"]))
        client  cat  dog  rows
        a         5    ·     5 ━━━━━━━━━
        b         ·    7     7 ━━━━━━━━━━━━
    """
    if tuple(counts.shape) != (len(client_ids), len(class_names)):
        raise ConfigError(
            f"heat map: counts have shape {tuple(counts.shape)}, expected {len(client_ids)} clients by "
            f"{len(class_names)} classes; pass the names that belong to them"
        )
    return HeatMap(counts, tuple(client_ids), tuple(class_names))


def _heat(counts: Tensor) -> Tensor:
    """Counts as numbers in [0, 1], by their square root."""
    return (counts.double() / counts.max().clamp(min=1)).sqrt()


def _average_lines(image: Tensor, step: int) -> Tensor:
    """Neighbouring lines averaged, `step` at a time."""
    return torch.stack([image[i : i + step].mean(0) for i in range(0, len(image), step)])


def _colour(heat: float) -> str:
    return NOTHING if not heat else PALETTE[min(len(PALETTE) - 1, int(heat * len(PALETTE)))]


def _cell(count: int, heat: float, width: int) -> Text:
    """A count on its colour, as wide as its column so that the colours touch."""
    if not count:
        return Text("·", style="dim")
    ink = "#10202b" if heat >= 0.5 else "#f2f2f2"
    return Text(f" {count:>{width}}", style=Style(color=ink, bgcolor=_colour(heat)))


@dataclass(frozen=True, slots=True)
class _Dots:
    """A way to draw a line of values: how many in a character, and how."""

    per_character: int
    draw: Callable[[list[float]], Text]

    def room(self, characters: int) -> int:
        """How many values fit into this width."""
        return max(1, characters) * self.per_character


def _dots(console: Console, values: int, characters: int) -> _Dots:
    """The roomiest way that fits: shades without colour, whole characters, or half characters."""
    if console.color_system is None:
        return _Dots(1, _shade_blocks)
    return _Dots(1, _blocks) if values <= characters else _Dots(2, _half_blocks)


def _blocks(values: list[float]) -> Text:
    """One value a character."""
    text = Text()
    for value in values:
        text.append("█", Style(color=_colour(value)))
    return text


def _half_blocks(values: list[float]) -> Text:
    """Two values a character: the left half is ink, the right half is ground."""
    text = Text()
    for left, right in zip_longest(values[::2], values[1::2]):
        text.append("▌", Style(color=_colour(left), bgcolor=None if right is None else _colour(right)))
    return text


def _shade_blocks(values: list[float]) -> Text:
    """One value a character, for terminals without colour; anything above zero leaves a trace."""
    return Text("".join(SHADES[1 + min(3, int(4 * value)) if value else 0] for value in values))


def _group_size(lines: int, room: int) -> int:
    """How many neighbours must share a line so that all fit."""
    return -(-lines // room)


def _short(name: str, width: int) -> str:
    return name if len(name) <= width else name[: width - 1] + "…"


def save_heat_map(
    path: Path | str,
    counts: Tensor,
    client_ids: Sequence[str],
    class_names: Sequence[str],
    title: str = "Who holds what",
) -> Path:
    """The heat map as a PNG file, with a bar for the number of rows of each client.

    Args:
        path: where to write.
        counts: rows per client and class.
        client_ids: the names of the rows of `counts`.
        class_names: the names of its columns.
        title: what stands above the picture.

    Returns:
        The path.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    heat_map(counts, client_ids, class_names)  # Refuses names that do not fit the counts.
    figure = Figure(figsize=_inches(*counts.shape), layout="constrained")
    FigureCanvasAgg(figure)
    _paint(figure, counts, client_ids, class_names)
    figure.suptitle(f"{title}: {len(client_ids)} clients, {int(counts.sum()):,} rows", color=INK, weight="bold")
    with write_atomically(Path(path)) as file:
        figure.savefig(file, format="png", dpi=150, facecolor="white", metadata={"Software": None})
    return Path(path)


def _inches(clients: int, classes: int) -> tuple[float, float]:
    """The size of the picture: roomy cells for few clients, a wide strip for many."""
    if clients <= UPRIGHT:
        return min(16.0, max(4.5, 0.6 * classes) + 3.2), max(2.0, 0.36 * clients) + 1.5
    return min(16.0, max(9.0, 0.12 * clients + 2.0)), min(14.0, max(2.0, 0.3 * classes)) + 2.6


def _paint(figure: Any, counts: Tensor, client_ids: Sequence[str], class_names: Sequence[str]) -> None:
    """The heat map, a bar per client at its side (or above it), and the scale."""
    upright = len(client_ids) <= UPRIGHT
    if upright:
        cells, bars = figure.subplots(1, 2, sharey=True, width_ratios=(5, 1))
    else:
        bars, cells = figure.subplots(2, 1, sharex=True, height_ratios=(1, 4))
    mesh = _paint_cells(cells, counts if upright else counts.T)
    clients, classes = [_short(n, 16) for n in client_ids], [_short(n, 16) for n in class_names]
    _name_axis(cells, "y" if upright else "x", clients)
    _name_axis(cells, "x" if upright else "y", classes)
    _paint_bars(bars, counts.sum(1), upright)
    scale = figure.colorbar(mesh, ax=[cells, bars], pad=0.015, aspect=30, fraction=0.05)
    scale.set_label("rows of a class", color=INK)
    scale.outline.set_visible(False)
    scale.ax.tick_params(colors=INK, length=0, labelsize=8)


def _paint_cells(axes: Any, table: Tensor) -> Any:
    """Coloured cells, with their numbers where there is room to read them."""
    from matplotlib.colors import LinearSegmentedColormap, PowerNorm

    lines, columns = table.shape
    few = lines <= UPRIGHT and columns <= UPRIGHT
    scale = PowerNorm(0.5, vmin=0, vmax=max(1, int(table.max())))
    colours = LinearSegmentedColormap.from_list("rows", PAPER)
    gap = 1.2 if few else 0.3 if max(lines, columns) <= 250 else 0.0
    mesh = axes.pcolormesh(table.numpy(), cmap=colours, norm=scale, edgecolors="white", linewidth=gap)
    axes.invert_yaxis()
    axes.spines[:].set_visible(False)
    for line, column in table.nonzero().tolist() if few else ():
        count = int(table[line, column])
        ink = "white" if scale(count) > 0.55 else INK
        axes.text(column + 0.5, line + 0.5, count, ha="center", va="center", fontsize=8, color=ink)
    return mesh


def _name_axis(axes: Any, which: str, names: Sequence[str]) -> None:
    """Names along an axis: all of them, or every n-th where they would touch."""
    step = _group_size(len(names), MARKS)
    shown = list(range(0, len(names), step))
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_ticks([at + 0.5 for at in shown], [names[at] for at in shown])
    crowded = which == "x" and max(map(len, names)) > 6
    axis.set_tick_params(length=0, colors=INK, labelsize=8, rotation=60 if crowded else 0)
    for label in axis.get_ticklabels() if crowded else ():
        label.set(ha="right", rotation_mode="anchor")


def _paint_bars(axes: Any, totals: Tensor, upright: bool) -> None:
    """How many rows each client has."""
    at = [position + 0.5 for position in range(len(totals))]
    (axes.barh if upright else axes.bar)(at, totals.tolist(), 0.72 if len(totals) <= 250 else 1.0, color=PAPER[3])
    (axes.set_xlabel if upright else axes.set_ylabel)("rows", color=INK)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, colors=INK, labelsize=8)
    (axes.xaxis if upright else axes.yaxis).set_major_locator(_few_ticks())
    axes.grid(axis="x" if upright else "y", color="#d9dfdf", linewidth=0.6)
    axes.set_axisbelow(True)


def _few_ticks() -> Any:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(nbins=3, integer=True)

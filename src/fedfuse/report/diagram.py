"""The critical-difference diagram: mean ranks over data sets, and who is not told apart."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from fedfuse.report.paper import paper_style, save_to
from fedfuse.report.stats import Ranking
from fedfuse.report.svg import legible, short

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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

"""What an answer costs where several networks may give it, against how good it is."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from fedfuse.report.heat import WIDTH
from fedfuse.report.plots import LEAST_SHARE, Figure, Groups, Inks, edges_of
from fedfuse.report.read import Row, number, part
from fedfuse.report.scores import MeanSd, last_rows, mean_sd
from fedfuse.report.svg import drawing, ink, marker, scale_for, tag, wide, x_axis, y_axis

TITLE = "What an answer costs"


def answer_cost(groups: Groups, inks: Inks) -> Figure | None:
    """Accuracy against the work of one answer, in per cent of running every client's network.

    Only methods that noted a cost are shown, and nothing where all cost the same: then there is no choice to make.

    Example:
        >>> rows = {"all": [{"seed": 0, "round": 1, "accuracy": 0.8, "facts": {"cost": 1.0}}],
        ...         "few": [{"seed": 0, "round": 1, "accuracy": 0.7, "facts": {"cost": 0.3}}]}
        >>> "few: 70.0 % for 30 % of the work" in answer_cost(rows, {"all": 0, "few": 1}).picture
        True
    """
    points = {label: point for label, rows in groups.items() if (point := _point(last_rows(rows)))}
    costs = [100 * cost.mean for cost, _ in points.values()]
    if not costs or min(costs) <= 0 or max(costs) - min(costs) < 0.1:
        return None
    log = wide(costs)
    x = scale_for(costs, 46, WIDTH - 14, log=log)
    edges = [edge for _, score in points.values() for edge in edges_of(score)]
    y = scale_for(edges, 238, 22, least=LEAST_SHARE)
    axes = (
        y_axis(y, 46, WIDTH - 8, "accuracy, %", {at: f"{100 * at:g}" for at in y.ticks()}),
        x_axis(x, 22, 238, "multiplications per input, % of all networks'", {at: f"{at:g}" for at in x.ticks()}),
    )
    marks = []
    for label, (cost, score) in points.items():
        at, (low, high) = 100 * cost.mean, edges_of(score)
        words = f"{label}: {100 * score.mean:.1f} % for {at:.3g} % of the work"
        marks += [
            tag("path", d=f"M{x(at):.1f} {y(low):.1f}V{y(high):.1f}", class_=f"bar {ink(inks[label])}"),
            marker(inks[label], x(at), y(score.mean), 4.5, words),
        ]
    note = "Up and to the left is better; bars reach one standard deviation." + (" Logarithmic scale." if log else "")
    return Figure(TITLE, drawing(WIDTH, 274, TITLE, *axes, Markup("").join(marks)), note, tuple(points))


def _point(rows: Sequence[Row]) -> tuple[MeanSd, MeanSd] | None:
    cost, score = (
        mean_sd(number(part(row, "facts"), "cost") for row in rows),
        mean_sd(number(r, "accuracy") for r in rows),
    )
    return (cost, score) if cost is not None and score is not None else None

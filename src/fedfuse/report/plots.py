"""The page's figures, each a function of ledger rows: curves, marks of seeds and clients, heat maps, reliability."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from markupsafe import Markup

from fedfuse.report.read import Panel, Row, Run, Swept, finite, items, number, part
from fedfuse.report.scores import Column, MeanSd, headline_of, last_rows, mean_sd, summary
from fedfuse.report.svg import (
    WIDTH,
    Scale,
    band,
    drawing,
    heat_map,
    ink,
    line,
    marker,
    scale_for,
    short,
    tag,
    wide,
    x_axis,
    y_axis,
)

Groups = Mapping[str, Sequence[Row]]
"""Label → its rows, by round and seed."""

Inks = Mapping[str, int]
"""Label → its index in the palette, the same in every figure of a page."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A drawing with the words around it; `legend` names the methods whose marks it uses."""

    title: str
    picture: Markup
    note: str = ""
    legend: tuple[str, ...] = ()


SHARES = ("accuracy", "exact", "ece")

LEAST_SHARE = 0.04
"""Axes of shares span at least so much, so that differences that do not matter look as small as they are."""


def learning_curve(groups: Groups, inks: Inks, key: str, title: str) -> Figure | None:
    """A score against the round: the mean over seeds, and mean ± one standard deviation.

    Example:
        >>> rows = [{"seed": 0, "round": at, "accuracy": 0.1 * at} for at in (1, 2)]
        >>> learning_curve({"wb": rows}, {"wb": 0}, "accuracy", "Accuracy").legend
        ('wb',)
    """
    curves = {label: by_round(rows, key) for label, rows in groups.items()}
    return curve_figure(curves, inks, title, XAxis("round", whole=True), share=key in SHARES)


def by_round(rows: Sequence[Row], key: str) -> dict[float, MeanSd]:
    """A score's mean and standard deviation over seeds, round by round."""
    rounds = sorted({row["round"] for row in rows})
    found = {at: mean_sd(number(row, key) for row in rows if row["round"] == at) for at in rounds}
    return {at: value for at, value in found.items() if value is not None}


def sweep_curves(panels: Sequence[Panel], inks: Inks, key: str, title: str) -> list[Figure | None]:
    """A score of the last round against the key that a sweep varies: the mean over seeds, and one standard deviation.

    A sweep over several keys is one figure per value of the others, all with the same axis of scores.

    Example:
        >>> runs = [Run("", "", {}, {}, ({"label": "wb", "seed": 0, "round": 1, "accuracy": a},)) for a in (0.1, 0.9)]
        >>> panel = Panel("", tuple(runs), Swept("alpha", (1.0, 5.0)))
        >>> "wb, alpha 5: 0.9" in sweep_curves([panel], {"wb": 0}, "accuracy", "")[0].picture
        True
    """
    each = [by_value(panel.runs, panel.swept, key) for panel in panels]
    values = [value for curves in each for curve in curves.values() for value in curve.values()]
    reach = [edge for value in values for edge in edges_of(value)]
    return [
        curve_figure(
            curves,
            inks,
            ", ".join(filter(None, (title, panel.title))),
            XAxis(panel.swept.title, log=spans_decades(panel.swept)),
            share=key in SHARES,
            reach=reach,
        )
        for panel, curves in zip(panels, each, strict=True)
    ]


def spans_decades(swept: Swept) -> bool:
    """Whether a key's values are best shown on a logarithmic scale."""
    return min(swept.values) > 0 and wide(swept.values)


def by_value(runs: Sequence[Run], swept: Swept, key: str) -> dict[str, dict[float, MeanSd]]:
    """Per label a score of the last round at every value of a swept key, in rising order."""
    curves: dict[str, dict[float, MeanSd]] = {}
    for at, run in sorted(zip(swept.values, runs, strict=True), key=lambda pair: pair[0]):
        for row in summary(run.rows):
            if key in row.values:
                curves.setdefault(row.label, {})[at] = row.values[key]
    return curves


@dataclass(frozen=True, slots=True)
class XAxis:
    """What a curve runs along: its title, whether only whole numbers are meant, and whether it is logarithmic."""

    title: str
    whole: bool = False
    log: bool = False

    def ticks(self, scale: Scale) -> dict[float, str]:
        """Where numbers stand below it."""
        return {at: f"{at:g}" for at in scale.ticks(8 if self.whole else 6) if float(at).is_integer() or not self.whole}


def curve_figure(
    curves: Mapping[str, Mapping[float, MeanSd]],
    inks: Inks,
    title: str,
    along: XAxis,
    share: bool,
    reach: Sequence[float] = (),
) -> Figure | None:
    """Curves of means with bands of one standard deviation; nothing where there is one point, or where all is flat.

    `reach` has scores of other figures that the axis is to hold too.
    """
    points = [(at, value) for curve in curves.values() for at, value in curve.items()]
    means = [value.mean for _, value in points]
    if len({at for at, _ in points}) < 2 or max(means) - min(means) <= 1e-9 * max(map(abs, means)):
        return None
    edges = [*reach, *(edge for _, value in points for edge in edges_of(value))]
    log = not share and wide(means)
    x = scale_for([at for at, _ in points], 46, WIDTH - 8, log=along.log, pad=0.02)
    held = [edge for edge in edges if edge > 0] if log else edges
    y = scale_for(held, 238, 22, log=log, least=LEAST_SHARE if share else 0.05 * max(map(abs, means)))
    notes = ["Logarithmic scale."] * log + ["Logarithmic scale below."] * x.log
    return Figure(
        title,
        drawing(
            WIDTH,
            274,
            f"{title} by {along.title}",
            y_axis(y, 46, WIDTH - 8, "%" if share else "", tick_words(y, share)),
            x_axis(x, 22, 238, along.title, along.ticks(x)),
            *(_shade(curve, x, y, inks[label]) for label, curve in curves.items()),
            *(
                line([(x(at), y(value.mean)) for at, value in curve.items()], inks[label])
                for label, curve in curves.items()
                if curve
            ),
            *(_marks(label, curve, x, y, inks[label], along) for label, curve in curves.items() if curve),
        ),
        " ".join(notes),
        tuple(label for label, curve in curves.items() if curve),
    )


def _shade(curve: Mapping[float, MeanSd], x: Scale, y: Scale, index: int) -> Markup:
    """The band between mean - sd and mean + sd, cut at the scale's foot where the logarithm ends."""
    edges = [(x(at), *edges_of(value)) for at, value in curve.items() if value.sd is not None]
    if not edges:
        return Markup("")
    upper = [(at, y(high)) for at, _, high in edges]
    return band(upper, [(at, y(max(low, y.low))) for at, low, _ in edges], index)


def _marks(label: str, curve: Mapping[float, MeanSd], x: Scale, y: Scale, index: int, along: XAxis) -> Markup:
    """The method's mark at the last round, or at every value of a swept key."""
    points = list(curve.items())
    marked = points[-1:] if along.whole else points
    return Markup("").join(
        marker(index, x(at), y(value.mean), 4.0, f"{label}, {along.title} {at:g}: {value.mean:.4g}")
        for at, value in marked
    )


def edges_of(value: MeanSd) -> tuple[float, float]:
    """Mean less and mean plus one standard deviation."""
    return value.mean - (value.sd or 0.0), value.mean + (value.sd or 0.0)


def tick_words(scale: Scale, share: bool) -> dict[float, str]:
    """The labels of a scale's ticks, shares in per cent."""
    return {at: f"{100 * at:g}" if share else f"{at:g}" for at in scale.ticks()}


MANY_MARKS = 150
"""Marks in one row beyond which they would cover each other; an area says more."""


def seed_dots(groups: Groups, inks: Inks) -> Figure | None:
    """The task's first score of every seed at the last round, with mean and standard deviation.

    Example:
        >>> seed_dots({"wb": [{"seed": 0, "round": 1, "accuracy": 0.8}]}, {"wb": 0}).title
        'Accuracy of every seed'
    """
    column = headline_of(row for rows in groups.values() for row in rows)
    dots = {
        label: [
            (f"seed {row['seed']}", score) for row in last_rows(rows) if (score := number(row, column.key)) is not None
        ]
        for label, rows in groups.items()
    }
    note = "One mark per seed; the line is the mean, the bar reaches one standard deviation to each side."
    return _strips(f"{column.title[0].upper()}{column.title[1:]} of every seed", dots, inks, note, column)


def fairness(groups: Groups, inks: Inks, prefix: str, title: str) -> Figure | None:
    """The task's first score of every client at the last round: a good mean can hide a bad tail.

    Example:
        >>> row = {"seed": 0, "round": 1, "clients": {"site-1": {"own_accuracy": 0.8}}}
        >>> "site-1, seed 0: 80.0 %" in fairness({"wb": [row]}, {"wb": 0}, "own_", "Own rows").picture
        True
    """
    column = headline_of(row for rows in groups.values() for row in rows)
    key = f"{prefix}{column.key}"
    dots = {
        label: [
            (f"{client}, seed {row['seed']}", score)
            for row in last_rows(rows)
            for client, facts in part(row, "clients").items()
            if isinstance(facts, Mapping) and (score := finite(facts.get(key))) is not None
        ]
        for label, rows in groups.items()
    }
    many_marks = any(len(marks) > MANY_MARKS for marks in dots.values())
    note = "The area shows how many clients, over all seeds" if many_marks else "One mark per client and seed"
    return _strips(title, dots, inks, f"{note}; line and bar: mean ± one standard deviation.", column)


def _strips(
    title: str, dots: Mapping[str, list[tuple[str, float]]], inks: Inks, note: str, column: Column
) -> Figure | None:
    """One row of marks per method, its name above it, on a shared scale of the score."""
    share = column.kind == "share"
    dots = {label: marks for label, marks in dots.items() if marks}
    if not dots:
        return None
    values = [score for marks in dots.values() for _, score in marks]
    x = scale_for(values, 10, WIDTH - 10, least=LEAST_SHARE if share else 0.05 * max(map(abs, values)))
    if share and min(values) >= 0.0 and max(values) <= 1.0:  # room beyond 0 and 100 % would suggest there is some
        x = Scale(max(0.0, x.low), min(1.0, x.high), x.start, x.stop)
    bottom = 6 + 50 * len(dots)
    many_marks = any(len(marks) > MANY_MARKS for marks in dots.values())
    parts = []
    for at, (label, marks) in enumerate(dots.items()):
        y = 6 + 50 * at + 30
        parts.append(tag("text", short(label, 56), x=10, y=y - 17, class_="name"))
        drawn = _mark_density(marks, x, y, inks[label]) if many_marks else _swarm(marks, x, y, inks[label], share)
        parts.append(drawn)
        if (mean := mean_sd(score for _, score in marks)) is not None:
            low, high = (x(min(max(edge, x.low), x.high)) for edge in edges_of(mean))
            parts.append(tag("path", d=f"M{low:.1f} {y:.1f}H{high:.1f}", class_=f"bar {ink(inks[label])}"))
            parts.append(tag("path", d=f"M{x(mean.mean):.1f} {y - 11:.1f}v22", class_=f"mean {ink(inks[label])}"))
    axis = x_axis(x, 2, bottom, f"{column.title}, %" if share else column.title, tick_words(x, share=share))
    return Figure(title, drawing(WIDTH, bottom + 36, title, axis, *parts), note)


def _swarm(marks: Sequence[tuple[str, float]], x: Scale, y: float, index: int, share: bool) -> Markup:
    """Marks side by side where they would cover each other."""
    seen: dict[int, int] = {}
    size = 3.6 if len(marks) <= 10 else 2.8
    drawn = []
    for name, score in sorted(marks, key=lambda mark: mark[1]):
        spot = round(x(score) / 5)
        level = seen.get(spot, 0)
        seen[spot] = level + 1
        shift = (level + 1) // 2 * (4.0 if level % 2 else -4.0)
        words = f"{name}: {100 * score:.1f} %" if share else f"{name}: {score:.4g}"
        drawn.append(marker(index, x(score), y + max(-10.0, min(10.0, shift)), size, words))
    return tag("g", *drawn, class_="faint")


def _mark_density(marks: Sequence[tuple[str, float]], x: Scale, y: float, index: int) -> Markup:
    """The density of the marks as an area around the row's line."""
    counts, edges = np.histogram([score for _, score in marks], bins=50, range=(x.low, x.high))
    heights = 14 * counts / counts.max()
    middles = [x(float(edge)) for edge in (edges[:-1] + edges[1:]) / 2]
    upper = [(at, y - float(height)) for at, height in zip(middles, heights, strict=True)]
    return tag("g", band(upper, [(at, 2 * y - over) for at, over in upper], index), class_="crowd")


def partition(classes: Sequence[str], seed: Mapping[str, Any]) -> Markup | None:
    """Rows of each class at each client, the server's last.

    Example:
        >>> "site-1, cat: 5" in partition(["cat", "dog"], {"clients": {"site-1": [5, 0]}})
        True
    """
    holders = {str(name): items(part(seed, "clients"), name) for name in part(seed, "clients")}
    if any(finite(count) for count in items(seed, "server")):
        holders["server"] = items(seed, "server")
    if not holders or not classes:
        return None
    counts = np.array([_pad_with_nan(row, len(classes)) for row in holders.values()])
    totals = [f"{total:,.0f}" for total in np.nansum(counts, axis=1)]
    return heat_map("Rows per client and class", tuple(holders), classes, counts, "count", totals, root=True)


def confusion(rows: Sequence[Row], classes: Sequence[str]) -> Figure | None:
    """What each class is taken for, in per cent of its rows, summed over seeds.

    Example:
        >>> "cat, dog: 25" in confusion([{"round": 1, "confusion": [[3, 1], [0, 4]]}], ["cat", "dog"]).picture
        True
    """
    square: list[np.ndarray] = []
    for row in last_rows(rows):
        lines = items(row, "confusion")
        if lines and all(isinstance(entry, list) and len(entry) == len(lines) for entry in lines):
            square.append(np.nan_to_num(np.array([_pad_with_nan(entry) for entry in lines])))
    square = [matrix for matrix in square if matrix.shape == square[0].shape]
    if not square:
        return None
    counts = np.sum(square, axis=0)
    totals = counts.sum(axis=1, keepdims=True)
    shares = np.divide(counts, totals, out=np.zeros_like(counts), where=totals > 0)
    names = class_names(classes, len(counts))
    picture = heat_map("Confusion matrix", names, names, shares, "percent")
    return Figure("Confusion", picture, "Rows: the true class. Columns: what it is taken for. Per cent of the row.")


def per_class(groups: Groups, classes: Sequence[str]) -> Figure | None:
    """The accuracy of each method on each class, mean over seeds.

    Example:
        >>> "wb, dog: 50" in per_class({"wb": [{"round": 1, "per_class": [1, 0.5]}]}, ["cat", "dog"]).picture
        True
    """
    found = {
        label: [_pad_with_nan(scores) for row in last_rows(rows) if (scores := items(row, "per_class"))]
        for label, rows in groups.items()
    }
    found = {label: scores for label, scores in found.items() if scores}
    if not found:
        return None
    size = max(len(row) for scores in found.values() for row in scores)
    means = np.array([_nan_mean([_pad_with_nan(row, size) for row in scores]) for scores in found.values()])
    picture = heat_map("Accuracy per class", tuple(found), class_names(classes, size), means, "percent")
    return Figure("Accuracy per class", picture, "Per cent, mean over seeds.")


def class_names(classes: Sequence[str], size: int) -> list[str]:
    """The classes' names, or their numbers where the names do not fit.

    Example:
        >>> class_names(["cat"], 2)
        ['0', '1']
    """
    return list(classes) if len(classes) == size else [str(k) for k in range(size)]


def _pad_with_nan(values: Sequence[object], size: int | None = None) -> list[float]:
    """Numbers with NaN where one is missing, cut or filled to a length."""
    clean = [given if (given := finite(value)) is not None else float("nan") for value in values]
    return clean if size is None else (clean + [float("nan")] * size)[:size]


def _nan_mean(rows: Sequence[Sequence[float]]) -> np.ndarray:
    """The mean of each column's numbers, NaN where there is none; numpy's own warns of such columns."""
    stack = np.array(rows)
    there = ~np.isnan(stack)
    sums, counts = np.where(there, stack, 0.0).sum(axis=0), there.sum(axis=0)
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


NAMED = 8
"""Lines that get a colour and a name; of more layers, so many from the first to the last; the others are thin."""

_LEFT, _RIGHT, _TOP, _BOTTOM = 52.0, WIDTH - 92.0, 10.0, 238.0
_GAP = 13.0
Curve = Mapping[int, float]


def layer_lines(rows: Sequence[Row], key: str, title: str) -> Figure | None:
    """The mean over clients and seeds of a fact {layer: {client: number}}, against the round.

    Nothing where there are fewer than two rounds of it.

    Example:
        >>> rows = [{"round": at, "facts": {"gaussianity": {"fc1": {"a": at, "b": 3 * at}}}} for at in (1, 2)]
        >>> "fc1, round 2: 4" in layer_lines(rows, "gaussianity", "Distance from Gaussian").picture
        True
    """
    curves = {layer: curve for layer, curve in _curves(rows, key).items() if len(curve) > 1}
    values = [value for curve in curves.values() for value in curve.values()]
    if not curves:
        return None
    log = wide(values)
    x = scale_for([float(at) for curve in curves.values() for at in curve], _LEFT, _RIGHT, pad=0.02)
    y = scale_for(values, _BOTTOM, _TOP, log=log)
    layers = list(curves)
    if len(named := layers) > NAMED:
        named = [layers[round(k * (len(layers) - 1) / (NAMED - 1))] for k in range(NAMED)]
    thin = [_line(name, curve, x, y, None) for name, curve in curves.items() if name not in named]
    bold = [_line(name, curves[name], x, y, color_index) for color_index, name in enumerate(named)]
    picture = drawing(
        WIDTH,
        274,
        f"{title} by round",
        y_axis(y, _LEFT, _RIGHT, "", {at: f"{at:.4g}" for at in y.ticks()}),
        x_axis(x, _TOP, _BOTTOM, "round", {at: f"{at:g}" for at in x.ticks(6) if float(at).is_integer()}),
        *thin,
        *bold,
        _names({name: y(list(curves[name].values())[-1]) for name in named}),
    )
    return Figure(title, picture, "Mean over clients and seeds." + (" Logarithmic scale." if log else ""))


def _curves(rows: Sequence[Row], key: str) -> dict[str, dict[int, float]]:
    """Per layer, in the network's order, the mean of each round."""
    found: dict[str, dict[int, list[float]]] = {}
    for row in sorted(rows, key=lambda r: r["round"]):
        for layer in (table := part(part(row, "facts"), key)):
            numbers = [n for value in part(table, layer).values() if (n := finite(value)) is not None]
            if numbers:
                found.setdefault(str(layer), {}).setdefault(row["round"], []).extend(numbers)
    return {layer: {at: statistics.fmean(v) for at, v in by.items()} for layer, by in found.items()}


def _line(name: str, curve: Curve, x: Scale, y: Scale, color_index: int | None) -> Markup:
    points = [(x(at), y(value)) for at, value in curve.items()]
    tooltip = "; ".join(f"{name}, round {at}: {value:.3g}" for at, value in curve.items())
    drawn = line(points, 5 if color_index is None else color_index)
    return tag("g", tag("title", tooltip), drawn, opacity=0.3 if color_index is None else None)


def _names(ends: Mapping[str, float]) -> Markup:
    """The layers' names beside their lines' ends, pushed apart where they would touch."""
    names = sorted(ends, key=ends.__getitem__)
    spots: list[float] = []
    for name in names:
        spots.append(max(ends[name], spots[-1] + _GAP) if spots else ends[name])
    spots = [min(spot, _BOTTOM - _GAP * (len(spots) - 1 - k)) for k, spot in enumerate(spots)]
    order = list(ends)
    return Markup("").join(
        tag("text", short(name, 13), x=_RIGHT + 7, y=spot + 4, class_=f"fill {ink(order.index(name))}")
        for name, spot in zip(names, spots, strict=True)
    )


def answer_cost(groups: Groups, inks: Inks) -> Figure | None:
    """Accuracy against the work of one answer, in per cent of running every client's network.

    Only methods that noted a cost are shown, and nothing where all cost the same: then there is no choice to make.

    Example:
        >>> rows = {"all": [{"seed": 0, "round": 1, "accuracy": 0.8, "facts": {"cost": 1.0}}],
        ...         "few": [{"seed": 0, "round": 1, "accuracy": 0.7, "facts": {"cost": 0.3}}]}
        >>> "few: 70.0 % for 30 % of the work" in answer_cost(rows, {"all": 0, "few": 1}).picture
        True
    """
    points = dict[str, tuple[MeanSd, MeanSd]]()
    for label, rows in groups.items():
        cost = mean_sd(number(part(row, "facts"), "cost") for row in last_rows(rows))
        score = mean_sd(number(row, "accuracy") for row in last_rows(rows))
        if cost is not None and score is not None:
            points[label] = cost, score
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
    title = "What an answer costs"
    return Figure(title, drawing(WIDTH, 274, title, *axes, *marks), note, tuple(points))


def reliability(label: str, rows: Sequence[Row], index: int) -> Figure | None:
    """How often the model is right when it says so: bars on the diagonal are honest.

    Example:
        >>> bins = {"confidence": [0.4, 0.9], "accuracy": [None, 0.7], "count": [0, 50]}
        >>> "says 90 %, is right 70 % of 50 rows" in reliability("wb", [{"round": 1, "reliability": bins}], 0).picture
        True
    """
    bins = pooled_bins(last_rows(rows))
    if not bins:
        return None
    x, y = Scale(0, 1, 30, 190), Scale(0, 1, 168, 8)
    most = max(count for *_, count in bins)
    width = 160 / max(10, *(len(items(part(row, "reliability"), "count")) for row in last_rows(rows))) - 1.5
    bars = [
        tag(
            "rect",
            tag("title", f"says {100 * confidence:.0f} %, is right {100 * right:.0f} % of {count:.0f} rows"),
            x=x(confidence) - width / 2,
            y=y(right),
            width=width,
            height=168 - y(right),
            fill_opacity=0.25 + 0.75 * (count / most) ** 0.5,
            class_=f"fill {ink(index)}",
        )
        for confidence, right, count in bins
    ]
    words = {0.0: "0", 0.5: "50", 1.0: "100"}
    axes = y_axis(y, 30, 190, "", words) + x_axis(x, 8, 168, "confidence, %", words)
    diagonal = tag("path", d=f"M{x(0):.1f} {y(0):.1f}L{x(1):.1f} {y(1):.1f}", class_="ideal")
    ece = mean_sd(number(row, "ece") for row in last_rows(rows))
    note = "" if ece is None else f"ECE {100 * ece.mean:.1f} %"
    return Figure(label, drawing(200, 204, f"Reliability of {label}", axes, *bars, diagonal), note)


def calibration_curve(groups: Groups, inks: Inks) -> Figure | None:
    """How often it was so, against the probability that was given: the calibration curve of every method.

    Example:
        >>> bins = {"confidence": [0.2, 0.9], "accuracy": [0.3, 0.7], "count": [10, 50]}
        >>> calibration_curve({"wb": [{"round": 1, "reliability": bins}]}, {"wb": 0}).legend
        ('wb',)
    """
    curves = {label: pooled_bins(last_rows(rows)) for label, rows in groups.items()}
    curves = {label: bins for label, bins in curves.items() if len(bins) > 1}
    if not curves:
        return None
    x, y = Scale(0, 1, 46, WIDTH - 8), Scale(0, 1, 238, 22)
    words = {0.0: "0", 0.25: "25", 0.5: "50", 0.75: "75", 1.0: "100"}
    drawn = [line([(x(p), y(often)) for p, often, _ in bins], inks[label]) for label, bins in curves.items()]
    marks = [
        marker(
            inks[label], x(p), y(often), 3.6, f"{label}: said {100 * p:.0f} %, was so {100 * often:.0f} % of {n:.0f}"
        )
        for label, bins in curves.items()
        for p, often, n in bins
    ]
    axes = y_axis(y, 46, WIDTH - 8, "was so, %", words) + x_axis(x, 22, 238, "probability, %", words)
    diagonal = tag("path", d=f"M{x(0):.1f} {y(0):.1f}L{x(1):.1f} {y(1):.1f}", class_="ideal")
    picture = drawing(WIDTH, 274, "Calibration curve", axes, diagonal, *drawn, *marks)
    note = "Points on the diagonal are honest; above it the model gave too little, below it too much."
    return Figure("Calibration curve", picture, note, tuple(curves))


def pooled_bins(rows: Sequence[Row]) -> list[tuple[float, float, float]]:
    """(confidence, accuracy, count) of each bin that holds rows, pooled over seeds by count."""
    sums: dict[int, tuple[float, float, float]] = {}
    for row in rows:
        found = part(row, "reliability")
        columns = (items(found, "confidence"), items(found, "accuracy"), items(found, "count"))
        for at, (confidence, right, count) in enumerate(zip(*columns, strict=False)):
            a, b, n = finite(confidence), finite(right), finite(count)
            if a is not None and b is not None and n:
                old = sums.get(at, (0.0, 0.0, 0.0))
                sums[at] = (old[0] + a * n, old[1] + b * n, old[2] + n)
    return [(a / n, b / n, n) for _, (a, b, n) in sorted(sums.items())]

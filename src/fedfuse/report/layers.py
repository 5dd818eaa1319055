"""A number per layer, round after round: one line each, named where it ends."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from markupsafe import Markup

from fedfuse.report.heat import WIDTH
from fedfuse.report.plots import Figure
from fedfuse.report.read import Row, finite, part
from fedfuse.report.svg import Scale, drawing, ink, line, scale_for, short, tag, wide, x_axis, y_axis

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
    named = _sample_evenly(list(curves))
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


def _sample_evenly(layers: Sequence[str]) -> list[str]:
    """All of a few layers; of many, some from the first to the last."""
    if len(layers) <= NAMED:
        return list(layers)
    return [layers[round(k * (len(layers) - 1) / (NAMED - 1))] for k in range(NAMED)]


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

"""How far probabilities can be trusted: reliability of named classes, calibration curves of risks."""

from __future__ import annotations

from collections.abc import Sequence

from fedfuse.report.heat import WIDTH
from fedfuse.report.plots import Figure, Groups, Inks
from fedfuse.report.read import Row, finite, items, number, part
from fedfuse.report.scores import last_rows, mean_sd
from fedfuse.report.svg import Scale, drawing, ink, line, marker, tag, x_axis, y_axis


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

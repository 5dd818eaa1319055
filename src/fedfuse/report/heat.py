"""Heat maps: who holds what, what is taken for what, whose weight counts where."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
from markupsafe import Markup

from fedfuse.report.svg import drawing, png, short, tag

WIDTH = 400.0
LETTER = 6.6
"""Width of an average letter at the pictures' text size."""

Form = Literal["count", "percent", "number"]


def heat_map(
    title: str,
    rows: Sequence[str],
    columns: Sequence[str],
    values: np.ndarray,
    form: Form = "count",
    ends: Sequence[str] = (),
    root: bool = False,
) -> Markup:
    """A table of shades, from nothing to the largest value; NaN stays empty.

    Args:
        title: what a screen reader says.
        rows: the names at the left.
        columns: the names below.
        values: one number ≥ 0 per row and column.
        form: how a number is printed, where its cell has room for it.
        ends: words at the right of each row.
        root: shade by the square root, so that small counts beside large ones are seen.

    Example:
        >>> "site-1, cat: 5" in heat_map("Rows", ["site-1"], ["cat", "dog"], np.array([[5, 0]]))
        True
    """
    tall = _row_height(len(rows))
    named = tall >= 11
    left = 10 + LETTER * min(20, max(map(len, rows))) if named else 20
    right = WIDTH - (10 + LETTER * max(map(len, ends)) if ends and named else 2)
    wide = (right - left) / len(columns)
    bottom = 4 + tall * len(rows)
    shades = _shades(values, root)
    names, below = _column_names(columns, left, wide, bottom)
    inside = [
        tag("rect", x=left, y=4, width=right - left, height=bottom - 4, class_="empty"),
        _picture(shades, left, right, bottom)
        if values.size > 1600
        else _cells(rows, columns, values, shades, form, left, wide, tall),
        *(_row_names(rows, ends, left, right, tall) if named else [_row_count(len(rows), bottom)]),
        *names,
    ]
    return drawing(WIDTH, bottom + below, title, *inside)


def _row_height(rows: int) -> float:
    """Tall enough for a name; beyond forty rows the names go and the map is as tall as twenty."""
    return 20.0 if rows <= 40 else max(0.4, 400 / rows)


def _shades(values: np.ndarray, root: bool) -> np.ndarray:
    clean = np.nan_to_num(np.clip(values, 0, None), nan=0.0, posinf=0.0)
    shares = clean / (clean.max() or 1.0)
    return np.where(shares > 0, 0.06 + 0.94 * (np.sqrt(shares) if root else shares), 0.0)


def _picture(shades: np.ndarray, left: float, right: float, bottom: float) -> Markup:
    """Many cells as one small picture: the page stays light."""
    box = {"x": left, "y": 4, "width": right - left, "height": bottom - 4}
    return tag("image", href=png(shades, (42, 120, 184)), preserveAspectRatio="none", class_="pixels", **box)


def _cells(
    rows: Sequence[str],
    columns: Sequence[str],
    values: np.ndarray,
    shades: np.ndarray,
    form: Form,
    left: float,
    wide: float,
    tall: float,
) -> Markup:
    parts = []
    roomy = tall >= 14 and wide >= LETTER * max(len(_value_text(value, form)) for value in values.flat)
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            value, shade = values[i, j], float(shades[i, j])
            if not shade:
                continue
            x, y = left + j * wide, 4 + i * tall
            tooltip = tag("title", f"{row}, {column}: {_value_text(value, form)}")
            box = {"x": x + 0.5, "y": y + 0.5, "width": wide - 1, "height": max(tall - 1, 0.8)}
            parts.append(tag("rect", tooltip, fill_opacity=shade, class_="heat", **box))
            if roomy:
                tone = "on" if shade > 0.6 else "over"
                position = {"x": x + wide / 2, "y": y + tall / 2 + 3.5, "text_anchor": "middle"}
                parts.append(tag("text", _value_text(value, form), class_=f"cell {tone}", **position))
    return Markup("").join(parts)


def _value_text(value: float, form: Form) -> str:
    if math.isnan(value):
        return ""
    if form == "percent":
        return f"{100 * value:.0f}"
    if form == "count":
        return f"{value:.0f}"
    return f"{value:.2f}" if value == 0 or value >= 0.005 else f"{value:.0e}"


def _row_names(rows: Sequence[str], ends: Sequence[str], left: float, right: float, tall: float) -> list[Markup]:
    at = [4 + (i + 0.5) * tall + 4 for i in range(len(rows))]
    names = [tag("text", short(row, 20), x=left - 6, y=y, text_anchor="end") for row, y in zip(rows, at, strict=True)]
    marks = [tag("text", end, x=right + 6, y=y, class_="muted") for end, y in zip(ends, at, strict=False)]
    return names + marks


def _row_count(rows: int, bottom: float) -> Markup:
    position = f"translate(12 {bottom / 2:.1f}) rotate(-90)"
    return tag("text", f"{rows:,} rows", transform=position, text_anchor="middle")


def _column_names(columns: Sequence[str], left: float, wide: float, bottom: float) -> tuple[list[Markup], float]:
    """The names below, aslant where they would touch, and the room they take."""
    longest = min(12, max(map(len, columns)))
    step = max(1, math.ceil(12 / wide))
    shown = [(left + (j + 0.5) * wide, short(columns[j], 12)) for j in range(0, len(columns), step)]
    if LETTER * longest < wide * step - 2:
        return [tag("text", name, x=x, y=bottom + 15, text_anchor="middle") for x, name in shown], 20.0
    turned = [
        tag("text", name, transform=f"translate({x + 4:.1f} {bottom + 10:.1f}) rotate(-50)", text_anchor="end")
        for x, name in shown
    ]
    return turned, 14 + LETTER * 0.8 * longest

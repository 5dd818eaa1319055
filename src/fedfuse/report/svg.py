"""Inline SVG: methods' looks, elements, scales, axes, marks, heat maps.

Colours come from the page's style, so that light, dark and print all fit.
"""

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from markupsafe import Markup, escape

from fedfuse.errors import printable

Shape: TypeAlias = Literal["circle", "square", "up", "diamond", "down", "plus"]

COLOURS = (
    "#0072b2",
    "#d55e00",
    "#008f68",
    "#a8478f",
    "#b07900",
    "#4a5560",
    "#8a5a3c",
    "#3a9bd9",
    "#5b3fc4",
    "#7a7d1e",
    "#e0607e",
    "#12324f",
)
"""The first ones are Okabe and Ito's, darkened to be read on white; page.css has them too, and others for the dark."""

DASHES: tuple[tuple[float, ...], ...] = ((), (6, 3), (2, 2.5), (8, 3, 2, 3))
SHAPES: tuple[Shape, ...] = ("circle", "square", "up", "diamond", "down", "plus")


class Look(NamedTuple):
    """What a method's lines and marks look like."""

    colour: int
    dash: tuple[float, ...]
    shape: Shape


def look(index: int) -> Look:
    """The look of the method at an index.

    The first twelve differ in colour, and in dash and shape together; a colour that comes again has another dash.

    Example:
        >>> look(0), look(12)
        (Look(colour=0, dash=(), shape='circle'), Look(colour=0, dash=(6, 3), shape='circle'))
    """
    colours = len(COLOURS)
    return Look(index % colours, DASHES[(index + index // colours) % len(DASHES)], SHAPES[index % len(SHAPES)])


def ink(index: int) -> str:
    """The class that gives a method its colour."""
    return f"ink{look(index).colour}"


def legible(text: str) -> str:
    r"""Text whose invisible characters are spelt out: names come from clients elsewhere.

    Example:
        >>> print(legible("a" + chr(0x202E) + chr(27) + "b"))
        a\u202e\x1bb
    """
    return printable(text, keep="\n\t\u00a0")


def short(text: str, limit: int) -> str:
    """Text cut to a length, with an ellipsis.

    Example:
        >>> short("client-0001", 8)
        'client-…'
    """
    return text if len(text) <= limit else text[: limit - 1] + "…"


def tag(name: str, *inside: object, **attributes: object) -> Markup:
    """An element; text and attributes are escaped, elements inside are kept.

    Example:
        >>> tag("text", "a < b", x=1.25, class_="muted")
        Markup('<text x="1.25" class="muted">a &lt; b</text>')
    """
    words = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_safe(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{words}>{''.join(map(_safe, inside))}</{name}>")


def _safe(value: object) -> str:
    if isinstance(value, Markup):
        return str(value)
    if isinstance(value, float):
        return f"{value:.2f}".rstrip("0").rstrip(".")
    return str(escape(legible(str(value))))


def drawing(width: float, height: float, title: str, *inside: object) -> Markup:
    """A whole picture with the words a screen reader says for it; without words it is decoration."""
    box = f"0 0 {_safe(float(width))} {_safe(float(height))}"
    # `--w` lets the style cap the picture at a multiple of the size it was drawn for.
    words = {"role": "img", "aria_label": title} if title else {"aria_hidden": "true"}
    return tag("svg", *inside, viewBox=box, style=f"--w:{_safe(float(width))}px", **words)


@dataclass(frozen=True, slots=True)
class Scale:
    """From values to pixels, straight or logarithmic.

    Example:
        >>> Scale(0, 10, 100, 200)(5), Scale(1, 100, 0, 1, log=True)(10)
        (150.0, 0.5)
    """

    low: float
    high: float
    start: float
    stop: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """The pixel of a value."""
        low, high, at = map(math.log10, (self.low, self.high, value)) if self.log else (self.low, self.high, value)
        return self.start + (at - low) / (high - low) * (self.stop - self.start)

    def ticks(self, count: int = 5) -> list[float]:
        """Round numbers inside the scale."""
        if self.log:
            return _log_ticks(self.low, self.high)
        step = _round_step((self.high - self.low) / count)
        first = math.ceil(self.low / step - 1e-9)
        return [round(k * step, 12) for k in range(first, math.floor(self.high / step + 1e-9) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    powers = range(first, last + 1, 1 + (last - first) // 8)
    leads = (1,) if len(powers) > 4 else (1, 2, 5)
    return [lead * 10.0**power for power in powers for lead in leads if low <= lead * 10.0**power <= high]


def _round_step(raw: float) -> float:
    power: float = 10.0 ** math.floor(math.log10(raw))
    return next(power * lead for lead in (1, 2, 2.5, 5, 10) if raw <= power * lead * (1 + 1e-9))


def scale_for(
    values: Sequence[float], start: float, stop: float, log: bool = False, pad: float = 0.06, least: float = 0.0
) -> Scale:
    """A scale that holds all values with a little room on both sides.

    Args:
        values: what it must hold.
        start: the pixel of its low end.
        stop: the pixel of its high end.
        log: logarithmic, if all values are positive.
        pad: room on each side, as a share of what the values span.
        least: it spans at least so much, so that what hardly differs does not seem to.

    Example:
        >>> scale_for([0.0, 1.0], 0, 100, pad=0.0)
        Scale(low=0.0, high=1.0, start=0, stop=100, log=False)
        >>> scale_for([0.7001, 0.7003], 0, 100, least=0.04).high
        0.7202
    """
    low, high = min(values), max(values)
    if log and low > 0:
        room = (high / low) ** pad if high > low * (1 + 1e-9) else 2.0  # logarithms tell nearer ones not apart
        return Scale(low / room, high * room, start, stop, log=True)
    room = pad * (high - low) or (0.0 if high > low else max(abs(low) * 0.1, 0.01))
    room = max(room, (least - (high - low)) / 2)
    return Scale(low - room, high + room, start, stop)


def wide(values: Sequence[float], ratio: float = 20.0) -> bool:
    """Whether positive values differ so much that only a logarithmic scale shows them all."""
    return min(values) > 0 and max(values) / min(values) > ratio


def x_axis(scale: Scale, top: float, bottom: float, title: str, words: dict[float, str]) -> Markup:
    """Grid lines with their numbers below, and the axis title under them."""
    parts = [
        tag("path", d=f"M{scale(at):.1f} {top:.1f}V{bottom:.1f}", class_="grid")
        + tag("text", word, x=scale(at), y=bottom + 15, text_anchor="middle")
        for at, word in words.items()
    ]
    middle = (scale.start + scale.stop) / 2
    return Markup("").join([*parts, tag("text", title, x=middle, y=bottom + 31, text_anchor="middle", class_="axis")])


def y_axis(scale: Scale, left: float, right: float, title: str, words: dict[float, str]) -> Markup:
    """Grid lines with their numbers at the left, and the axis title above them."""
    parts = [
        tag("path", d=f"M{left:.1f} {scale(at):.1f}H{right:.1f}", class_="grid")
        + tag("text", word, x=left - 7, y=scale(at) + 4, text_anchor="end")
        for at, word in words.items()
    ]
    return Markup("").join([*parts, tag("text", title, x=0, y=12, class_="axis")])


def line(points: Sequence[tuple[float, float]], index: int) -> Markup:
    """A method's curve."""
    d = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    return tag(
        "path",
        d=d,
        class_=f"curve {ink(index)}",
        stroke_dasharray=" ".join(f"{part:g}" for part in look(index).dash) or None,
    )


def band(upper: Sequence[tuple[float, float]], lower: Sequence[tuple[float, float]], index: int) -> Markup:
    """The area between two curves of a method."""
    d = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in [*upper, *reversed(lower)]) + "Z"
    return tag("path", d=d, class_=f"band {ink(index)}")


def marker(index: int, x: float, y: float, r: float = 4.0, title: object = None) -> Markup:
    """A method's mark: its shape tells it apart where its colour does not."""
    inside = (tag("title", title),) if title is not None else ()
    return tag("path", *inside, d=_outline(look(index).shape, x, y, r), class_=f"mark {ink(index)}")


def _outline(shape: Shape, x: float, y: float, r: float) -> str:
    a, b, c, t = r * 1.3, r * 0.9, r * 1.15, r * 0.42
    outlines: dict[Shape, str] = {
        "circle": f"M{x - r:.1f} {y:.1f}a{r} {r} 0 1 0 {2 * r} 0a{r} {r} 0 1 0 {-2 * r} 0z",
        "square": f"M{x - b:.1f} {y - b:.1f}h{2 * b:.1f}v{2 * b:.1f}h{-2 * b:.1f}z",
        "up": f"M{x:.1f} {y - r * 1.2:.1f}l{c:.1f} {r * 2:.1f}h{-2 * c:.1f}z",
        "diamond": f"M{x:.1f} {y - a:.1f}l{a:.1f} {a:.1f}l{-a:.1f} {a:.1f}l{-a:.1f} {-a:.1f}z",
        "down": f"M{x:.1f} {y + r * 1.2:.1f}l{c:.1f} {-r * 2:.1f}h{-2 * c:.1f}z",
        "plus": f"M{x - t:.1f} {y - a:.1f}h{2 * t:.1f}V{y - t:.1f}H{x + a:.1f}v{2 * t:.1f}H{x + t:.1f}V{y + a:.1f}"
        f"h{-2 * t:.1f}V{y + t:.1f}H{x - a:.1f}v{-2 * t:.1f}H{x - t:.1f}z",
    }
    return outlines[shape]


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
    height = 20.0 if len(rows) <= 40 else max(0.4, 400 / len(rows))  # beyond forty rows the map is as tall as twenty
    named = height >= 11
    left = 10 + LETTER * min(20, max(map(len, rows))) if named else 20
    right = WIDTH - (10 + LETTER * max(map(len, ends)) if ends and named else 2)
    width = (right - left) / len(columns)
    bottom = 4 + height * len(rows)
    clean = np.nan_to_num(np.clip(values, 0, None), nan=0.0, posinf=0.0)
    shares = clean / (clean.max() or 1.0)
    shades = np.where(shares > 0, 0.06 + 0.94 * (np.sqrt(shares) if root else shares), 0.0)
    area = {"x": left, "y": 4, "width": right - left, "height": bottom - 4}
    names, below = _column_names(columns, left, width, bottom)
    if named:
        middles = [4 + (i + 0.5) * height + 4 for i in range(len(rows))]
        row_names = [
            tag("text", short(row, 20), x=left - 6, y=y, text_anchor="end")
            for row, y in zip(rows, middles, strict=True)
        ]
        row_names += [tag("text", end, x=right + 6, y=y, class_="muted") for end, y in zip(ends, middles, strict=False)]
    else:
        turned = f"translate(12 {bottom / 2:.1f}) rotate(-90)"
        row_names = [tag("text", f"{len(rows):,} rows", transform=turned, text_anchor="middle")]
    inside = [
        tag("rect", **area, class_="empty"),
        # many cells are one small picture, so that the page stays light
        tag("image", href=png(shades, (42, 120, 184)), preserveAspectRatio="none", class_="pixels", **area)
        if values.size > 1600
        else _cells(rows, columns, values, shades, form, left, width, height),
        *row_names,
        *names,
    ]
    return drawing(WIDTH, bottom + below, title, *inside)


def _cells(
    rows: Sequence[str],
    columns: Sequence[str],
    values: np.ndarray,
    shades: np.ndarray,
    form: Form,
    left: float,
    width: float,
    height: float,
) -> Markup:
    parts = []
    roomy = height >= 14 and width >= LETTER * max(len(_value_text(value, form)) for value in values.flat)
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            value, shade = values[i, j], float(shades[i, j])
            if not shade:
                continue
            x, y = left + j * width, 4 + i * height
            tooltip = tag("title", f"{row}, {column}: {_value_text(value, form)}")
            box = {"x": x + 0.5, "y": y + 0.5, "width": width - 1, "height": max(height - 1, 0.8)}
            parts.append(tag("rect", tooltip, fill_opacity=shade, class_="heat", **box))
            if roomy:
                tone = "on" if shade > 0.6 else "over"
                position = {"x": x + width / 2, "y": y + height / 2 + 3.5, "text_anchor": "middle"}
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


def _column_names(columns: Sequence[str], left: float, width: float, bottom: float) -> tuple[list[Markup], float]:
    """The names below, aslant where they would touch, and the room they take."""
    longest = min(12, max(map(len, columns)))
    step = max(1, math.ceil(12 / width))
    shown = [(left + (j + 0.5) * width, short(columns[j], 12)) for j in range(0, len(columns), step)]
    if LETTER * longest < width * step - 2:
        return [tag("text", name, x=x, y=bottom + 15, text_anchor="middle") for x, name in shown], 20.0
    turned = [
        tag("text", name, transform=f"translate({x + 4:.1f} {bottom + 10:.1f}) rotate(-50)", text_anchor="end")
        for x, name in shown
    ]
    return turned, 14 + LETTER * 0.8 * longest


def png(shades: np.ndarray, colour: tuple[int, int, int]) -> str:
    """A picture of one colour with one opacity per cell, as a data address.

    Example:
        >>> png(np.zeros((2, 3)), (0, 114, 178))[:22]
        'data:image/png;base64,'
    """
    height, width = shades.shape
    pixels = np.empty((height, width, 4), np.uint8)
    pixels[..., :3] = colour
    pixels[..., 3] = np.clip(np.round(255 * shades), 0, 255)
    raw = b"".join(b"\0" + row.tobytes() for row in pixels)
    chunks = {
        b"IHDR": struct.pack(">IIBBBBB", width, height, 8, 6, 0, 0, 0),
        b"IDAT": zlib.compress(raw, 9),
        b"IEND": b"",
    }
    body = b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks.items()
    )
    return "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n" + body).decode()

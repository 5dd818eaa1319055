"""A graph of arrows, written as Mermaid writes it, drawn as a picture that needs nothing from elsewhere."""

from __future__ import annotations

import re

WIDTH, HEIGHT, GAP, ROW = 96, 30, 18, 74
"""Of a box, the least space beside it, and from one row of boxes to the next, in pixels."""


def picture_of(mermaid: str) -> str:
    """An SVG of the arrows `a --> b`: each box stands below all that point to it.

    Example:
        >>> picture_of("graph TD; a --> b; b --> c").count("<rect")
        3
    """
    arrows = re.findall(r"(\w+) --> (\w+)", mermaid)
    rows = _rows(arrows)
    wide = max(len(row) for row in rows) * (WIDTH + GAP) + GAP
    middles = {
        name: (wide * (i + 1) / (len(row) + 1), ROW * depth + HEIGHT / 2 + 4)
        for depth, row in enumerate(rows)
        for i, name in enumerate(row)
    }
    lines = [_arrow(middles[a], middles[b]) for a, b in arrows]
    boxes = [_box(name, *middle) for name, middle in middles.items()]
    high = ROW * (len(rows) - 1) + HEIGHT + 8
    head = f'<svg viewBox="0 0 {wide:.0f} {high}" role="img" style="max-width:{wide:.0f}px;color:inherit">'
    return "\n".join([head, *lines, *boxes, "</svg>"])


def _rows(arrows: list[tuple[str, str]]) -> list[list[str]]:
    """The boxes by the longest way down to them; within a row, near what points to them."""
    names = sorted({name for arrow in arrows for name in arrow})
    depth = dict.fromkeys(names, 0)
    for _ in names:  # no way is longer than there are boxes
        for a, b in arrows:
            depth[b] = max(depth[b], depth[a] + 1)
    rows = [[name for name in names if depth[name] == row] for row in range(max(depth.values()) + 1)]
    place: dict[str, float] = {}
    for row in rows:  # from the top down, for a box's place is the mean of those above it
        row.sort(key=lambda n: (_mean([place[a] for a, b in arrows if b == n]), n))
        place |= {name: (i + 1) / (len(row) + 1) for i, name in enumerate(row)}
    return rows


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.5


def _arrow(start: tuple[float, float], end: tuple[float, float]) -> str:
    """A line that leaves a box at its foot and reaches another at its head, with a small dot there."""
    (x1, y1), (x2, y2) = (start[0], start[1] + HEIGHT / 2), (end[0], end[1] - HEIGHT / 2)
    bend = (y2 - y1) / 2
    path = f"M{x1:.0f} {y1:.0f} C{x1:.0f} {y1 + bend:.0f} {x2:.0f} {y2 - bend:.0f} {x2:.0f} {y2:.0f}"
    line = f'<path d="{path}" fill="none" stroke="currentColor" stroke-opacity="0.45"/>'
    return f'{line}<circle cx="{x2:.0f}" cy="{y2:.0f}" r="2.5" fill="currentColor"/>'


def _box(name: str, x: float, y: float) -> str:
    left, top = x - WIDTH / 2, y - HEIGHT / 2
    size = f'x="{left:.0f}" y="{top:.0f}" width="{WIDTH}" height="{HEIGHT}" rx="5"'
    box = f'<rect {size} fill="var(--md-default-bg-color, white)" stroke="currentColor"/>'
    return (
        f'{box}<text x="{x:.0f}" y="{y + 5:.0f}" text-anchor="middle" font-size="14" fill="currentColor">{name}</text>'
    )

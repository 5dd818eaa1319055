"""How methods look in every picture: colour, dash and mark, so that no two look the same and print tells them apart."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

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

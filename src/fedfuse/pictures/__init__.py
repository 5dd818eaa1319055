"""The papers' figures, drawn by the project's own code: one function each, found by name.

A module of this package registers its figures with `@picture`; `fedfuse reproduce NAME` draws one.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

Draw = Callable[[Path], list[Path]]


@dataclass(frozen=True, slots=True)
class Picture:
    """A figure: its name, whose it is, and how to draw it into a folder."""

    name: str
    paper: str
    draw: Draw

    @property
    def summary(self) -> str:
        """The first sentence of its documentation."""
        return (self.draw.__doc__ or "").strip().split("\n")[0]


_PICTURES: dict[str, Picture] = {}


def picture(name: str, *, paper: str) -> Callable[[Draw], Draw]:
    """Register a function that draws a figure into a folder and returns the files it wrote."""

    def register(draw: Draw) -> Draw:
        _PICTURES[name] = Picture(name, paper, draw)
        return draw

    return register


def all_pictures() -> Mapping[str, Picture]:
    """Every figure by name."""
    _discover()
    return dict(sorted(_PICTURES.items()))


@lru_cache(maxsize=1)
def _discover() -> None:
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")

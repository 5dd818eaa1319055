"""The papers' figures, drawn by the project's own code: one function each, found by name.

A file in the folder `experiments/figures` registers its figures with `@figure`; `fedfuse reproduce NAME` draws one.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from fedfuse.errors import ConfigError

Draw = Callable[[Path], list[Path]]


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure: its name, whose it is, and how to draw it into a folder."""

    name: str
    paper: str
    draw: Draw

    @property
    def summary(self) -> str:
        """The first sentence of its documentation."""
        return (self.draw.__doc__ or "").strip().split("\n")[0]


_FIGURES: dict[str, Figure] = {}


def figure(name: str, *, paper: str) -> Callable[[Draw], Draw]:
    """Register a function that draws a figure into a folder and returns the files it wrote."""

    def register(draw: Draw) -> Draw:
        _FIGURES[name] = Figure(name, paper, draw)
        return draw

    return register


def experiments_folder() -> Path:
    """Where experiment files and figures are: $FEDFUSE_EXPERIMENTS, ./experiments, or beside the source.

    Raises:
        ConfigError: if there is no such folder.
    """
    named = os.environ.get("FEDFUSE_EXPERIMENTS")
    places = [Path(named)] if named else [Path("experiments"), Path(__file__).resolve().parents[3] / "experiments"]
    for place in places:
        if place.is_dir():
            return place
    raise ConfigError(f"there is no folder of experiments at {places[0]}; set FEDFUSE_EXPERIMENTS to it")


def all_figures() -> Mapping[str, Figure]:
    """Every figure by name."""
    for path in sorted((experiments_folder() / "figures").glob("*.py")):
        load_figures(path)
    return dict(sorted(_FIGURES.items()))


def load_figures(path: Path) -> ModuleType:
    """A file of figures as a module, loaded once."""
    name = f"fedfuse_figures_{path.stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise ConfigError(f"{path} is no file of figures")
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]

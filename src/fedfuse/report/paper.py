"""The style of figures for papers, and the files they go to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedfuse.core.files import write_atomically
from fedfuse.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ENDINGS = (".pdf", ".svg", ".png")
STYLE = {
    "font.size": 8,
    "axes.labelsize": 8,
    "axes.titlesize": 8,
    "legend.fontsize": 7,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.5,
    "lines.linewidth": 1.3,
    "pdf.fonttype": 42,  # as text and not as curves: publishers ask for it
    "svg.fonttype": "none",
    "svg.hashsalt": "fedfuse",  # the same ledger, the same bytes
    "savefig.dpi": 300,
    "text.parse_math": False,  # a label is text, whatever it says
}


@contextmanager
def paper_style() -> Iterator[Figure]:
    """An empty figure in the style of all."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):  # type: ignore[arg-type]
        yield Figure(layout="constrained")


def save_to(figure: Figure, out: Path) -> Path:
    """Write a figure, the same bytes for the same figure."""
    if out.suffix not in ENDINGS:
        raise ConfigError(f"{out} ends with {out.suffix or 'nothing'!r}, expected one of {', '.join(ENDINGS)}")
    dates: dict[str, dict[str, Any]] = {".pdf": {"CreationDate": None}, ".svg": {"Date": None}, ".png": {}}
    with write_atomically(out) as file:
        figure.savefig(file, format=out.suffix[1:], metadata=dates[out.suffix])
    return out

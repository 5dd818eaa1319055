"""One exchange, every method: accuracy against bytes, from the scoreboard's stored result."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path

from fedfuse.errors import ConfigError
from fedfuse.experiment.reproduce import figure, results_folder
from fedfuse.report.claims import StoredResult, read_result, result_path

NAME = "scoreboard/oneshot"
MARKERS = "os^DvPX*<>hpd"  # as many as no multiple of the colours: ninety-one looks before one comes again
INK = ("#0072b2", "#d55e00", "#009e73", "#8a5a9e", "#8a949e", "#a67c00", "#333333")


@figure("scoreboard", paper="one exchange, every method")
def draw_scoreboard(folder: Path) -> list[Path]:
    """Accuracy against bytes of every one-shot method, a panel per data set and skew."""
    path = result_path(NAME, "cpu", results_folder())
    if not path.is_file():
        raise ConfigError(
            f"{NAME} has no stored result; run it: fedfuse reproduce {NAME}, then fedfuse reproduce --store"
        )
    return [draw_result(read_result(path), folder / "scoreboard.svg")]


def positions(result: StoredResult, cell: str) -> Mapping[str, tuple[float, float]]:
    """Per method the megabytes that all clients send and the accuracy in %, means over seeds."""
    scores = {label: by for label, by in result.cells[cell].items() if "accuracy" in by and "bytes_up" in by}
    return {
        label: (statistics.fmean(by["bytes_up"].values()) / 1e6, 100 * statistics.fmean(by["accuracy"].values()))
        for label, by in scores.items()
    }


def draw_result(result: StoredResult, path: Path) -> Path:
    """Draw a stored result: methods are told apart by marker and colour, one legend for all panels."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    cells = list(result.cells)
    rows = -(-len(cells) // 3)
    with mpl.rc_context({"svg.hashsalt": "fedfuse", "font.size": 8}):
        page = Figure(figsize=(9.0, 2.6 * rows + 1.2), layout="constrained")
        axes = page.subplots(rows, min(3, len(cells)), sharey=True, squeeze=False).ravel()
        for axis, cell in zip(axes, cells, strict=False):
            _draw_panel(axis, positions(result, cell), result.labels)
            axis.set_title(cell.replace("-", " "))
        for axis in axes[len(cells) :]:
            axis.set_visible(False)
        handles, labels = axes[0].get_legend_handles_labels()
        page.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        page.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    return path


def _draw_panel(axis, points: Mapping[str, tuple[float, float]], labels: list[str]) -> None:  # type: ignore[no-untyped-def]
    for at, label in enumerate(labels):
        if label in points:
            x, y = points[label]
            axis.scatter(x, y, s=34, marker=MARKERS[at % len(MARKERS)], color=INK[at % len(INK)], label=label)
    axis.set_xscale("log")
    for formatted in (axis.xaxis.set_major_formatter, axis.xaxis.set_minor_formatter):
        formatted("{x:g}")
    axis.set_xlabel("sent by all clients, MB")
    axis.set_ylabel("accuracy, %")
    axis.grid(alpha=0.25, linewidth=0.5)
    axis.spines[["top", "right"]].set_visible(False)

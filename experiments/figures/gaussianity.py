"""How the distance from Gaussian behaves as a weight: it picks one of equals, and it grows with scale."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedfuse.experiment.reproduce import figure
from fedfuse.linalg.divergence import k_statistics, non_gaussianity, renyi_to_gaussian

WEIGHTS = 2400  # of LeNet's second convolution
TRIALS = 2000
CLIENTS = 3
SCALES = np.geomspace(0.5, 2.0, 13)
BLUE, ORANGE, GREY = "#0072b2", "#d55e00", "#8a949e"


@dataclass(frozen=True, slots=True)
class Behaviour:
    """What the picture shows.

    Attributes:
        largest: by rule, the largest of three clients' weights in every trial; their layers are alike.
        total: the sum of the weights that equation 8 gives as printed, in every trial.
        growth: by rule, the score of a layer whose weights are so many times as large, beside the layer's own.
    """

    largest: Mapping[str, np.ndarray]
    total: np.ndarray
    growth: Mapping[str, np.ndarray]


@figure("swa-gaussianity", paper="SWA, equations 5 to 8")
def draw_gaussianity(folder: Path) -> list[Path]:
    """SWA's scores as weights: among alike clients, as equation 8 prints them, and of layers that grew."""
    return [_draw(behaviour(TRIALS), folder / "swa-gaussianity.png")]


def behaviour(trials: int, seed: int = 0) -> Behaviour:
    """Draw Gaussian layers of three alike clients many times, and score them."""
    draw = torch.Generator().manual_seed(seed)
    layers = 0.05 * torch.randn(trials * CLIENTS, WEIGHTS, dtype=torch.float64, generator=draw)
    k = k_statistics(layers, per_row=True)
    signed = (k.k3 * k.k4).view(trials, CLIENTS).numpy()
    few = layers[: 200 * CLIENTS]  # Rényi weights hardly vary: a few trials show that
    renyi = np.array([renyi_to_gaussian(row) for row in few]).reshape(-1, CLIENTS)
    return Behaviour(
        {"|k₃·k₄|": _largest(np.abs(signed)), "Rényi 1": _largest(renyi)},
        signed.sum(1) / signed.max(1),
        _growth(layers[0].exp() / 20),
    )


def _largest(scores: np.ndarray) -> np.ndarray:
    found: np.ndarray = (scores / scores.sum(1, keepdims=True)).max(1)
    return found


def _growth(layer: Tensor) -> dict[str, np.ndarray]:
    """Scores of the layer times each scale, as multiples of its own."""
    rules: Mapping[str, Callable[[Tensor], Tensor | float]] = {
        "|k₃·k₄|": non_gaussianity,
        "standardized": partial(non_gaussianity, standardized=True),
        "Rényi 1": renyi_to_gaussian,
    }
    scores = {name: np.array([float(rule(s * layer)) for s in (1.0, *SCALES)]) for name, rule in rules.items()}
    return {name: found[1:] / found[0] for name, found in scores.items()}


def _draw(seen: Behaviour, path: Path) -> Path:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    figure, axes = plt.subplots(1, 3, figsize=(13.5, 4.3), layout=ConstrainedLayoutEngine(wspace=0.06))
    _draw_largest(axes[0], seen.largest)
    _draw_total(axes[1], seen.total)
    _draw_growth(axes[2], seen.growth)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.spines[["left", "bottom"]].set_color("#cbd2d9")
        axis.tick_params(color="#cbd2d9", labelcolor="#52606d")
    figure.savefig(path, dpi=140)
    plt.close(figure)
    return path


def _draw_largest(axis: Any, largest: Mapping[str, np.ndarray]) -> None:
    bins = np.linspace(1 / CLIENTS - 1 / 90, 1, 61)
    for values, colour in zip(largest.values(), (ORANGE, BLUE), strict=True):
        weights = np.full(len(values), 100 / len(values))
        axis.hist(values, bins, weights=weights, color=colour, alpha=0.85)
    median = float(np.median(largest["|k₃·k₄|"]))
    axis.axvline(median, ymax=0.82, color=ORANGE, lw=1.2, ls="--")
    axis.text(median + 0.015, 6.2, f"|k₃·k₄|: median {median:.2f}", color=ORANGE, fontsize=10)
    axis.text(0.365, 7.3, "Rényi 1: every trial near ⅓", color=BLUE, fontsize=10)
    axis.set(ylim=(0, 8), xlabel="largest of three clients' weights", ylabel="trials, %")
    axis.set_title(f"Alike clients: {WEIGHTS:,} Gaussian weights each", fontsize=12)


def _draw_total(axis: Any, total: np.ndarray) -> None:
    shown = np.clip(total, -8, 3)
    axis.hist(shown, np.linspace(-8, 3, 56), weights=np.full(len(shown), 100 / len(shown)), color=GREY)
    axis.axvline(1, color=BLUE, lw=1.6)
    axis.annotate(
        "an average\nsums to 1",
        (1, 0.8),
        (0.55, 0.82),
        textcoords="axes fraction",
        color=BLUE,
        ha="right",
        xycoords=("data", "axes fraction"),
        arrowprops={"arrowstyle": "-", "color": BLUE},
    )
    axis.set(xlabel="sum of three weights k₃k₄ / max k₃k₄ (outer bars: beyond)", ylabel="trials, %")
    axis.set_title("Equation 8 as printed is no average", fontsize=12)


def _draw_growth(axis: Any, growth: Mapping[str, np.ndarray]) -> None:
    for (name, values), colour in zip(growth.items(), (ORANGE, GREY, BLUE), strict=True):
        axis.plot(SCALES, values, color=colour, lw=2.2, marker="o", ms=4)
        above = {"|k₃·k₄|": (-58, -4), "standardized": (-40, 8), "Rényi 1": (-30, -16)}[name]
        axis.annotate(name, (SCALES[-1], values[-1]), above, textcoords="offset points", color=colour, fontsize=10)
    axis.plot(SCALES, SCALES**7, color="black", lw=1, ls=":", zorder=3)
    axis.text(0.72, 0.02, "s⁷", fontsize=11)
    axis.set(xscale="log", yscale="log", xlabel="scale s of the weights", ylabel="score beside the layer's own")
    axis.set_xticks([0.5, 1, 2], ["0.5", "1", "2"])
    axis.minorticks_off()
    axis.set_title("A layer that grew takes over", fontsize=12)

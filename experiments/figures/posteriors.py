"""Posteriors to look at: how much of the Fisher information a layer-wise one keeps, and where beliefs meet."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedfuse.client.kfac import kronecker_factors
from fedfuse.core.model import Single
from fedfuse.core.rng import seeded
from fedfuse.core.rows import Rows
from fedfuse.core.seams import Work
from fedfuse.core.settings import LocalSettings, Optimizer
from fedfuse.core.spec import Spec
from fedfuse.core.state import Local, ServerState
from fedfuse.data import load
from fedfuse.experiment.reproduce import figure
from fedfuse.linalg.kron import natural_mean, natural_mean_diag
from fedfuse.nets.kronecker import blocks_of
from fedfuse.server.aggregate.charts import CHARTS, mean_in
from fedfuse.training.round import train

INK, PALE = "#1f2933", "#9aa5b1"
BLUE, ORANGE, GREEN, RED, PURPLE, BROWN = "#2a78b8", "#e07b00", "#2e9e5b", "#c8323c", "#7b4fb5", "#8a5a3b"


def small_net() -> nn.Module:
    """Three convolutions and one linear layer, 340 parameters: small enough that its whole Fisher matrix is drawn."""
    convolutions = [nn.Conv2d(1, 3, 3), nn.Tanh(), nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Conv2d(4, 4, 3, stride=2)]
    return nn.Sequential(*convolutions, nn.Tanh(), nn.Flatten(), nn.Linear(4, 10))


def trained_net(rows: Rows, epochs: int = 20) -> tuple[nn.Module, Spec]:
    """The small network after some epochs on the rows, in float64."""
    with seeded(0, "picture"):
        module = small_net()
    spec = Spec.of(module)
    brief = ServerState(0, Single.of(module, spec)).brief((), 10)
    work = Work(LocalSettings(epochs=epochs, batch_size=32, optimizer=Optimizer(lr=0.1, momentum=0.9)))
    train(Local("picture", brief, rows, work.settings, module, {}, 0), work)
    return module.double().eval(), spec


def full_fisher(module: nn.Module, spec: Spec, rows: Rows) -> Tensor:
    """Mean over rows of the outer product of the gradient of all weights, layer by layer, each as [W | b]."""
    total = torch.zeros((), dtype=torch.float64)
    for x, y in zip(rows.x, rows.y, strict=True):
        params = dict(module.named_parameters())
        grads = torch.autograd.grad(F.cross_entropy(module(x[None]), y[None]), list(params.values()))
        named = dict(zip(params, grads, strict=True))
        flat = torch.cat([block.matrices(named).flatten() for block in blocks_of(spec)])
        total = total + torch.outer(flat, flat) / len(rows)
    return total


def kronecker_fisher(module: nn.Module, spec: Spec, rows: Rows) -> list[Tensor]:
    """Each layer's block as the Kronecker product of its two factors."""
    found = kronecker_factors(module, blocks_of(spec), rows)
    return [torch.kron(found[b.name][1][0], found[b.name][0][0]) for b in blocks_of(spec)]


@figure("fedlpa-fisher", paper="FedLPA, Figure 3")
def draw_fisher(folder: Path) -> list[Path]:
    """The whole Fisher information of a small network, its layers' blocks, and their Kronecker factors."""
    digits = load("digits", train_limit=600)
    module, spec = trained_net(digits.train)
    rows = Rows(digits.train.x.double(), digits.train.y)
    full, parts = full_fisher(module, spec, rows), kronecker_fisher(module, spec, rows)
    blocks = [full[a:b, a:b] for a, b in _edges(parts)]
    kept = float(torch.block_diag(*blocks).square().sum() / full.square().sum())
    near = [
        float((p * b).sum() / (p.norm() * b.norm())) for p, b in zip(parts, blocks, strict=True)
    ]  # cosine of the angle between the two matrices
    panels = {
        "the whole empirical Fisher": full,
        f"its four layers' blocks: {kept:.0%} of its energy": torch.block_diag(*blocks),
        f"as Kronecker products (cosine {min(near):.2f}–{max(near):.2f})": torch.block_diag(*parts),
    }
    return [_save(_matrices(panels, _edges(parts)), folder, "fedlpa-fisher")]


def _edges(parts: list[Tensor]) -> list[tuple[int, int]]:
    ends = np.cumsum([0, *(len(p) for p in parts)]).tolist()
    return list(pairwise(ends))


def _matrices(panels: Mapping[str, Tensor], edges: list[tuple[int, int]]) -> Any:
    plt = _pyplot()
    figure, axes = plt.subplots(1, len(panels), figsize=(13, 4.9), layout="constrained")
    top = max(float(m.abs().max()) for m in panels.values())
    for place, (axis, (title, matrix)) in enumerate(zip(axes, panels.items(), strict=True)):
        shade = np.log10(matrix.abs().numpy().clip(min=top * 1e-5))
        drawn = axis.imshow(shade, cmap="magma", interpolation="antialiased", vmin=np.log10(top) - 5)
        for begin, end in edges:
            frame = plt.Rectangle(
                (begin - 0.5, begin - 0.5), end - begin, end - begin, fill=False, ec="#ffffff66", lw=0.8
            )
            axis.add_patch(frame)
        names = ["conv 1", "conv 2", "conv 3", "linear"]
        centres = [(a + b) / 2 for a, b in edges]
        axis.set_xticks(centres, names, rotation=30, ha="right", fontsize=9)
        axis.set_yticks(centres, names if place == 0 else [""] * len(names), fontsize=9)
        axis.tick_params(length=0)
        axis.set_title(title, fontsize=10.5, color=INK)
    bar = figure.colorbar(drawn, ax=axes, shrink=0.75, pad=0.01)
    bar.set_label("log₁₀ |entry|", fontsize=9)
    return figure


@figure("fedlpa-gaussians", paper="FedLPA, Figure 6")
def draw_gaussians(folder: Path) -> list[Path]:
    """Two clients' beliefs about two correlated weights, and where three ways of fusing them end."""
    means = torch.tensor([[-1.0, 0.3], [1.1, 0.9]], dtype=torch.float64)
    precisions = [_precision(0.25, 1.6, 38.0), _precision(0.22, 1.3, -52.0)]
    exact = natural_mean(means[:, None, :], precisions, [torch.eye(1)] * 2, [1, 1]).x[0]
    diagonal, _ = natural_mean_diag(means, [p.diagonal() for p in precisions], [1, 1])
    points = {
        "FedAvg: the mean": (means.mean(0), ORANGE, "s"),
        "diagonal Laplace": (diagonal, PURPLE, "D"),
        "FedLPA: the mode of the product": (exact, RED, "o"),
    }
    return [_save(_meeting(means, precisions, points), folder, "fedlpa-gaussians")]


def _precision(short: float, long: float, degrees: float) -> Tensor:
    """The precision of a Gaussian with these standard deviations along its axes, turned."""
    angle = torch.deg2rad(torch.tensor(degrees, dtype=torch.float64))
    turn = torch.stack([torch.stack([angle.cos(), -angle.sin()]), torch.stack([angle.sin(), angle.cos()])])
    return turn @ torch.diag(torch.tensor([long**-2, short**-2], dtype=torch.float64)) @ turn.mT


def _meeting(means: Tensor, precisions: list[Tensor], points: Mapping[str, tuple[Tensor, str, str]]) -> Any:
    plt = _pyplot()
    figure, axis = plt.subplots(figsize=(9.6, 5.0), layout="constrained")
    x, y = np.meshgrid(np.linspace(-3.2, 3.2, 400), np.linspace(-2.0, 2.6, 400))
    grid = torch.tensor(np.stack([x, y], -1))
    away = [grid - m for m in means]
    energies = [torch.einsum("abi,ij,abj->ab", d, P, d) for d, P in zip(away, precisions, strict=True)]
    product = torch.stack(energies).sum(0)
    height = torch.exp((product.min() - product) / 2).numpy()
    axis.contourf(x, y, height, levels=np.linspace(0.05, 1, 12), cmap="Greens", alpha=0.6)
    for k, (energy, m, colour) in enumerate(zip(energies, means, (BLUE, BROWN), strict=True)):
        axis.contour(x, y, energy.numpy(), levels=[0.5, 2.0, 4.5], colors=colour, linewidths=[1.8, 1.2, 0.8])
        axis.plot(*m.tolist(), "+", color=colour, ms=12, mew=2.2, label=f"client {k + 1}'s belief and its mean")
    for label, (point, colour, marker) in points.items():
        axis.plot(*point.tolist(), marker, color=colour, ms=10, mec="white", mew=1.4, label=label, ls="none")
    axis.plot([], [], "s", color="#9fd3a8", ms=10, label="the product of the two beliefs", ls="none")
    axis.set(xlabel="weight 1", ylabel="weight 2", aspect="equal")
    figure.legend(fontsize=9.5, frameon=False, loc="outside right center", labelspacing=0.9)
    axis.spines[["top", "right"]].set_visible(False)
    return figure


@figure("barycenters-toy", paper="BA-BFL, Figure 1")
def draw_toy(folder: Path) -> list[Path]:
    """N(0, 1) and N(2, ¼) with equal weights, and what each aggregation rule makes of them."""
    mus, vs = torch.tensor([0.0, 2.0], dtype=torch.float64), torch.tensor([1.0, 0.25], dtype=torch.float64)
    fused = {n: [float(t) for t in mean_in(chart, list(mus), list(vs), [1, 1])] for n, chart in CHARTS.items()}
    plt = _pyplot()
    figure, axis = plt.subplots(figsize=(8.2, 4.6), layout="constrained")
    x = np.linspace(-3.2, 4.8, 800)
    for m, v, name in zip(mus.tolist(), vs.tolist(), ("N(0, 1)", "N(2, ¼)"), strict=True):
        axis.fill_between(x, _density(x, m, v), color=PALE, alpha=0.35, lw=0)
        axis.annotate(name, (m, float(_density(np.array(m), m, v))), (0, 5), textcoords="offset points", ha="center")
    styles = zip(fused.items(), (BLUE, ORANGE, GREEN, PURPLE, RED, BROWN), ("-", "-", "-", "--", "-", ":"), strict=True)
    for (name, (m, v)), colour, line in styles:
        axis.plot(x, _density(x, m, v), line, color=colour, lw=2, label=f"{name}: N({m:.3g}, {v:.4g})")
    axis.set(xlabel="weight", yticks=[], ylim=(0, None))
    axis.legend(fontsize=9, frameon=False, loc="upper left")
    axis.spines[["top", "right", "left"]].set_visible(False)
    return [_save(figure, folder, "barycenters-toy")]


def _density(x: Any, m: float, v: float) -> Any:
    return np.exp(-((x - m) ** 2) / (2 * v)) / np.sqrt(2 * np.pi * v)


def _pyplot() -> Any:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def _save(figure: Any, folder: Path, name: str) -> Path:
    path = folder / f"{name}.png"
    figure.savefig(path, dpi=150, bbox_inches="tight", pad_inches=0.15)
    _pyplot().close(figure)
    return path

"""Matching made visible: whose unit is whose, and the barrier between two networks before and after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedfuse.core.messages import Cohort, Start
from fedfuse.core.model import Single
from fedfuse.core.params import Params
from fedfuse.core.posterior import Posterior
from fedfuse.core.rng import seeded
from fedfuse.core.rows import Rows
from fedfuse.core.seams import Work
from fedfuse.core.settings import LocalSettings, Optimizer
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench, ServerState
from fedfuse.data import Dataset, find, load, standardize
from fedfuse.engines.local import InProcess, Population
from fedfuse.errors import ConfigError
from fedfuse.experiment.reproduce import figure
from fedfuse.server.admission.admit import admit_all
from fedfuse.server.align.activations import ByActivations, cross_moments
from fedfuse.server.align.alignment import AlignUnits, Matching
from fedfuse.server.align.nets import Net
from fedfuse.server.align.transport import ByTransport
from fedfuse.server.align.weights import ByWeights
from fedfuse.server.steps.repair import RestateNorms

POINTS = 21
WAYS: Mapping[str, Matching | None] = {
    "as they are": None,
    "matched by weights": ByWeights(),
    "by activations": ByActivations(),
    "by transport": ByTransport(),
}
COLOURS = {
    "as they are": "#8a949e",
    "matched by weights": "#d55e00",
    "by activations": "#0072b2",
    "by transport": "#009e73",
}
_PALE, _TEXT = "#cbd2d9", "#52606d"


@dataclass(frozen=True, slots=True, eq=False)
class Line:
    """What networks on a straight line do.

    Attributes:
        positions: from 0, the first network, to 1, the second.
        loss: mean cross entropy at each place.
        accuracy: at each place.
    """

    positions: Tensor
    loss: Tensor
    accuracy: Tensor

    @property
    def barrier(self) -> float:
        """max_t  loss(t) − ((1 − t) loss(0) + t loss(1)): how far the line rises above its ends."""
        chord = torch.lerp(self.loss[0], self.loss[-1], self.positions)
        return float((self.loss - chord).max())


def straight_line(spec: Spec, a: Params, b: Params, rows: Rows, points: int = 11, norms: Rows | None = None) -> Line:
    """Loss and accuracy of (1 − t) a + t b, for t from 0 to 1.

    Args:
        spec: the network.
        a: the weights at 0.
        b: the weights at 1.
        rows: the rows they are judged on.
        points: how many places, ends included.
        norms: rows on which BatchNorm's statistics are estimated again at every place, if they should be.

    Example:
        >>> rows = Rows(torch.eye(2), torch.tensor([0, 1]))
        >>> spec = Spec("mlp", {"inputs": 2, "hidden": [], "classes": 2})
        >>> a, b = ({"classifier.weight": s * torch.eye(2), "classifier.bias": torch.zeros(2)} for s in (1.0, 3.0))
        >>> straight_line(spec, a, b, rows, points=3).accuracy.tolist()
        [1.0, 1.0, 1.0]
    """
    if points < 2:
        raise ConfigError(f"a line of {points} points has no two ends; ask for at least 2")
    positions = torch.linspace(0, 1, points, dtype=torch.float64)
    found = [_evaluate(Single(spec, Posterior(_between(a, b, float(t)))), rows, norms) for t in positions]
    loss, accuracy = (torch.tensor(column, dtype=torch.float64) for column in zip(*found, strict=True))
    return Line(positions, loss, accuracy)


def _between(a: Params, b: Params, t: float) -> dict[str, Tensor]:
    return {n: torch.lerp(v, b[n], t) if v.is_floating_point() else v for n, v in a.items()}


@torch.no_grad()
def _evaluate(model: Single, rows: Rows, norms: Rows | None) -> tuple[float, float]:
    if norms is not None:
        model = RestateNorms()(ServerState(0, model), Cohort(()), Bench(norms)).single
    logits = torch.cat([model.logits(x) for x in rows.x.split(500)])
    return float(F.cross_entropy(logits, rows.y)), float((logits.argmax(1) == rows.y).double().mean())


@dataclass(frozen=True, slots=True)
class Scene:
    """Two clients that train one network from starts of their own, each on half of the rows.

    Attributes:
        title: what it is.
        data: the rows.
        spec: the network.
        local: how they train.
        restate: whether BatchNorm's statistics are estimated anew along the line.
    """

    title: str
    data: Dataset
    spec: Spec
    local: LocalSettings
    restate: bool = False


@dataclass(frozen=True, slots=True)
class Pair:
    """The two trained networks, and rows the server holds."""

    scene: Scene
    cohort: Cohort
    bench: Bench

    def nets(self, cohort: Cohort | None = None) -> list[Net]:
        """Both networks with their units."""
        return [Net.of(update, self.scene.data.train.x.shape[1:]) for update in cohort or self.cohort]

    def aligned(self, way: Matching | None) -> Cohort:
        """Both, the second moved beside the first."""
        return self.cohort if way is None else AlignUnits(way).align(self.cohort, self.nets(), self.bench)[0]

    def line(self, way: Matching | None) -> Line:
        """The way from the first to the second, on test rows."""
        a, b = (dict(update.posterior.mean) for update in self.aligned(way))
        norms = self.bench.rows if self.scene.restate else None
        return straight_line(self.scene.spec, a, b, self.scene.data.test, POINTS, norms)


def first_scene() -> Scene:
    """Two hidden layers on MNIST; without MNIST on the bundled digits."""
    data = load("mnist", train_limit=6000, test_limit=2000) if find("mnist") else load("digits")
    spec = Spec("mlp", {"inputs": data.train.x[0].numel(), "hidden": [60, 40], "classes": 10})
    local = LocalSettings(epochs=8, optimizer=Optimizer(lr=0.05, momentum=0.9))
    return Scene(f"MLP 60–40, {data.name}", data, spec, local)


def scenes() -> list[Scene]:
    """The first, and where CIFAR-10 is at hand LeNet and a narrow VGG-11 with BatchNorm on some of its rows."""
    if not find("cifar10"):
        return [first_scene()]
    data = _standardized(load("cifar10", train_limit=4000, test_limit=1000))
    local = LocalSettings(epochs=10, batch_size=32, optimizer=Optimizer(lr=0.02, momentum=0.9))
    options: dict[str, Any] = {"channels": 3, "size": 32, "classes": 10}
    vgg = Spec("vgg11", {**options, "widths": 0.125, "hidden": [64], "norm": True, "dropout": 0.0})
    return [
        first_scene(),
        Scene(f"LeNet, {data.name}", data, Spec("lenet", options), local),
        Scene(f"VGG-11 with BatchNorm, {data.name}", data, vgg, local, restate=True),
    ]


def _standardized(data: Dataset) -> Dataset:
    scale = standardize(data.train.x)
    train, test = (Rows(scale(rows.x), rows.y) for rows in (data.train, data.test))
    return replace(data, train=train, test=test)


def trained(scene: Scene, seed: int = 0) -> Pair:
    """Train both; every tenth row is the server's."""
    everything = range(len(scene.data.train))
    server = scene.data.train.take(everything[::10])
    mine = [row for row in everything if row % 10]
    population = Population(scene.data.train, {f"client-{k}": torch.tensor(mine[k::2]) for k in range(2)})
    nets = {client: _fresh(scene.spec, seed, client) for client in population.clients}
    own = {client: Start(scene.spec, net.posterior.mean) for client, net in nets.items()}
    engine, brief = InProcess(population, seed), ServerState(0, nets["client-0"], starts=own).brief((), 10)
    answers = engine.exchange(brief, Work(scene.local), engine.clients)
    return Pair(scene, admit_all(answers, brief, (), engine.clients).cohort, Bench(server, classes=10, seed=seed))


def _fresh(spec: Spec, seed: int, client: str) -> Single:
    with seeded(seed, "start", client):
        return Single.of(spec.build(), spec)


def likeness(pair: Pair, way: Matching | None) -> dict[str, np.ndarray]:
    """Per hidden layer, the correlation of the first network's units with the second's, on the server's rows."""
    rows: Rows = pair.bench.need_rows("comparing units")
    one, other = pair.nets(pair.aligned(way))
    seen = cross_moments(one, other, rows.x)
    return {layer: moments.correlation().numpy() for layer, moments in seen.items()}


@figure("matching-units", paper="OTFusion and GAMF: what matching does to hidden units")
def draw_units(folder: Path) -> list[Path]:
    """Whose unit is whose: correlations between two networks' units, as they are and after matching."""
    pair = trained(first_scene())
    shown = {title: likeness(pair, WAYS[title]) for title in ("as they are", "matched by weights", "by activations")}
    return [_draw_units(shown, pair.scene.title, folder / "matching-units.png")]


@figure("matching-barrier", paper="OTFusion; Git Re-Basin: the barrier on the straight line between two networks")
def draw_barrier(folder: Path) -> list[Path]:
    """The straight line between two networks from starts of their own, before and after matching."""
    found = []
    for scene in scenes():
        pair = trained(scene)
        found.append((scene, {title: pair.line(way) for title, way in WAYS.items()}))
    return [_draw_barrier(found, folder / "matching-barrier.png")]


def _draw_units(shown: Mapping[str, Mapping[str, np.ndarray]], title: str, path: Path) -> Path:
    plt = _pyplot()
    layers = list(next(iter(shown.values())))
    figure, axes = plt.subplots(
        len(layers), len(shown), figsize=(3.6 * len(shown) + 0.9, 3.5 * len(layers) + 0.5), layout="constrained"
    )
    for column, (name, matrices) in enumerate(shown.items()):
        for row, layer in enumerate(layers):
            axis = axes[row][column]
            drawn = axis.imshow(matrices[layer], cmap="RdBu_r", vmin=-1, vmax=1, interpolation="nearest")
            diagonal = float(np.diagonal(matrices[layer]).mean())
            axis.set_title(f"{name}: {layer}\nmean on the diagonal {diagonal:.2f}", fontsize=10.5)
            axis.set(xticks=[], yticks=[])
            axis.spines[:].set_color(_PALE)
            if column == 0:
                axis.set_ylabel("units of the first network", color=_TEXT)
            if row == len(layers) - 1:
                axis.set_xlabel("units of the second", color=_TEXT)
    bar = figure.colorbar(drawn, ax=axes, shrink=0.6, pad=0.015)
    bar.set_label("correlation of activations", color=_TEXT)
    bar.outline.set_visible(False)
    figure.suptitle(f"Two networks from starts of their own ({title})", fontsize=12.5)
    return _save(figure, path)


def _draw_barrier(found: Sequence[tuple[Scene, Mapping[str, Line]]], path: Path) -> Path:
    plt = _pyplot()
    figure, axes = plt.subplots(
        2, len(found), figsize=(4.4 * len(found) + 0.4, 6.8), layout="constrained", squeeze=False, sharex=True
    )
    for column, (scene, lines) in enumerate(found):
        _draw_lines(axes[:, column], lines)
        axes[0][column].set_title(scene.title + (",\nstatistics restated" if scene.restate else ""), fontsize=11.5)
        axes[1][column].set_xticks([0, 0.5, 1], ["first", "their mean", "second"])
        axes[1][column].set_ylim(0, None)
    axes[0][0].set_ylabel("test loss", color=_TEXT)
    axes[1][0].set_ylabel("test accuracy, %", color=_TEXT)
    handles = [plt.Line2D([], [], color=colour, lw=2.2) for colour in COLOURS.values()]
    figure.legend(handles, COLOURS, loc="outside lower center", ncols=len(COLOURS), frameon=False)
    return _save(figure, path)


def _draw_lines(axes: Any, lines: Mapping[str, Line]) -> None:
    """Loss above, accuracy below; the barriers stand in their colours above the curves."""
    for axis, what in zip(axes, ("loss", "accuracy"), strict=True):
        for name, line in lines.items():
            values = getattr(line, what).numpy() * (100 if what == "accuracy" else 1)
            axis.plot(line.positions, values, color=COLOURS[name], lw=2.2)
        axis.spines[["top", "right"]].set_visible(False)
        axis.spines[["left", "bottom"]].set_color(_PALE)
        axis.tick_params(color=_PALE, labelcolor=_TEXT)
    low, high = axes[0].get_ylim()
    axes[0].set_ylim(low, high + 0.16 * (high - low))
    axes[0].text(0.01, 0.95, "barrier", transform=axes[0].transAxes, color=_TEXT, fontsize=9.5)
    for place, (name, line) in enumerate(lines.items()):
        told = f"{max(0.0, line.barrier):.2f}"
        axes[0].text(0.22 + 0.2 * place, 0.95, told, transform=axes[0].transAxes, color=COLOURS[name], fontsize=10.5)


def _pyplot() -> Any:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def _save(figure: Any, path: Path) -> Path:
    figure.savefig(path, dpi=140)
    _pyplot().close(figure)
    return path

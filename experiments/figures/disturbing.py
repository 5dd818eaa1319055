"""Neuron disturbing made visible: AMS's Figures 1 and 2, with the project's own training and rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedfuse.core.messages import Brief
from fedfuse.core.model import Single
from fedfuse.core.rng import seeded, stream
from fedfuse.core.rows import Rows
from fedfuse.core.seams import Work
from fedfuse.core.settings import Decay, LocalSettings, Optimizer
from fedfuse.core.spec import Spec
from fedfuse.data import Dataset, load
from fedfuse.engines.local import InProcess, Population
from fedfuse.experiment.reproduce import figure
from fedfuse.nets.mixture import Combine, Mixture, TopLogit
from fedfuse.report.claims import StoredResult, Values, digest_of, write_result
from fedfuse.server.admission.admit import admit_all
from fedfuse.server.aggregate.ensemble import members_of
from fedfuse.server.judge import log_probabilities
from fedfuse.tasks.metrics import auroc

GROUP = 24  # seeds that a panel shows, and of which the luckiest and the unluckiest are stored
GROUPS = 5
ACTIVATIONS = {"relu": "ReLU", "leaky_relu": "leaky ReLU", "tanh": "tanh"}
SEEN = (0, 1, 2, 5, 9)

ADAM = LocalSettings(epochs=600, batch_size=300, optimizer=Optimizer(name="adam", lr=0.5))
TABLE_1 = LocalSettings(
    epochs=40, batch_size=64, optimizer=Optimizer(name="adam", lr=0.001), decay=Decay(gamma=0.8, every=2), l1=1e-7
)

_ALIKE = 0.03  # accuracies closer than this are alike
_ABOVE, _BELOW, _INK = "#c2452d", "#2d6ca2", "#333333"
_SIDES = ("#b9d3e8", "#fbfaf7", "#f3c8bd")  # sure of the lower class, unsure, sure of the upper one
_WORDS = """Two networks of one hidden unit learn the same rule, each from its own side; the fused network concatenates
the units, so its logits are the sum of theirs. Every seed is shown. Below, two seeds of the leaky ReLU whose networks
are alike alone: a model's probability of the upper class (red), and the test points, ringed where it is wrong."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Two one-neuron networks that were trained apart with one seed, and the accuracies on all test points."""

    seed: int
    members: tuple[Single, Single]
    alone: tuple[float, float]
    added: float
    chosen: float

    def together(self, rule: Combine) -> Mixture:
        """The two answering by a rule."""
        return Mixture(self.members, torch.full((2,), 0.5, dtype=torch.float64), rule)


def band(count: int, left: float, right: float, seed: int) -> Rows:
    """Points between x₂ = |x₁| − 1 and x₂ = |x₁| + 1; those above x₂ = |x₁| are of the first class.

    The paper calls that class "label 1" and gives it the first output, y₁.

    Example:
        >>> rows = band(100, -2.0, 0.5, seed=0)
        >>> bool(((rows.x[:, 1] > rows.x[:, 0].abs()) == (rows.y == 0)).all())
        True
    """
    draw = stream(seed, "band", count)
    across = left + (right - left) * torch.rand(count, generator=draw)
    away = 2 * torch.rand(count, generator=draw) - 1
    return Rows(torch.stack([across, across.abs() + away], 1), (away <= 0).long())


def one_neuron(activation: str) -> Spec:
    """The paper's network: one hidden unit with a bias, two outputs without."""
    return Spec("mlp", {"inputs": 2, "hidden": [1], "classes": 2, "activation": activation, "output_bias": False})


def toy(seed: int, test: Rows, sides: tuple[Rows, Rows], activation: str = "leaky_relu") -> Pair:
    """Train one neuron on the left and one on the right, as the paper does, and add or choose their logits."""
    spec = one_neuron(activation)
    left, right = (trained(spec, rows, ADAM, seed, name) for rows, name in zip(sides, ("l", "r"), strict=True))
    pair = Pair(seed, (left, right), (accuracy(left, test), accuracy(right, test)), 0.0, 0.0)
    added, chosen = (accuracy(pair.together(rule), test) for rule in (TopLogit("all"), TopLogit(1)))
    return replace(pair, added=added, chosen=chosen)


def trained(spec: Spec, rows: Rows, settings: LocalSettings, seed: int, client: str) -> Single:
    """A fresh network after one client's round on these rows."""
    with seeded(seed, "start", client):
        brief = Brief(0, spec, spec.build().state_dict(), classes=int(rows.y.max()) + 1)
    engine = InProcess(Population.of({client: rows}), seed)
    admission = admit_all(engine.exchange(brief, Work(settings), (client,)), brief, (), (client,))
    return members_of(admission.cohort)[0]


def accuracy(model: Single | Mixture, rows: Rows) -> float:
    """The share of rows a model gets right."""
    return float((log_probabilities(model, rows.x).argmax(-1) == rows.y).double().mean())


@figure("ams-toy", paper="AMS, Figure 1")
def draw_toy(folder: Path) -> list[Path]:
    """One neuron on the left, one on the right: whether adding their logits helps, by activation and by seed."""
    sides = (band(300, -2.0, 0.5, seed=1), band(300, -0.5, 2.0, seed=2))
    halves = (band(150, -2.0, 0.5, seed=3), band(150, -0.5, 2.0, seed=4))
    test = Rows(torch.cat([h.x for h in halves]), torch.cat([h.y for h in halves]))
    tried = {name: [toy(seed, test, sides, name) for seed in range(GROUPS * GROUP)] for name in ACTIVATIONS}
    outcomes = {name: pairs[:GROUP] for name, pairs in tried.items()}
    numbers = store("ams-toy", {name: luck(pairs) for name, pairs in tried.items()}, folder)
    plt = _pyplot()
    figure, axes = plt.subplots(3, 4, figsize=(13.2, 10.2), layout="constrained")
    figure.suptitle(_WORDS, x=0.01, ha="left", fontsize=10, color=_INK, linespacing=1.5)
    _draw_halves(axes[0, 0], sides)
    for axis, letter, (name, pairs) in zip(axes[0, 1:], "bcd", outcomes.items(), strict=True):
        _draw_outcomes(axis, f"({letter}) {ACTIVATIONS[name]}", pairs)
    axes[0, 1].legend(frameon=False, fontsize=8.5, loc="upper left")
    for row, pair, word in zip(
        axes[1:], success_and_failure(outcomes["leaky_relu"]), ("success", "failure"), strict=True
    ):
        _draw_maps(row, pair, test, word)
    return [_saved(figure, folder / "ams-toy.png"), numbers]


def luck(pairs: Sequence[Pair]) -> dict[str, dict[str, dict[int, float]]]:
    """What adding the logits gives in the luckiest and the unluckiest seed of every group."""
    groups = [[pair.added for pair in pairs[start : start + GROUP]] for start in range(0, len(pairs), GROUP)]
    return {
        f"logits added, {word} seed": {"accuracy": {at: round(pick(group), 4) for at, group in enumerate(groups)}}
        for word, pick in {"luckiest": max, "unluckiest": min}.items()
    }


def store(name: str, cells: Mapping[str, Mapping[str, Mapping[str, Values]]], folder: Path) -> Path:
    """Write a figure's numbers beside it, as `fedfuse reproduce NAME --store` reads them."""
    return write_result(StoredResult(name, "cpu", digest_of(Path(__file__)), cells), folder)


def success_and_failure(pairs: Sequence[Pair]) -> tuple[Pair, Pair]:
    """The pair that adding serves best, and of those that are like it alone the one it serves worst."""
    best = max(pairs, key=lambda p: p.added)
    apart = {p.seed: max(abs(a - b) for a, b in zip(p.alone, best.alone, strict=True)) for p in pairs}
    return best, min(pairs, key=lambda p: (apart[p.seed] > _ALIKE, p.added))


@figure("ams-confidence", paper="AMS, Figure 2")
def draw_confidence(folder: Path) -> list[Path]:
    """A network is surer of digits it has seen: exp(max logit) of an MLP that was trained on 0, 1, 2, 5 and 9."""
    data = load("mnist")
    seen = torch.isin(data.test.y, torch.tensor(SEEN))
    sure = [confidence_of(data, seed) for seed in range(GROUPS)]
    areas = {seed: round(auroc(each[~seen], each[seen]), 4) for seed, each in enumerate(sure)}
    numbers = store("ams-confidence", {"mnist": {"largest logit": {"auroc": areas}}}, folder)
    plt = _pyplot()
    figure, axis = plt.subplots(figsize=(9.2, 4.8), layout="constrained")
    _draw_labels(axis, sure[0], data.test.y)
    axis.set_title(
        f"Trained on 0, 1, 2, 5 and 9: how sure a network is of every digit (AUROC {areas[0]:.3f})", loc="left"
    )
    return [_saved(figure, folder / "ams-confidence.png"), numbers]


def confidence_of(data: Dataset, seed: int) -> Tensor:
    """The largest logit for every test row, of a network that was trained on five digits."""
    known = torch.isin(data.train.y, torch.tensor(SEEN)).nonzero()[:, 0]
    rows = Rows(data.train.x[known], data.train.y[known])
    spec = Spec("mlp", {"inputs": rows.x[0].numel(), "hidden": [100, 100]})
    model = trained(spec, rows, TABLE_1, seed, client="site")
    with torch.no_grad():
        return torch.cat([model.logits(x) for x in data.test.x.split(1000)]).amax(-1)


def _pyplot() -> Any:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update(
        {"font.size": 9.5, "axes.titlesize": 10.5, "axes.spines.top": False, "axes.spines.right": False}
    )
    return plt


def _saved(figure: Any, path: Path) -> Path:
    import matplotlib.pyplot as plt

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140)
    plt.close(figure)
    return path


def _draw_halves(axis: Any, sides: tuple[Rows, Rows]) -> None:
    for rows, shape, name in zip(sides, ("o", "^"), ("left", "right"), strict=True):
        for label, colour in enumerate((_ABOVE, _BELOW)):
            mine = rows.x[rows.y == label]
            axis.scatter(
                *mine.T.numpy(),
                s=11,
                marker=shape,
                facecolor=colour if name == "left" else "none",
                edgecolor=colour,
                lw=0.7,
            )
    for x in (-0.5, 0.5):
        axis.axvline(x, color="grey", lw=0.8, ls=":")
    _frame(axis, "(a) what each side holds")
    axis.text(-1.95, -1.05, "● left      △ right", color=_INK, fontsize=8.5, va="center")


def _draw_outcomes(axis: Any, name: str, pairs: Sequence[Pair]) -> None:
    """Every seed: both networks alone, and together."""
    order = sorted(pairs, key=lambda p: (p.added, min(p.alone)))
    at = range(len(order))
    alone = 100 * np.array([p.alone for p in order])
    axis.vlines(at, alone.min(1) - 0.4, alone.max(1) + 0.4, color="#bbbbbb", lw=4, label="between the two alone")
    axis.plot(at, [100 * p.added for p in order], "o", ms=4, color=_INK, label="logits added")
    axis.plot(at, [100 * p.chosen for p in order], "x", ms=5, color="#3a923a", label="the surer one (AMS)")
    below, above = sum(p.added < min(p.alone) for p in order), sum(p.added > max(p.alone) for p in order)
    axis.set_title(f"{name}: {below} below both, {above} above", loc="left")
    axis.set_xticks([])
    axis.set_xlabel("seeds, by what adding gives")
    axis.set_ylabel("accuracy, %")
    axis.set_ylim(46, 112)  # room for the legend
    axis.set_yticks(range(50, 101, 10))


def _draw_maps(row: Sequence[Any], pair: Pair, test: Rows, word: str) -> None:
    models: tuple[Single | Mixture, ...] = (
        *pair.members,
        pair.together(TopLogit("all")),
        pair.together(TopLogit(1)),
    )
    scores = (*pair.alone, pair.added, pair.chosen)
    names = ("left alone", "right alone", "logits added", "the surer one (AMS)")
    for axis, model, score, name in zip(row, models, scores, names, strict=True):
        _draw_map(axis, model, test)
        _frame(axis, f"{name}: {score:.1%}")
    row[0].set_ylabel(f"{word}, seed {pair.seed}", fontsize=11, fontweight="bold")


def _draw_map(axis: Any, model: Single | Mixture, test: Rows) -> None:
    """The probability of the upper class over the plane, the test points, and which of them are wrong."""
    from matplotlib.colors import LinearSegmentedColormap

    x, y = torch.meshgrid(torch.linspace(-2.1, 2.1, 260), torch.linspace(-1.2, 3.2, 260), indexing="xy")
    grid = torch.stack([x, y], -1).view(-1, 2)
    upper = log_probabilities(model, grid, batch=20_000)[:, 0].exp().view(x.shape).numpy()
    place = {"extent": (-2.1, 2.1, -1.2, 3.2), "origin": "lower", "aspect": "auto"}
    axis.imshow(upper, cmap=LinearSegmentedColormap.from_list("sides", _SIDES), vmin=0, vmax=1, **place)
    wrong = log_probabilities(model, test.x).argmax(-1) != test.y
    for label, colour in enumerate((_ABOVE, _BELOW)):
        axis.scatter(*test.x[test.y == label].T.numpy(), s=7, color=colour, lw=0)
    axis.scatter(*test.x[wrong].T.numpy(), s=26, facecolor="none", edgecolor=_INK, lw=0.8)


def _frame(axis: Any, title: str) -> None:
    axis.set_xlim(-2.1, 2.1)
    axis.set_ylim(-1.2, 3.2)
    axis.set_xticks([-2, -1, 0, 1, 2])
    axis.set_yticks([-1, 0, 1, 2, 3])
    axis.set_title(title, loc="left")


def _draw_labels(axis: Any, confidence: Tensor, labels: Tensor) -> None:
    """One box per digit, on the logarithm of exp(max logit)."""
    decades = confidence / torch.log(torch.tensor(10.0))
    parts = [decades[labels == digit].tolist() for digit in range(10)]
    boxes = axis.boxplot(parts, positions=range(10), widths=0.62, whis=(1, 99), patch_artist=True, showfliers=False)
    for digit, box in enumerate(boxes["boxes"]):
        box.set(facecolor=_ABOVE if digit in SEEN else "#b9c4cd", edgecolor="none")
    for part in ("whiskers", "caps"):
        for digit, line in enumerate(boxes[part]):
            line.set(color=_ABOVE if digit // 2 in SEEN else "#8a98a4")
    for line in boxes["medians"]:
        line.set(color="white", lw=1.6)
    axis.set_xlabel("digit of the test image (red: seen in training; grey: never seen)")
    axis.set_ylabel("absolute confidence, exp(max logit)")
    axis.set_yticks(ticks := list(range(0, int(decades.quantile(0.999)) + 3, 3)), [f"$10^{{{t}}}$" for t in ticks])
    axis.grid(axis="y", lw=0.4, alpha=0.6)

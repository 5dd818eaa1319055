"""How wide a matched network becomes: common hidden units against the number of clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedfuse.core.messages import Cohort, Start
from fedfuse.core.model import Single
from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import find_method
from fedfuse.core.rng import seeded
from fedfuse.core.rows import Rows
from fedfuse.core.settings import LocalSettings, Optimizer
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench, ServerState
from fedfuse.data import Dataset, Dirichlet, find, load, partition
from fedfuse.engines.local import InProcess, Population
from fedfuse.experiment.reproduce import figure
from fedfuse.nets.mixture import Mixture
from fedfuse.server.admission.admit import admit_all
from fedfuse.server.judge import Judge

COUNTS = (2, 4, 8, 12, 16)
GAMMAS = (0.001, 1.0, 50.0)
HIDDEN = 50
SEED = 0
COLOURS = {0.001: "#0072b2", 1.0: "#009e73", 50.0: "#d55e00"}
GREY = "#8a949e"


@dataclass(frozen=True, slots=True)
class Growth:
    """What the picture shows: by γ, for each number of clients, the common width and how often the network is right.

    Attributes:
        source: the data set.
        counts: numbers of clients.
        widths: common hidden units.
        accuracy: of the matched network on the test rows.
        ensemble: of all clients' networks together.
    """

    source: str
    counts: Sequence[int]
    widths: Mapping[float, Sequence[int]]
    accuracy: Mapping[float, Sequence[float]]
    ensemble: Sequence[float]


@figure("pfnm-widths", paper="PFNM, the width of the global network")
def draw_widths(folder: Path) -> list[Path]:
    """PFNM's common hidden units, and its accuracy, against the number of clients, for three masses γ."""
    data = load("mnist", train_limit=6_400, test_limit=2_000) if find("mnist") else load("digits")
    return [_draw(growth(data, COUNTS), folder / "pfnm-widths.png")]


def growth(data: Dataset, counts: Sequence[int], epochs: int = 8) -> Growth:
    """Train as many clients as there are at most, each from its own start, and match the first few of them."""
    state, everybody = _trained(data, max(counts), epochs)
    judge = Judge(data.test, len(data.classes))
    widths: dict[float, list[int]] = {gamma: [] for gamma in GAMMAS}
    accuracy: dict[float, list[float]] = {gamma: [] for gamma in GAMMAS}
    ensemble: list[float] = []
    for count in counts:
        cohort, bench = Cohort(everybody.updates[:count]), Bench(population=count, classes=len(data.classes), seed=SEED)
        for gamma in GAMMAS:
            recipe = find_method("pfnm").recipe(gamma=[gamma], variance=[1.0], prior_variance=[1.0])
            fused = recipe.aggregate(cohort, state, bench)
            widths[gamma].append(fused.facts["widths"]["fc1"])
            accuracy[gamma].append(_right(judge, fused.single))
        together = find_method("ensemble").recipe().aggregate(cohort, state, bench).model
        ensemble.append(_right(judge, together))  # type: ignore[arg-type]
    return Growth(data.name, tuple(counts), widths, accuracy, ensemble)


def _right(judge: Judge, model: Single | Mixture) -> float:
    return float(judge.evaluate(model)["accuracy"])


def _trained(data: Dataset, clients: int, epochs: int) -> tuple[ServerState, Cohort]:
    """One exchange of clients that begin apart."""
    recipe: Recipe = find_method("pfnm").recipe()
    local = LocalSettings(epochs=epochs, batch_size=32, optimizer=Optimizer(name="adam", lr=0.001))
    rows: Rows = data.train
    population = Population(rows, partition(rows.y, Dirichlet(alpha=0.5), clients, SEED).clients)
    options = {"inputs": rows.x[0].numel(), "hidden": [HIDDEN], "classes": len(data.classes), "init": "pfnm"}
    spec = Spec("mlp", options)
    starts = {client: Start(spec, _fresh(spec, client).posterior.mean) for client in population.clients}
    state = ServerState(0, _fresh(spec, ""), starts=starts)
    brief, names = state.brief((), len(data.classes)), population.clients
    replies = list(InProcess(population, SEED).exchange(brief, recipe.work(local), names))
    return state, admit_all(replies, brief, recipe.evidence, names).cohort


def _fresh(spec: Spec, client: str) -> Single:
    with seeded(SEED, "start", client):
        return Single.of(spec.build(), spec)


def _draw(seen: Growth, path: Path) -> Path:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11.5, 4.4), layout="constrained")
    _draw_widths(left, seen)
    _draw_accuracy(right, seen)
    for axis in (left, right):
        axis.set_xticks(seen.counts)
        axis.set_xlabel("clients")
        axis.grid(axis="y", color="#eef1f4", lw=1)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
        axis.spines[["left", "bottom"]].set_color("#cbd2d9")
        axis.tick_params(color="#cbd2d9", labelcolor="#52606d")
    figure.suptitle(
        f"{seen.source}: MLPs of {HIDDEN} hidden units, each from its own start, Dirichlet 0.5, one exchange",
        fontsize=11,
        color="#52606d",
    )
    figure.savefig(path, dpi=140)
    plt.close(figure)
    return path


def _draw_widths(axis: Any, seen: Growth) -> None:
    side_by_side = [HIDDEN * count for count in seen.counts]
    axis.plot(seen.counts, side_by_side, color=GREY, lw=1.4, ls="--", zorder=3, label="nothing matched")
    for gamma in reversed(GAMMAS):
        axis.plot(
            seen.counts, seen.widths[gamma], color=COLOURS[gamma], lw=2.2, marker="o", ms=5, label=f"γ = {gamma:g}"
        )
    axis.axhline(HIDDEN, color=GREY, lw=1.4, ls=":", label="everything matched")
    axis.set(yscale="log", ylabel="common hidden units")
    ticks = [HIDDEN * 2**k for k in range(5) if HIDDEN * 2**k <= max(side_by_side)]
    axis.set_yticks(ticks, [str(tick) for tick in ticks])
    axis.minorticks_off()
    axis.legend(frameon=False, fontsize=9, loc="upper left")
    axis.set_title("The network grows with clients and with γ", fontsize=12)


def _draw_accuracy(axis: Any, seen: Growth) -> None:
    axis.plot(seen.counts, seen.ensemble, color=GREY, lw=1.6, ls="--", label="ensemble")
    for gamma in reversed(GAMMAS):
        values = seen.accuracy[gamma]
        axis.plot(seen.counts, values, color=COLOURS[gamma], lw=2.2, marker="o", ms=5, label=f"γ = {gamma:g}")
    axis.set(ylim=(0, 1), ylabel="test accuracy")
    axis.legend(frameon=False, fontsize=9, loc="lower left")
    axis.set_title("How often the matched network is right", fontsize=12)

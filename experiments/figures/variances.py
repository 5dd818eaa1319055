"""What Bayesian layers learn, and what they cost and bring as there are more of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
from torch import Tensor

from fedfuse.core.messages import Cohort
from fedfuse.core.model import Single
from fedfuse.core.params import Params
from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import find_method
from fedfuse.core.rng import seeded
from fedfuse.core.settings import LocalSettings, Optimizer
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench, ServerState
from fedfuse.data import Dirichlet, load, partition
from fedfuse.engines.local import InProcess, Population
from fedfuse.experiment.reproduce import figure
from fedfuse.report.read import Row, number, read_run
from fedfuse.server.admission.admit import admit_all
from fedfuse.server.judge import Judge
from fedfuse.server.loop import RunPlan, run

INK, PALE = "#1f2933", "#9aa5b1"
COLOURS = {"eaa": "#2a78b8", "gaa": "#e07b00", "aalv": "#2e9e5b", "rklb": "#c8323c", "wb": "#7b4fb5", "fklb": "#8a5a3b"}
PANELS = {
    "accuracy": "accuracy",
    "nll": "negative log-likelihood",
    "ece": "calibration error",
    "train_seconds": "seconds of training per round",
    "client_accuracy_weighted": "client networks, by rows",
    "client_accuracy_worst10": "worst client networks",
}
WITHOUT_BAYES = ("fedavg",)  # the paper's n = 0: the same network, no Bayesian layer


@dataclass(frozen=True, slots=True)
class Federation:
    """The bundled digits at six clients, and a small network of three layers."""

    population: Population
    bench: Bench
    judge: Judge
    start: ServerState

    @classmethod
    def of(cls, log_variance_lr: float = 0.25) -> Federation:
        """Everybody in place, before the first round."""
        digits, spec = load("digits"), Spec("mlp", {"inputs": 64, "hidden": [64, 32], "classes": 10})
        parts = partition(digits.train.y, Dirichlet(alpha=0.5), 6, 0).clients
        local = LocalSettings(
            epochs=5, batch_size=16, optimizer=Optimizer(lr=0.02, momentum=0.9), log_variance_lr=log_variance_lr
        )
        with seeded(0, "picture"):
            first = Single.of(spec.build(), spec)
        bench = Bench(population=6, classes=10, local=local)
        return cls(Population(digits.train, parts), bench, Judge(digits.test, 10), ServerState(0, first))

    def rounds(self, recipe: Recipe, rounds: int) -> Iterator[Row]:
        """A method's rounds, as lines of a ledger."""
        engine = InProcess(self.population)
        for record in run(recipe, engine, self.bench, self.judge, self.start, RunPlan(rounds)):
            yield {"label": recipe.label, "method": recipe.name, "seed": 0, **record.facts}

    def last_cohort(self, recipe: Recipe, rounds: int) -> tuple[Cohort, Params]:
        """What the clients sent in one more round after some, and what they were told before it."""
        engine, state = InProcess(self.population), self.start
        for record in run(recipe, engine, self.bench, None, state, RunPlan(rounds)):
            state = record.state
        brief = recipe.prepare_models(state, self.bench).brief(recipe.publishes, 10)
        answers = engine.exchange(brief, recipe.work(self.bench.local), engine.clients)
        return admit_all(answers, brief, recipe.evidence, engine.clients).cohort, brief.params


@figure("ba-bfl-deviations", paper="BA-BFL, section 4")
def draw_deviations(folder: Path) -> list[Path]:
    """Standard deviations per layer and client after six rounds: as released they stay put, here they learn."""
    sides = {
        "started and clamped as released": find_method("rklb").recipe(last=3, released=True),
        "learned by natural gradients": find_method("rklb").recipe(last=3),
    }
    federation = Federation.of()
    plt = _pyplot()
    figure, axes = plt.subplots(3, 2, figsize=(9.6, 7.0), sharex=True, sharey="col", layout="constrained")
    for column, (title, recipe) in enumerate(sides.items()):
        cohort, before = federation.last_cohort(recipe, rounds=5)
        axes[0, column].set_title(title, color=INK, fontsize=11)
        axes[2, column].set_xlabel("standard deviation of a weight")
        for axis, (layer, spread) in zip(axes[:, column], _spreads(cohort), strict=True):
            clients = dict(zip(cohort.clients, map(_sigma, cohort.tensors(spread)), strict=True))
            _histograms(axis, clients, _sigma(before[spread]))
            axis.text(0.03, 0.93, layer.removeprefix("net."), transform=axis.transAxes, va="top", color=INK)
    figure.supylabel("share of the layer's weights", fontsize=10)
    lines, words = axes[0, 1].get_legend_handles_labels()
    figure.legend(lines, words, frameon=False, fontsize=9, loc="outside lower center", ncols=4)
    return [_save(figure, folder, "ba-bfl-deviations")]


@figure("ba-bfl-layers", paper="BA-BFL, Figures 3 to 5")
def draw_layers(folder: Path) -> list[Path]:
    """Scores, fairness and time against the number of Bayesian layers, of the run in the folder or of a small one."""
    if (folder / "ledger.jsonl").is_file():
        return [by_layers(read_run(folder).rows, folder)]
    federation = Federation.of()
    recipes = [find_method("fedavg").recipe()]
    recipes += [find_method(rule).recipe(last=n) for rule in ("eaa", "gaa", "aalv", "rklb", "wb") for n in (1, 2, 3)]
    return [by_layers([row for recipe in recipes for row in federation.rounds(recipe, 4)], folder)]


def by_layers(rows: Iterable[Row], folder: Path) -> Path:
    """Draw one panel per score: mean over seeds against the number of Bayesian layers, one line per rule.

    FedAvg and every `last=0` stand at zero layers; methods with further options (controls) are left out.
    """
    found = scores_by_layers(rows)
    plt = _pyplot()
    figure, axes = plt.subplots(2, 3, figsize=(11.5, 6.4), layout="constrained")
    for axis, (key, title) in zip(axes.flat, PANELS.items(), strict=True):
        _panel(axis, found.get(key, {}), title)
    lines, words = axes[0, 0].get_legend_handles_labels()
    figure.legend(lines, words, frameon=False, loc="outside lower center", ncols=len(words) or 1)
    return _save(figure, folder, "ba-bfl-layers")


def scores_by_layers(rows: Iterable[Row]) -> dict[str, dict[str, dict[int, list[float]]]]:
    """Per score, rule and number of Bayesian layers the values of the last round, one per seed.

    Seconds are the mean over the rounds in which somebody really trained.

    Example:
        >>> line = {"method": "wb", "label": "wb(last=2)", "seed": 0, "round": 1, "nll": 0.5}
        >>> scores_by_layers([line, line | {"round": 2, "nll": 0.4}])["nll"]
        {'wb': {2: [0.4]}}
    """
    courses: dict[tuple[str, int, int], list[Row]] = {}
    for row in rows:
        if (layers := _layers(str(row["label"]))) is not None:
            courses.setdefault((str(row["method"]), layers, int(row["seed"])), []).append(row)
    found: dict[str, dict[str, dict[int, list[float]]]] = {}
    for (rule, layers, _), course in courses.items():
        for key in PANELS:
            value = _seconds(course) if key == "train_seconds" else number(max(course, key=_round), key)
            if value is not None:
                found.setdefault(key, {}).setdefault(rule, {}).setdefault(layers, []).append(value)
    return found


def _layers(label: str) -> int | None:
    """How many Bayesian layers a label speaks of; None for other methods and for those with further options."""
    if label in WITHOUT_BAYES:
        return 0
    told = re.fullmatch(rf"(?:{'|'.join(COLOURS)})\(last=(\d+)\)", label)
    return int(told[1]) if told else None


def _round(row: Row) -> int:
    return int(row["round"])


def _seconds(course: Sequence[Row]) -> float | None:
    spent = [number(row, "train_seconds") for row in course if not row.get("remembered")]
    known = [s for s in spent if s is not None]
    return fmean(known) if known else None


def _panel(axis: Any, rules: Mapping[str, Mapping[int, Sequence[float]]], title: str) -> None:
    """One score: FedAvg as a level line, each rule from it onwards."""
    level = rules.get("fedavg", {}).get(0)
    if level:
        axis.axhline(fmean(level), color=PALE, lw=1.4, ls="--", label="fedavg", zorder=1)
    for rule, by_count in rules.items():
        if rule not in COLOURS:
            continue
        points = {0: level, **by_count} if level else dict(by_count)
        counts = sorted(points)
        means = [fmean(points[n]) for n in counts]
        several = all(len(points[n]) > 1 for n in counts)
        bars = [stdev(points[n]) for n in counts] if several else None
        axis.errorbar(counts, means, bars, color=COLOURS[rule], marker="o", ms=4, lw=1.6, capsize=3, label=rule)
    axis.set_title(title, fontsize=10, color=INK)
    axis.set_xlabel("Bayesian layers", fontsize=9)
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.spines[["top", "right"]].set_visible(False)


def _spreads(cohort: Cohort) -> list[tuple[str, str]]:
    """The Bayesian layers and the names of their log-variances."""
    layout = cohort.updates[0].spec.layout
    return [(layer.name, layer.log_variances[0]) for layer in layout.layers if layer.log_variances]


def _sigma(log_variance: Tensor) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.asarray((log_variance.double() / 2).exp().flatten())


def _histograms(axis: Any, clients: Mapping[str, Any], before: Any) -> None:
    """Every client's deviations as a line, those of the fused posterior it began with filled."""
    bins = np.geomspace(4e-3, 1.2, 60)
    shares = np.full(len(before), 1 / len(before))
    axis.hist(before, bins, weights=shares, color=PALE, alpha=0.5, label="fused, before the round")
    for (client, sigma), colour in zip(clients.items(), COLOURS.values(), strict=True):
        axis.hist(sigma, bins, weights=shares, histtype="step", lw=1.3, color=colour, alpha=0.85, label=client)
    axis.set_xscale("log")
    axis.spines[["top", "right"]].set_visible(False)


def _pyplot() -> Any:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def _save(figure: Any, folder: Path, name: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.png"
    figure.savefig(path, dpi=150, bbox_inches="tight", pad_inches=0.15)
    _pyplot().close(figure)
    return path

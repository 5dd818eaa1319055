"""What accuracy costs: bytes, FLOPs, the model's size, what it took to reach a target, and privacy."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np
from markupsafe import Markup

from fedfuse.report.plots import (
    LEAST_SHARE,
    SHARES,
    Figure,
    Groups,
    Inks,
    XAxis,
    curve_figure,
    edges_of,
    learning_curve,
    tick_words,
)
from fedfuse.report.read import Row, Run, finite, items, number, part, settings_in
from fedfuse.report.scores import SAME_COST, MeanSd, by_label, last_rows, mean_sd, summary
from fedfuse.report.svg import WIDTH, drawing, heat_map, ink, line, marker, scale_for, tag, wide, x_axis, y_axis
from fedfuse.report.tables import byte_unit, flop_unit

UnitOf: TypeAlias = Callable[[float], tuple[float, str]]
Paths: TypeAlias = Mapping[str, list[tuple[float, MeanSd]]]


def traffic(groups: Groups, inks: Inks) -> Figure | None:
    """Accuracy against all bytes sent so far, both ways, round after round.

    Example:
        >>> row = {"seed": 0, "bytes_up": 500, "bytes_down": 1000}
        >>> rows = [{**row, "round": at, "accuracy": 0.4 * at} for at in (1, 2)]
        >>> "wb: 80.0 % for 3 kB" in traffic({"wb": rows}, {"wb": 0}).picture
        True
    """
    paths = spent_paths(groups, ("bytes_up", "bytes_down"))
    return _against(paths, inks, "Bytes against accuracy", "sent up and down by all clients", byte_unit)


def effort(groups: Groups, inks: Inks) -> Figure | None:
    """Accuracy against the FLOPs of all clients so far, round after round.

    Example:
        >>> rows = [{"seed": 0, "round": at, "accuracy": 0.4 * at, "flops": 2.5e9} for at in (1, 2)]
        >>> "wb: 80.0 % for 5 GFLOP" in effort({"wb": rows}, {"wb": 0}).picture
        True
    """
    words = "clients' training and evidence"
    return _against(spent_paths(groups, ("flops",)), inks, "FLOPs against accuracy", words, flop_unit)


def spent_paths(groups: Groups, keys: Sequence[str]) -> Paths:
    """Per label (spent so far, accuracy then), round after round, both means over seeds."""
    paths: dict[str, list[tuple[float, MeanSd]]] = {}
    for label, rows in groups.items():
        spent = 0.0
        for at in sorted({row["round"] for row in rows}):
            here = [row for row in rows if row["round"] == at]
            both = mean_sd(sum(number(row, key) or 0.0 for key in keys) for row in here)
            spent += both.mean if both else 0.0
            if (score := mean_sd(number(row, "accuracy") for row in here)) is not None:
                paths.setdefault(label, []).append((spent, score))
    return paths


def _against(paths: Paths, inks: Inks, title: str, words: str, unit_of: UnitOf) -> Figure | None:
    paths = {label: path for label, path in paths.items() if path[-1][0] > 0}
    spent = [at for path in paths.values() for at, _ in path]
    if not spent:
        return None
    # where all methods spent the same, but for names in headers, accuracy alone tells as much
    ends, rounds = [path[-1][0] for path in paths.values()], max(len(path) for path in paths.values())
    if max(ends) <= (1 + SAME_COST) * min(ends) and (len(ends) > 1 or rounds == 1):
        return None
    log = wide(spent)
    size, unit = unit_of(max(spent))
    x = scale_for([at / size for at in spent], 46, WIDTH - 14, log=log, least=0.1 * max(spent) / size)
    edges = [edge for path in paths.values() for _, value in path for edge in edges_of(value)]
    y = scale_for(edges, 238, 22, least=LEAST_SHARE)
    parts = []
    for label, path in paths.items():
        points = [(x(at / size), y(value.mean)) for at, value in path]
        at, value = path[-1]
        low, high = edges_of(value)
        parts += [
            line(points, inks[label]) if len(points) > 1 else Markup(""),
            tag("path", d=f"M{points[-1][0]:.1f} {y(low):.1f}V{y(high):.1f}", class_=f"bar {ink(inks[label])}"),
            marker(inks[label], *points[-1], 4.5, f"{label}: {100 * value.mean:.1f} % for {at / size:.3g} {unit}"),
        ]
    axes = (
        y_axis(y, 46, WIDTH - 8, "accuracy, %", tick_words(y, share=True)),
        x_axis(x, 22, 238, f"{words}, {unit}", {at: f"{at:g}" for at in x.ticks()}),
    )
    note = "Up and to the left is better." + (" Logarithmic scale." if log else "")
    return Figure(title, drawing(WIDTH, 274, title, *axes, *parts), note, tuple(paths))


def model_size(groups: Groups, inks: Inks) -> Figure | None:
    """How many weights the fused model has, round by round, where that ever changes.

    Example:
        >>> rows = [{"seed": 0, "round": at, "weights": 100 - 30 * at} for at in (1, 2)]
        >>> model_size({"fedap": rows}, {"fedap": 0}).title
        'Weights of the model'
    """
    sizes: dict[tuple[str, int], set[float]] = {}
    for label, rows in groups.items():
        for row in rows:
            if (size := number(row, "weights")) is not None:
                sizes.setdefault((label, row["seed"]), set()).add(size)
    if all(len(found) == 1 for found in sizes.values()):
        return None
    return learning_curve(groups, inks, "weights", "Weights of the model")


def kept_channels(groups: Groups) -> Figure | None:
    """Which share of its channels each layer has kept, for every method that removed some; mean over seeds.

    Example:
        >>> row = {"seed": 0, "round": 1, "channels": {"conv1": [3, 6], "conv2": [4, 16]}}
        >>> "fedap, conv2: 25" in kept_channels({"fedap": [row], "fedavg": [{"seed": 0, "round": 1}]}).picture
        True
    """
    found = {label: [part(row, "channels") for row in last_rows(rows)] for label, rows in groups.items()}
    found = {label: tables for label, tables in found.items() if any(tables)}
    layers = list(dict.fromkeys(str(name) for tables in found.values() for table in tables for name in table))
    if not layers:
        return None
    shares = np.array([[_share([items(t, layer) for t in tables]) for layer in layers] for tables in found.values()])
    if np.nanmin(shares, initial=1.0) == 1.0:
        return None
    picture = heat_map("Channels kept", tuple(found), layers, shares, "percent")
    return Figure("Channels kept", picture, "Per cent of each layer's own, mean over seeds.")


def _share(pairs: Sequence[Sequence[object]]) -> float:
    whole = [(finite(pair[0]), finite(pair[1])) for pair in pairs if len(pair) == 2]
    shares = [kept / size for kept, size in whole if kept is not None and size]
    return sum(shares) / len(shares) if shares else math.nan


WINDOW = 5
"""Rounds over which accuracy is averaged before it counts as reached: single rounds swing."""


@dataclass(frozen=True, slots=True)
class TargetCost:
    """What one method spent until its accuracy, averaged over the last rounds, reached the target.

    Attributes:
        label: the method.
        seeds: how many of its seeds got there, and of how many.
        rounds: mean number of rounds over the seeds that did.
        flops: the clients' training and evidence until then.
        sent: bytes up and down until then.
        server_flops: the server's steps until then, a first stage among them.
        seconds: of clients and server until then, on this machine; None where clients were remembered from another
            method, for then it is not known.
        evidence: the part of the clients' FLOPs that went into what they sent in addition to weights.
        curvature: the part of that which went into the curvature of their losses.
    """

    label: str
    seeds: tuple[int, int]
    rounds: float | None
    flops: float | None
    sent: float | None
    server_flops: float | None = None
    seconds: float | None = None
    evidence: float | None = None
    curvature: float | None = None


def target_in(config: str, groups: Groups) -> float | None:
    """The accuracy to be reached: the file's own, else the highest multiple of 5 % that half of the methods reach.

    Example:
        >>> target_in("judge.target = 0.6", {})
        0.6
        >>> target_in("", {"a": [{"seed": 0, "round": 1, "accuracy": 0.62}], "b": [{"seed": 0, "round": 1}]})
        0.6
    """
    configured = finite(part(settings_in(config), "judge").get("target"))
    if configured is not None:
        return configured
    tops = sorted((max(curve) for rows in groups.values() if (curve := _mean_curve(rows))), reverse=True)
    if not tops:
        return None
    middle = tops[math.ceil(len(tops) / 2) - 1]
    return math.floor(round(20 * middle, 9)) / 20 or None


def _mean_curve(rows: Sequence[Row]) -> list[float]:
    """The smoothed accuracy of each round, over the seeds that have come so far."""
    curves = [_smooth(rows, seed) for seed in sorted({row["seed"] for row in rows})]
    longest = max(map(len, curves), default=0)
    return [statistics.fmean(curve[at] for curve in curves if at < len(curve)) for at in range(longest)]


def _smooth(rows: Sequence[Row], seed: int) -> list[float]:
    """One seed's accuracy, each round with up to four before it; a window is full before it counts."""
    scores = [value for row in rows if row["seed"] == seed and (value := number(row, "accuracy")) is not None]
    window = min(WINDOW, len(scores))
    return [sum(scores[at - window : at]) / window for at in range(window, len(scores) + 1)] if window else []


def target_costs(groups: Groups, target: float) -> list[TargetCost]:
    """What each method spent until it reached the target.

    Example:
        >>> rows = [{"seed": 0, "round": at, "accuracy": 0.2 * at, "flops": 3.0, "bytes_up": 1} for at in (1, 2, 3)]
        >>> target_costs({"wb": rows}, 0.4)[0]
        TargetCost(label='wb', seeds=(1, 1), rounds=3.0, flops=9.0, sent=3.0, server_flops=None, seconds=None, ...)
    """
    costs = []
    for label, rows in groups.items():
        seeds = sorted({row["seed"] for row in rows})
        spent = [found for seed in seeds if (found := _until(rows, seed, target)) is not None]
        means = [sum(column) / len(spent) for column in zip(*spent, strict=True)]
        rounds, *others = [None if math.isnan(value) else value or None for value in means] or [None] * 3
        costs.append(TargetCost(label, (len(spent), len(seeds)), rounds, *others))
    return costs


def _until(rows: Sequence[Row], seed: int, target: float) -> tuple[float, ...] | None:
    """One seed's rounds, and then as `TargetCost` has it, until its smoothed accuracy is at the target."""
    mine = [row for row in rows if row["seed"] == seed and number(row, "accuracy") is not None]
    smooth = _smooth(mine, seed)
    there = [at for at, score in enumerate(smooth) if score >= target - 1e-12]
    if not there:
        return None
    done = mine[: len(mine) - len(smooth) + there[0] + 1]
    remembered = any(number(row, "remembered") for row in done)
    seconds = math.nan if remembered else _spent(done, "train_seconds", "server_seconds")
    server, sent = _spent(done, "server_flops", "first_flops"), _spent(done, "bytes_up", "bytes_down")
    evidence = (_spent(done, "evidence_flops"), _spent(done, "curvature_flops"))
    return float(len(done)), _spent(done, "flops"), sent, server, seconds, *evidence


def _spent(rows: Sequence[Row], *keys: str) -> float:
    return sum(number(row, key) or 0.0 for row in rows for key in keys)


def target_table(found: Sequence[TargetCost]) -> tuple[tuple[str, ...], tuple[tuple[str, tuple[str, ...]], ...]]:
    """What the target cost as headings and rows of words, each column in one unit; evidence where a client sent any.

    Example:
        >>> target_table([TargetCost("wb", (1, 1), 3.0, 9e9, 1_500), TargetCost("x", (0, 1), None, None, None)])[0]
        ('seeds', 'rounds', "clients' work, GFLOP", "server's work, GFLOP", 'sent, kB', 'seconds')
    """
    parts = [key for key in ("evidence", "curvature") if any(getattr(cost, key) for cost in found)]
    flops, flop = flop_unit(max((cost.flops or 0.0 for cost in found), default=0.0))
    sent, byte = byte_unit(max((cost.sent or 0.0 for cost in found), default=0.0))
    rows = tuple(
        (
            cost.label,
            (
                f"{cost.seeds[0]} of {cost.seeds[1]}",
                "–" if cost.rounds is None else f"{cost.rounds:.1f}",
                _amount(cost.flops, flops),
                *(_amount(getattr(cost, key), flops) for key in parts),
                _amount(cost.server_flops, flops),
                _amount(cost.sent, sent),
                "–" if cost.seconds is None else f"{cost.seconds:,.1f}",
            ),
        )
        for cost in found
    )
    work = (f"clients' work, {flop}", *(f"of it {key}, {flop}" for key in parts), f"server's work, {flop}")
    return ("seeds", "rounds", *work, f"sent, {byte}", "seconds"), rows


def _amount(value: float | None, unit: float) -> str:
    return "–" if value is None else f"{value / unit:,.2f}"


EPSILON = "ε (all exchanges together)"


@dataclass(frozen=True, slots=True)
class PrivacyCurve:
    """One method's score at every ε, and without noise where that was run too.

    Attributes:
        label: the first label with noise, for its look.
        by_epsilon: the score at each ε, in rising order.
        plain: the score without noise.
        plain_label: whose that is.
    """

    label: str = ""
    by_epsilon: dict[float, MeanSd] = field(default_factory=dict)
    plain: MeanSd | None = None
    plain_label: str = ""


def privacy_curves(runs: Sequence[Run], score: str = "accuracy") -> dict[str, PrivacyCurve]:
    """By method, its score after the last round against ε, where it was run at two of them or more.

    ε is what the ledger says of all exchanges; of older ledgers, what the configuration says of one.

    Example:
        >>> rows = [{"label": f"e{e}", "method": "ridge", "seed": 0, "round": 1, "accuracy": a, "facts":
        ...          {"privacy": {"epsilon": e}}} for e, a in ((1.0, 0.6), (10.0, 0.7))]
        >>> {e: v.mean for e, v in privacy_curves([Run("", "", {}, {}, tuple(rows))])["ridge"].by_epsilon.items()}
        {1.0: 0.6, 10.0: 0.7}
    """
    found: dict[str, PrivacyCurve] = {}
    for run in runs:
        values = {row.label: row.values for row in summary(run.rows)}
        for label, rows in by_label(run.rows).items():
            if (value := values.get(label, {}).get(score)) is None:
                continue
            name, epsilon = str(rows[0].get("method", label)), _epsilon(rows, label, run)
            curve = found.get(name, PrivacyCurve())
            if epsilon is not None:
                rising = dict(sorted({**curve.by_epsilon, epsilon: value}.items()))
                found[name] = replace(curve, label=curve.label or label, by_epsilon=rising)
            elif curve.plain is None:
                found[name] = replace(curve, plain=value, plain_label=label)
    return {name: curve for name, curve in found.items() if len(curve.by_epsilon) > 1}


def _epsilon(rows: Sequence[Row], label: str, run: Run) -> float | None:
    """ε of a label's last round, the largest of its seeds; None without noise."""
    told = [finite(part(part(row, "facts"), "privacy").get("epsilon")) for row in last_rows(rows)]
    if given := [value for value in told if value is not None and value > 0]:
        return max(given)
    entries = [entry for entry in items(settings_in(run.config_text), "methods") if isinstance(entry, Mapping)]
    said = [entry.get("epsilon") for entry in entries if label in (entry.get("label"), entry.get("name"))]
    return finite(said[0]) if said else None


def privacy_figures(runs: Sequence[Run], inks: Mapping[str, int], score: str = "accuracy") -> tuple[Figure, ...]:
    """One picture per method: its score against ε on a logarithmic axis, and level what it reaches without noise."""
    drawn = []
    for name, curve in privacy_curves(runs, score).items():
        own, ends = {name: inks.get(curve.label, 0)}, (min(curve.by_epsilon), max(curve.by_epsilon))
        lines: dict[str, Mapping[float, MeanSd]] = {name: curve.by_epsilon}
        words = "Bands reach one standard deviation to each side."
        if curve.plain is not None:
            lines["no noise"], own["no noise"] = dict.fromkeys(ends, curve.plain), inks.get(curve.plain_label, 1)
            words += " The level line is without noise."
        title = f"{score.capitalize()} against ε: {name}"
        figure = curve_figure(lines, own, title, XAxis(EPSILON, log=True), score in SHARES)
        if figure is not None:
            drawn.append(Figure(title, figure.picture, f"{words} {figure.note}".strip()))
    return tuple(drawn)

"""Accuracy against ε: what privacy costs, for methods that differ in it, with what they reach without noise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from fedfuse.report.plots import SHARES, Figure, XAxis, curve_figure
from fedfuse.report.read import Row, Run, finite, items, part, settings_in
from fedfuse.report.scores import MeanSd, by_label, last_rows, summary

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

"""Four hospitals, one risk model: run `python run.py [FOLDER]`.

The hospitals of the UCI heart disease data fit a logistic regression together, by several methods; the results stand
beside the pooled fit, each hospital's own fit and the figures that FLamby published, and Newton's sums give the table
of coefficients that a statistician would ask for.
"""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fedfuse
from fedfuse.data import Dataset, load
from fedfuse.experiment.results import Results
from fedfuse.nets.glm import fit_glm, layer_matrix, penalties
from fedfuse.tasks import BINARY
from fedfuse.wire.files import load_model

HERE = Path(__file__).resolve().parent
PUBLISHED = {"pooled": 0.795, "FedAvg": 0.748, "FedAdam": 0.779}  # FLamby (NeurIPS 2022), accuracy on the pooled test
OWN_RIDGE = 1e-3  # of a hospital's own fit, which may have no finite optimum otherwise


def with_constant(x: Tensor) -> Tensor:
    """Rows in float64 with a 1 appended."""
    return torch.cat([x.double(), torch.ones(len(x), 1, dtype=torch.float64)], 1)


def fit(x: Tensor, y: Tensor, ridge: float = 0.0) -> Tensor:
    """The logistic regression of some rows."""
    start = torch.zeros(1, x.shape[1] + 1, dtype=torch.float64)
    return fit_glm(with_constant(x), y, "bernoulli", *penalties(start, ridge, "bernoulli"))[0]


def interval(accuracy: float, rows: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share."""
    z = 1.959963984540054
    centre, denominator = accuracy + z * z / (2 * rows), 1 + z * z / rows
    half = z * math.sqrt(accuracy * (1 - accuracy) / rows + z * z / (4 * rows * rows))
    return (centre - half) / denominator, (centre + half) / denominator


def score_line(name: str, weights: Tensor | None, scores: Mapping[str, Any], rows: int, pooled: Tensor) -> str:
    """One line of the table."""
    low, high = interval(scores["accuracy"], rows)
    away = "–" if weights is None else f"{float((weights - pooled).norm()):.1e}"
    return (
        f"| {name} | {scores['accuracy']:.3f} | {low:.3f}–{high:.3f} | {scores['auroc']:.3f} | {scores['nll']:.3f} "
        f"| {scores['ece']:.3f} | {away} |"
    )


def score_lines(data: Dataset, results: Results) -> Iterator[str]:
    """The pooled fit, each hospital's own, and every method after its last round, on the first seed."""
    pooled, test = fit(data.train.x, data.train.y), data.test
    models = {"pooled fit": pooled}
    for hospital in sorted(set(data.owners)):
        mine = torch.tensor([owner == hospital for owner in data.owners])
        models[f"{hospital} alone ({int(mine.sum())} rows)"] = fit(data.train.x[mine], data.train.y[mine], OWN_RIDGE)
    for name, weights in models.items():
        scores = BINARY.measure(with_constant(test.x) @ weights.T, test.y, 2)
        yield score_line(name, weights, scores, len(test), pooled)
    last = max(row["round"] for row in results.rows)
    for row in results.rows:
        if row["round"] == last and row["seed"] == results.rows[0]["seed"] and row["method"] != "local":
            yield score_line(row["label"], fused_weights(results.folder, row), row, len(test), pooled)


def fused_weights(folder: Path, row: Mapping[str, Any]) -> Tensor:
    """A run's final weights: Newton's in float64, as the server keeps them, the others as their file has them."""
    if row["method"] == "newton":
        return torch.tensor([[c["estimate"] for c in row["facts"]["newton"]["coefficients"]]], dtype=torch.float64)
    files = sorted((folder / "models").glob(f"{row['method']}*-{row['seed']}.safetensors"))
    model = load_model(files[0])[0]
    member = model.members[0]
    return layer_matrix(member.spec, member.posterior.mean, {})


def coefficient_lines(facts: Mapping[str, Any]) -> Iterator[str]:
    """Odds ratios per standard deviation, or against the first category."""
    for c in facts["coefficients"]:
        yield (
            f"| {c['name']} | {c['estimate']:.3f} | {c['standard_error']:.3f} | {c['odds_ratio']:.2f} "
            f"({c['ratio_low']:.2f}–{c['ratio_high']:.2f}) | {c['p']:.4f} |"
        )


def page(data: Dataset, results: Results) -> str:
    """Everything as Markdown."""
    newton = [row["facts"]["newton"] for row in results.rows if row["method"] == "newton" and row["seed"] == 0]
    found = newton[-1]["heterogeneity"]
    settled = next((at for at, facts in enumerate(newton, 1) if facts["step"] < 1e-10), len(newton))
    published = ", ".join(f"{name} {value:.3f}" for name, value in PUBLISHED.items())
    return "\n".join(
        [
            "| | accuracy | 95 % interval | AUROC | NLL | ECE | distance to the pooled fit |",
            "|---|---:|---:|---:|---:|---:|---:|",
            *score_lines(data, results),
            "",
            f"{len(data.test)} test rows; FLamby reports {published} (another split by the same rule).",
            "",
            results.table(),
            "",
            f"Newton's steps were below 1e-10 at exchange {settled}. Heterogeneity of the hospitals: "
            f"Q = {found['Q']:.1f} on {found['df']} degrees of freedom (p = {found['p']:.4f}), I² = {found['I2']:.0%}.",
            "",
            "| feature | estimate | standard error | odds ratio (95 %) | p |",
            "|---|---:|---:|---:|---:|",
            *coefficient_lines(newton[-1]),
            "",
        ]
    )


def main(folder: Path, *sets: str) -> Path:
    """Run the experiment and write the page."""
    results = fedfuse.run(HERE / "experiment.toml", out=folder / "run", sets=sets, workers=0, progress=False)
    told = folder / "results.md"
    told.write_text(page(load("heart-disease", task=BINARY), results), encoding="utf-8")
    return told


if __name__ == "__main__":
    where = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.mkdtemp())
    print(main(where).read_text(encoding="utf-8"))

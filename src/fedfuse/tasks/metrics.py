"""Scores that several tasks share: calibration by bins, tables of confusion, the area under the ROC curve."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Bins = dict[str, list[float]]


def reliability_bins(probability: Tensor, happened: Tensor, bins: int) -> Bins:
    """Per bin of equal width (lower, upper] the mean probability, how often it came true, and the count."""
    bin_index = (probability * bins).ceil().long().clamp(1, bins) - 1
    count = torch.bincount(bin_index, minlength=bins).double()
    total = count.clamp(min=1)
    return {
        "confidence": (torch.bincount(bin_index, probability, minlength=bins) / total).tolist(),
        "accuracy": (torch.bincount(bin_index, happened.double(), minlength=bins) / total).tolist(),
        "count": count.long().tolist(),
    }


def pool_bins(several: Sequence[Mapping[str, list[float]]]) -> Bins:
    """Several models' bins as one: counts add up, means are weighted by them."""
    count = torch.tensor([r["count"] for r in several], dtype=torch.float64)
    share = count / count.sum(0).clamp(min=1)
    return {
        **{
            name: (share * torch.tensor([r[name] for r in several])).sum(0).tolist()
            for name in ("confidence", "accuracy")
        },
        "count": count.sum(0).long().tolist(),
    }


def calibration_error(reliability: Mapping[str, list[float]]) -> float:
    """Σ_b (n_b/n) |how often − probability|."""
    rows = list(zip(reliability["count"], reliability["accuracy"], reliability["confidence"], strict=True))
    return sum(n * abs(a - c) for n, a, c in rows) / max(1, sum(n for n, _, _ in rows))


def confusion_table(labels: Tensor, guess: Tensor, classes: int) -> Tensor:
    """How many rows of each class (down) were taken for each (across)."""
    return torch.bincount(labels * classes + guess, minlength=classes * classes).view(classes, classes)


def accuracy_per_class(confusion: Tensor) -> list[float | None]:
    """The share of each class's rows that were taken for it; None for a class without rows."""
    rows_per_class = confusion.sum(1)
    shares = confusion.diagonal() / rows_per_class.clamp(min=1)
    return [float(s) if n else None for s, n in zip(shares, rows_per_class, strict=True)]


def pool_tables(several: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Several models' confusions and bins taken together."""
    confusion = torch.tensor([s["confusion"] for s in several]).sum(0)
    return {
        "per_class": accuracy_per_class(confusion),
        "confusion": confusion.tolist(),
        "reliability": pool_bins([s["reliability"] for s in several]),
    }


def auroc(inside: Tensor, outside: Tensor) -> float:
    """The chance that a score from outside exceeds one from inside, ties counting half.

    Example:
        >>> auroc(torch.tensor([0.1, 0.2]), torch.tensor([0.2, 0.9]))
        0.875
    """
    inside, outside = inside.double().flatten().sort().values, outside.flatten()
    below, up_to = (torch.searchsorted(inside, outside.double(), right=right).double() for right in (False, True))
    return float(((below + up_to) / 2).mean() / len(inside))


def auroc_of(scores: Tensor, on: Tensor) -> float | None:
    """The area under the ROC curve; None where all rows are of one kind.

    Example:
        >>> auroc_of(torch.tensor([0.1, 0.2, 0.9]), torch.tensor([0, 1, 1]))
        1.0
    """
    on = on.bool()
    return auroc(scores[~on], scores[on]) if bool(on.any()) and not bool(on.all()) else None

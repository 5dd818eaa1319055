"""Yes or no, once or for several labels: sigmoid, binary cross entropy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fedfuse.tasks.metrics import (
    accuracy_per_class,
    auroc_of,
    calibration_error,
    confusion_table,
    pool_tables,
    reliability_bins,
)
from fedfuse.tasks.task import Reduction, Scores, Task, as_columns, describe_targets


@dataclass(frozen=True, slots=True)
class Bernoulli(Task):
    """Outputs are log-odds, one for each thing that may be so or not."""

    likelihood: ClassVar[str] = "Bernoulli"
    headline: ClassVar[str] = "accuracy"
    lower: ClassVar[frozenset[str]] = frozenset({"nll", "ece", "brier"})

    def loss(self, outputs: Tensor, y: Tensor, reduction: Reduction = "mean") -> Tensor:
        """Binary cross entropy, summed over a row's labels."""
        z = as_columns(outputs, len(y))
        each = F.binary_cross_entropy_with_logits(z, as_columns(y, len(y)).to(z), reduction="none").sum(-1)
        return each.mean() if reduction == "mean" else each.sum()

    def sample(self, outputs: Tensor, generator: torch.Generator | None) -> Tensor:
        """A yes or no for each output."""
        return torch.bernoulli(outputs.sigmoid().cpu(), generator=generator).to(outputs.device)

    def predict(self, outputs: Tensor) -> Tensor:
        """Probabilities."""
        return outputs.sigmoid()

    def as_outputs(self, predictions: Tensor) -> Tensor:
        """Log-odds; those of certainty are as large as its precision allows."""
        return predictions.logit(eps=torch.finfo(predictions.dtype).eps)

    def entropy(self, outputs: Tensor) -> Tensor:
        """−p log p − (1 − p) log(1 − p), summed over labels."""
        both = torch.stack([outputs.sigmoid(), (-outputs).sigmoid()])
        each: Tensor = torch.special.xlogy(both, both)
        return -each.sum((0, -1))


@dataclass(frozen=True, slots=True)
class Binary(Bernoulli):
    """One yes or no per row: the target is 0 or 1, the one output its log-odds.

    Example:
        >>> round(float(BINARY.loss(torch.zeros(2, 1), torch.tensor([0, 1]))), 4)
        0.6931
    """

    name: ClassVar[str] = "binary"
    scores: ClassVar[tuple[str, ...]] = ("accuracy", "auroc", "nll", "ece", "brier")

    def outputs(self, classes: int) -> int:  # noqa: ARG002 - the form's signature
        """One: the log-odds of the second class."""
        return 1

    def flaw(self, y: Tensor, classes: int = 0) -> str | None:
        """Zeros and ones in int64, one per row."""
        if y.dtype != torch.int64 or y.ndim != 1:
            return f"targets are {describe_targets(y)}, expected int64 of shape ({len(y)},): 0 or 1 per row"
        if len(y) and (int(y.min()) < 0 or int(y.max()) > 1):
            return f"targets run from {int(y.min())} to {int(y.max())}, expected 0 or 1"
        return None if classes in (0, 2) else f"there are {classes} classes, expected 2: no and yes"

    def sample(self, outputs: Tensor, generator: torch.Generator | None) -> Tensor:
        """A yes or no for each row."""
        return Bernoulli.sample(self, outputs, generator).flatten().long()

    def measure(self, outputs: Tensor, y: Tensor, classes: int, bins: int = 15) -> Scores:  # noqa: ARG002
        """Accuracy at one half, area under the ROC curve, and how good the probabilities are.

        brier = mean (p − y)²; ece is the mean gap between the probability of "yes" and how often it was so, over
        equal-width bins of that probability: the calibration curve of risk models.

        Example:
            >>> scores = BINARY.measure(torch.tensor([[-2.0], [1.0], [3.0]]).double(), torch.tensor([0, 0, 1]), 2)
            >>> round(scores["accuracy"], 3), scores["auroc"], scores["confusion"]
            (0.667, 1.0, [[1, 1], [0, 1]])
        """
        z = outputs.reshape(len(y))
        p, guess = z.sigmoid(), (z > 0).long()
        confusion, reliability = confusion_table(y, guess, 2), reliability_bins(p, y, bins)
        return {
            "accuracy": float((guess == y).double().mean()),
            "auroc": auroc_of(z, y),
            "nll": float(self.loss(z, y)),
            "ece": calibration_error(reliability),
            "brier": float((p - y).square().mean()),
            "per_class": accuracy_per_class(confusion),
            "confusion": confusion.tolist(),
            "reliability": reliability,
        }

    def pool(self, several: Sequence[Mapping[str, Any]]) -> Scores:
        """Mean scores, and the tables taken together."""
        return {**Task.pool(self, several), **pool_tables(several)}


@dataclass(frozen=True, slots=True)
class Multilabel(Bernoulli):
    """Several labels per row, each on or off: one output and one target of 0 or 1 for each."""

    name: ClassVar[str] = "multilabel"
    scores: ClassVar[tuple[str, ...]] = ("accuracy", "exact", "auroc", "nll", "ece", "brier")

    def outputs(self, classes: int) -> int:
        """One for each label."""
        return classes

    def flaw(self, y: Tensor, classes: int = 0) -> str | None:
        """Zeros and ones in floating point, a column for each label."""
        width = classes or "labels"
        if not y.is_floating_point() or y.ndim != 2 or (classes and y.shape[1] != classes):
            return f"targets are {describe_targets(y)}, expected float32 of shape ({len(y)}, {width}): 0 or 1 each"
        odd = y[(y != 0) & (y != 1)]
        return f"targets hold {float(odd[0]):g}, expected 0 or 1" if len(odd) else None

    def measure(self, outputs: Tensor, y: Tensor, classes: int, bins: int = 15) -> Scores:  # noqa: ARG002
        """Accuracy over all labels, rows that are right in every label, and means over labels of the other scores.

        Example:
            >>> z, y = torch.tensor([[2.0, -1.0], [1.0, 1.0]]).double(), torch.tensor([[1.0, 0.0], [0.0, 1.0]])
            >>> scores = MULTILABEL.measure(z, y, 2)
            >>> scores["accuracy"], scores["exact"], scores["auroc"]
            (0.75, 0.5, 1.0)
        """
        p, on = outputs.sigmoid(), y.to(outputs)
        right = (outputs > 0) == on.bool()
        reliability = reliability_bins(p.flatten(), on.flatten(), bins)
        areas = [area for z, t in zip(outputs.T, on.T, strict=True) if (area := auroc_of(z, t)) is not None]
        return {
            "accuracy": float(right.double().mean()),
            "exact": float(right.all(-1).double().mean()),
            "auroc": sum(areas) / len(areas) if areas else None,
            "nll": float(self.loss(outputs, y)) / outputs.shape[1],
            "ece": calibration_error(reliability),
            "brier": float((p - on).square().mean()),
            "per_class": right.double().mean(0).tolist(),
            "reliability": reliability,
        }


BINARY, MULTILABEL = Binary(), Multilabel()

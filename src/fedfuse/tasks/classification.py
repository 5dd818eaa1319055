"""One of several classes: softmax, cross entropy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fedfuse.tasks.metrics import (
    accuracy_per_class,
    calibration_error,
    confusion_table,
    pool_tables,
    reliability_bins,
)
from fedfuse.tasks.task import Reduction, Scores, Task, describe_targets


@dataclass(frozen=True, slots=True)
class Classification(Task):
    """Each row belongs to one class: outputs are logits of a softmax, targets the classes' numbers."""

    name: ClassVar[str] = "classification"
    likelihood: ClassVar[str] = "categorical"
    headline: ClassVar[str] = "accuracy"
    scores: ClassVar[tuple[str, ...]] = ("accuracy", "nll", "ece", "brier")
    lower: ClassVar[frozenset[str]] = frozenset({"nll", "ece", "brier"})

    def outputs(self, classes: int) -> int:
        """One for each class."""
        return classes

    def flaw(self, y: Tensor, classes: int = 0) -> str | None:
        """Classes are int64, one per row, from 0 on."""
        if y.dtype != torch.int64 or y.ndim != 1:
            return f"labels are {describe_targets(y)}, expected int64 of shape ({len(y)},): one number per row"
        if len(y) and (int(y.min()) < 0 or 0 < classes <= int(y.max())):
            return f"labels run from {int(y.min())} to {int(y.max())}, expected 0 to {classes - 1}; renumber the labels"
        return None

    def loss(self, outputs: Tensor, y: Tensor, reduction: Reduction = "mean") -> Tensor:
        """Cross entropy: −log softmax(z)_y."""
        return F.cross_entropy(outputs, y, reduction=reduction)

    def sample(self, outputs: Tensor, generator: torch.Generator | None) -> Tensor:
        """A class for each row, drawn where the generator is: on the CPU."""
        return torch.multinomial(outputs.softmax(-1).cpu(), 1, generator=generator)[:, 0].to(outputs.device)

    def predict(self, outputs: Tensor) -> Tensor:
        """Probabilities."""
        return outputs.softmax(-1)

    def as_outputs(self, predictions: Tensor) -> Tensor:
        """Log probabilities."""
        return predictions.log()

    def average(self, outputs: Tensor, weights: Tensor | None = None) -> Tensor:
        """Log of the mean probability, in log space, so that a vanishing probability does not become −∞."""
        log_probs = outputs.log_softmax(-1)
        if weights is None:
            return log_probs.logsumexp(0) - math.log(len(outputs))
        return torch.logsumexp(log_probs + weights.to(outputs).log()[:, None, None], 0)

    def entropy(self, outputs: Tensor) -> Tensor:
        """−Σ p log p.

        Example:
            >>> CLASSIFICATION.entropy(torch.tensor([[0.5, 0.5], [1.0, 0.0]]).log())
            tensor([0.6931, -0.0000])
        """
        probs = outputs.log_softmax(-1).exp()
        each: Tensor = torch.special.xlogy(probs, probs)
        return -each.sum(-1)

    def measure(self, outputs: Tensor, y: Tensor, classes: int, bins: int = 15) -> Scores:
        """All scores of a table of logits or log probabilities.

        accuracy = mean 1[argmax = y]; nll = −mean log p_y; brier = mean Σ_c (p_c − 1[c = y])²; ece = Σ_b (n_b/n)
        |accuracy_b − confidence_b| over equal-width bins (lower, upper], so that confidence 1 falls in the last one.
        Outputs beyond the classes ("none of them") are left out, and the others share what they had.

        Example:
            >>> z = torch.tensor([[0.8, 0.2], [0.4, 0.6]]).double().log()
            >>> scores = CLASSIFICATION.measure(z, torch.tensor([0, 0]), 2)
            >>> scores["accuracy"], round(scores["brier"], 3), scores["confusion"]
            (0.5, 0.4, [[1, 1], [0, 0]])
        """
        log_probs = outputs[:, :classes].log_softmax(-1)
        probs = log_probs.exp()
        confidence, guess = probs.max(-1)
        right = guess == y
        confusion = confusion_table(y, guess, classes)
        reliability = reliability_bins(confidence, right, bins)
        return {
            "accuracy": float(right.double().mean()),
            "nll": float(-log_probs.gather(1, y[:, None]).mean()),
            "ece": calibration_error(reliability),
            "brier": float((probs - F.one_hot(y, classes).to(probs)).square().sum(-1).mean()),
            "per_class": accuracy_per_class(confusion),
            "confusion": confusion.tolist(),
            "reliability": reliability,
        }

    def pool(self, several: Sequence[Mapping[str, Any]]) -> Scores:
        """Mean scores, and the tables taken together."""
        return {**Task.pool(self, several), **pool_tables(several)}

    def score(self, outputs: Tensor, y: Tensor, classes: int) -> float:
        """Accuracy."""
        return float((outputs[:, :classes].argmax(-1) == y).double().mean())


CLASSIFICATION = Classification()

"""The form of a task: everything that depends on what a target is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

Reduction = Literal["mean", "sum"]
Scores = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Task(ABC):
    """What a network's outputs mean, and how far they are from the targets.

    `classes` below are how many names the targets have: of classes, of labels that may each be on, or of numbers.

    Attributes:
        name: as files and headers have it.
        likelihood: the distribution whose negative log-likelihood is the loss.
        headline: the score a reader looks at first.
        scores: the scores of one number each.
        lower: those of them that are better when they are lower.
    """

    name: ClassVar[str]
    likelihood: ClassVar[str]
    headline: ClassVar[str]
    scores: ClassVar[tuple[str, ...]]
    lower: ClassVar[frozenset[str]]

    @abstractmethod
    def outputs(self, classes: int) -> int:
        """How many outputs a network has."""

    @abstractmethod
    def flaw(self, y: Tensor, classes: int = 0) -> str | None:
        """What is wrong with targets, and what was expected; None if nothing is. 0 classes: the number is not known."""

    @abstractmethod
    def loss(self, outputs: Tensor, y: Tensor, reduction: Reduction = "mean") -> Tensor:
        """The negative log-likelihood of the targets, its mean or its sum over rows."""

    @abstractmethod
    def sample(self, outputs: Tensor, generator: torch.Generator | None) -> Tensor:
        """Targets drawn from what the network believes, as the Fisher information proper needs them."""

    def redraw(self, outputs: Tensor, y: Tensor, generator: torch.Generator | None) -> Tensor:  # noqa: ARG002
        """Targets drawn from what the network believes, in the place of these."""
        return self.sample(outputs, generator)

    @abstractmethod
    def predict(self, outputs: Tensor) -> Tensor:
        """The expected target of each row: probabilities, or numbers."""

    @abstractmethod
    def as_outputs(self, predictions: Tensor) -> Tensor:
        """The inverse of `predict`: outputs that would have predicted this."""

    @abstractmethod
    def measure(self, outputs: Tensor, y: Tensor, classes: int, bins: int = 15) -> Scores:
        """Every score of some rows."""

    def pool(self, several: Sequence[Mapping[str, Any]]) -> Scores:
        """Several models' scores as one: the means, over those that have the score."""
        found = {name: [s[name] for s in several if s[name] is not None] for name in self.scores}
        return {name: sum(values) / len(values) if values else None for name, values in found.items()}

    def average(self, outputs: Tensor, weights: Tensor | None = None) -> Tensor:
        """Several networks' outputs (k, n, outputs) as those of their mean prediction (n, outputs)."""
        predictions = self.predict(outputs)
        if weights is None:
            return self.as_outputs(predictions.mean(0))
        return self.as_outputs(torch.einsum("k,knc->nc", weights.to(outputs), predictions))

    def entropy(self, outputs: Tensor) -> Tensor | None:  # noqa: ARG002 - the form's signature
        """Per row, how undecided a prediction is, in nats; None where a prediction says nothing of that."""
        return None

    def score(self, outputs: Tensor, y: Tensor, classes: int) -> float:
        """The headline alone."""
        return float(self.measure(outputs, y, classes)[self.headline])


def scores_better(task: Task, one: float, other: float) -> bool:
    """Whether one headline is better than another.

    Example:
        >>> from fedfuse.tasks.regression import REGRESSION
        >>> scores_better(REGRESSION, 0.1, 0.2)
        True
    """
    return one < other if task.headline in task.lower else one > other


def as_columns(values: Tensor, rows: int) -> Tensor:
    """A vector as one column, and a table as it is."""
    return values.reshape(rows, -1)


def describe_targets(y: Tensor) -> str:
    """Targets' dtype and shape in words."""
    return f"{str(y.dtype).removeprefix('torch.')} of shape {tuple(y.shape)}"

"""Texts as tokens: one class for each of them, or the next token after each."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fedfuse.tasks.classification import CLASSIFICATION, Classification
from fedfuse.tasks.task import Reduction, Scores, Task, describe_targets

PADDING = 0  # the token behind a text's end, which also stands for every unknown character
NO_TARGET = -100  # stands where nothing is to be predicted, such as behind a text's end; transformers' number too


@dataclass(frozen=True, slots=True)
class TextClassification(Classification):
    """Each text belongs to one class; it is read as tokens, which are whole numbers."""

    name: ClassVar[str] = "text-classification"


@dataclass(frozen=True, slots=True)
class LanguageModel(Task):
    """The token after each token: outputs are logits at every position (rows, positions, tokens), targets their tokens.

    A target of −100 marks a position without one: it counts neither in the loss nor in a score. The mean loss is over
    targets, and perplexity is its exponential.

    Example:
        >>> z, y = torch.zeros(1, 3, 4), torch.tensor([[0, 1, NO_TARGET]])
        >>> round(float(LANGUAGE_MODEL.loss(z, y)), 4), LANGUAGE_MODEL.measure(z.double(), y, 4)["perplexity"]
        (1.3863, 4.0)
    """

    name: ClassVar[str] = "language-model"
    likelihood: ClassVar[str] = "categorical"
    headline: ClassVar[str] = "perplexity"
    scores: ClassVar[tuple[str, ...]] = ("perplexity", "accuracy", "nll")
    lower: ClassVar[frozenset[str]] = frozenset({"perplexity", "nll"})

    def outputs(self, classes: int) -> int:
        """One for each token, at every position."""
        return classes

    def flaw(self, y: Tensor, classes: int = 0) -> str | None:
        """Tokens are int64, a row of them for each text, and −100 where there is no target."""
        if y.dtype != torch.int64 or y.ndim != 2:
            return f"targets are {describe_targets(y)}, expected int64 of shape ({len(y)}, positions): tokens"
        known = y[y != NO_TARGET]
        if len(known) and (int(known.min()) < 0 or 0 < classes <= int(known.max())):
            return f"targets run from {int(known.min())} to {int(known.max())}, expected tokens from 0 to {classes - 1}"
        return None

    def loss(self, outputs: Tensor, y: Tensor, reduction: Reduction = "mean") -> Tensor:
        """Cross entropy over all targets; its sum where that is asked for, and 0 where there is none."""
        total = F.cross_entropy(outputs.flatten(0, -2), y.flatten(), reduction="sum", ignore_index=NO_TARGET)
        return total / (y != NO_TARGET).sum().clamp(min=1) if reduction == "mean" else total

    def sample(self, outputs: Tensor, generator: torch.Generator | None) -> Tensor:
        """A token for each position."""
        return CLASSIFICATION.sample(outputs.flatten(0, -2), generator).view(outputs.shape[:-1])

    def redraw(self, outputs: Tensor, y: Tensor, generator: torch.Generator | None) -> Tensor:
        """A token for each target; positions without one keep none."""
        return torch.where(y == NO_TARGET, y, self.sample(outputs, generator))

    def predict(self, outputs: Tensor) -> Tensor:
        """Probabilities."""
        return outputs.softmax(-1)

    def as_outputs(self, predictions: Tensor) -> Tensor:
        """Log probabilities."""
        return predictions.log()

    def average(self, outputs: Tensor, weights: Tensor | None = None) -> Tensor:
        """Log of the mean probability of every token, in log space."""
        pooled = CLASSIFICATION.average(outputs.flatten(1, -2), weights)
        return pooled.view(outputs.shape[1:])

    def entropy(self, outputs: Tensor) -> Tensor:
        """−Σ p log p at every position."""
        return CLASSIFICATION.entropy(outputs)

    def measure(self, outputs: Tensor, y: Tensor, classes: int, bins: int = 15) -> Scores:  # noqa: ARG002
        """Perplexity exp(nll), the share of tokens that are told rightly, and nll = −mean log p of a target, in nats.

        All are None where no position has a target.
        """
        known = y != NO_TARGET
        if not bool(known.any()):
            return dict.fromkeys(self.scores)
        z, t = outputs[known][:, :classes], y[known]
        nll = float(F.cross_entropy(z, t))
        guess = z.argmax(-1)
        return {"perplexity": math.exp(min(nll, 700.0)), "accuracy": float((guess == t).double().mean()), "nll": nll}


TEXT_CLASSIFICATION, LANGUAGE_MODEL = TextClassification(), LanguageModel()

"""The judge: holds the test set, gives numbers to the record, and lets nobody choose by them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from fedfuse.core.model import Answering, Apart, Model, Single
from fedfuse.core.rows import Rows
from fedfuse.core.spec import Spec
from fedfuse.errors import RecipeError
from fedfuse.server.door.admit import Admission
from fedfuse.server.door.files import fingerprint
from fedfuse.server.uncertainty import predict

SCORES = ("accuracy", "nll", "ece", "brier")


@dataclass(frozen=True, slots=True)
class Judge:
    """Scores a model on rows nobody else has.

    Attributes:
        test: the global test rows.
        classes: how many classes there are.
        bins: equal-width confidence bins of the calibration error.
        held_out: rows each client kept out of its own training.
        clients: when to score the clients' own models too; it costs one evaluation per client.
        batch: rows per forward pass.
        ood_inputs: out-of-distribution inputs, which a model should be less sure of.
    """

    test: Rows
    classes: int
    bins: int = 15
    held_out: Mapping[str, Rows] = field(default_factory=dict)
    clients: Literal["never", "last", "every"] = "last"
    batch: int = 1000
    ood_inputs: Tensor | None = None
    _test_accuracies: dict[tuple[Spec, str], float] = field(default_factory=dict, init=False, repr=False, compare=False)

    def score(self, model: Model, admission: Admission | None = None, last: bool = True) -> dict[str, Any]:
        """Accuracy, NLL, ECE, Brier, confusion; and, when wanted, how the clients fare one by one."""
        scores = self._score_members(model) if isinstance(model, Apart) else self.evaluate(model)
        if admission is not None and (self.clients == "every" or (self.clients == "last" and last)):
            scores |= self._score_clients(model, admission)
        return scores

    def evaluate(self, model: Model, rows: Rows | None = None) -> dict[str, Any]:
        """Every score of one model that answers `logits`."""
        rows = self.test if rows is None else rows
        prediction = predict(model, rows.x, self.classes, self.batch)
        scores = measure(prediction.log_probs, rows.y, self.classes, self.bins) | prediction.scores()
        if self.ood_inputs is None or rows is not self.test:
            return scores
        return scores | prediction.compare_ood(predict(model, self.ood_inputs, self.classes, self.batch))

    def _score_members(self, model: Apart) -> dict[str, Any]:
        """The members' mean scores, and their tables taken together."""
        each = [self.evaluate(member) for member in model.members]
        confusion = torch.tensor([s["confusion"] for s in each]).sum(0)
        return {
            **{name: sum(s[name] for s in each) / len(each) for name in SCORES},
            "per_class": _per_class(confusion),
            "confusion": confusion.tolist(),
            "reliability": _pool_bins([s["reliability"] for s in each]),
        }

    def _score_clients(self, model: Model, admission: Admission) -> dict[str, Any]:
        """Each client's own network on the test rows; on its held-out rows, the model it would go on to use."""
        networks = {u.client: Single(u.spec, u.posterior) for u in admission.cohort}
        facts: dict[str, dict[str, float]] = {
            u.client: {"num_examples": u.num_examples, "steps": u.steps, **u.facts} for u in admission.cohort
        }
        test = {client: self._test_accuracy(network) for client, network in networks.items()}
        own = (
            self._held_out_accuracies(networks)
            if isinstance(model, Apart)
            else self._held_out_accuracies(dict.fromkeys(self.held_out, model))
        )
        for name, found in (("accuracy", test), ("own_accuracy", own)):
            for client, accuracy in found.items():
                facts.setdefault(client, {})[name] = accuracy
        num_examples = {u.client: u.num_examples for u in admission.cohort}
        own_masses = {client: float(len(self.held_out[client])) for client in own}
        return {
            "clients": facts,
            **summarize_accuracies(test, num_examples),
            **summarize_accuracies(own, own_masses, "own_accuracy"),
        }

    def _held_out_accuracies(self, models: Mapping[str, Model]) -> dict[str, float]:
        rows = {client: self.held_out[client] for client in models if len(self.held_out.get(client, ()))}
        return {client: self._accuracy(models[client], own) for client, own in rows.items()}

    def _test_accuracy(self, network: Single) -> float:
        """A network's accuracy on the test rows; methods that fuse the same updates ask for it again and again."""
        key = (network.spec, fingerprint(network.posterior.mean))
        if key not in self._test_accuracies:
            self._test_accuracies[key] = self._accuracy(network, self.test)
        return self._test_accuracies[key]

    def _accuracy(self, model: Model, rows: Rows) -> float:
        right = log_probabilities(model, rows.x, self.batch)[:, : self.classes].argmax(-1) == rows.y
        return float(right.double().mean())


def log_probabilities(model: Model, x: Tensor, batch: int = 1000) -> Tensor:
    """Log softmax of the model's logits, batch by batch, in float64.

    Raises:
        RecipeError: for models that stay apart, which have no common answer.
    """
    if not isinstance(model, Answering):
        raise RecipeError("models that stay apart have no common answer; ask each of its members")
    with torch.no_grad():
        return torch.cat([model.logits(part).double().log_softmax(-1).cpu() for part in x.split(batch)])


def measure(log_probs: Tensor, labels: Tensor, classes: int, bins: int = 15) -> dict[str, Any]:
    """All scores of a table of log probabilities.

    accuracy = mean 1[argmax = y]; nll = −mean log p_y; brier = mean Σ_c (p_c − 1[c = y])²; ece = Σ_b (n_b/n)
    |accuracy_b − confidence_b| over equal-width bins (lower, upper], so that confidence 1 falls in the last one.
    Outputs beyond the classes ("none of them") are left out, and the others share what they had.

    Example:
        >>> scores = measure(torch.tensor([[0.8, 0.2], [0.4, 0.6]]).log(), torch.tensor([0, 0]), 2)
        >>> scores["accuracy"], round(scores["brier"], 3), scores["confusion"]
        (0.5, 0.4, [[1, 1], [0, 0]])
    """
    if log_probs.shape[1] > classes:
        log_probs = log_probs[:, :classes].log_softmax(-1)
    probs = log_probs.exp()
    confidence, guess = probs.max(-1)
    right = guess == labels
    confusion = torch.bincount(labels * classes + guess, minlength=classes * classes).view(classes, classes)
    target = torch.nn.functional.one_hot(labels, classes).to(probs)
    reliability = _reliability(confidence, right, bins)
    return {
        "accuracy": float(right.double().mean()),
        "nll": float(-log_probs.gather(1, labels[:, None]).mean()),
        "ece": _calibration_error(reliability),
        "brier": float((probs - target).square().sum(-1).mean()),
        "per_class": _per_class(confusion),
        "confusion": confusion.tolist(),
        "reliability": reliability,
    }


def summarize_accuracies(
    accuracies: Mapping[str, float], num_examples: Mapping[str, float], name: str = "client_accuracy"
) -> dict[str, float]:
    """How evenly clients fare: mean, mean weighted by examples, standard deviation, mean of the worst tenth.

    Example:
        >>> summarize_accuracies({"a": 0.5, "b": 1.0}, {"a": 3, "b": 1})["client_accuracy_weighted"]
        0.625
    """
    if not accuracies:
        return {}
    values = sorted(accuracies.values())
    mean = sum(values) / len(values)
    tenth = values[: math.ceil(len(values) / 10)]
    weighted = sum(accuracies[c] * num_examples[c] for c in accuracies) / sum(num_examples[c] for c in accuracies)
    return {
        f"{name}_mean": mean,
        f"{name}_weighted": weighted,
        f"{name}_std": math.sqrt(sum((v - mean) ** 2 for v in values) / len(values)),
        f"{name}_worst10": sum(tenth) / len(tenth),
    }


def _per_class(confusion: Tensor) -> list[float | None]:
    rows_per_class = confusion.sum(1)
    shares = confusion.diagonal() / rows_per_class.clamp(min=1)
    return [float(s) if n else None for s, n in zip(shares, rows_per_class, strict=True)]


def _reliability(confidence: Tensor, right: Tensor, bins: int) -> dict[str, list[float]]:
    """Per bin the mean confidence, the accuracy and the count."""
    bin_index = (confidence * bins).ceil().long().clamp(1, bins) - 1
    count = torch.bincount(bin_index, minlength=bins).double()
    total = count.clamp(min=1)
    return {
        "confidence": (torch.bincount(bin_index, confidence, minlength=bins) / total).tolist(),
        "accuracy": (torch.bincount(bin_index, right.double(), minlength=bins) / total).tolist(),
        "count": count.long().tolist(),
    }


def _pool_bins(several: list[dict[str, list[float]]]) -> dict[str, list[float]]:
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


def _calibration_error(reliability: Mapping[str, list[float]]) -> float:
    rows = list(zip(reliability["count"], reliability["accuracy"], reliability["confidence"], strict=True))
    return sum(n * abs(a - c) for n, a, c in rows) / max(1, sum(n for n, _, _ in rows))

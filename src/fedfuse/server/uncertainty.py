"""A model's predictive uncertainty: entropy, mutual information, and detection of out-of-distribution inputs."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import functional_call

from fedfuse.core.model import Answering, Model, Single
from fedfuse.core.spec import drop_tied_names
from fedfuse.errors import RecipeError
from fedfuse.models.bayes import Bayesian


@dataclass(frozen=True, slots=True, eq=False)
class Prediction:
    """A model's predictions for some rows.

    Attributes:
        log_probs: rows × classes, float64.
        information: per row, what the answer would tell about the weights; None for a model without draws.
    """

    log_probs: Tensor
    information: Tensor | None = None

    @property
    def entropy(self) -> Tensor:
        """Per row, how undecided the answer is."""
        return entropy(self.log_probs)

    def scores(self) -> dict[str, float]:
        """Mean predictive entropy, and mean mutual information where there are draws; in nats."""
        means = {"entropy": float(self.entropy.mean())}
        return means if self.information is None else means | {"mutual_information": float(self.information.mean())}

    def compare_ood(self, ood: Prediction) -> dict[str, float]:
        """How well entropy, or information, tells out-of-distribution rows from these: the area under the ROC curve."""
        found = {"ood_entropy": float(ood.entropy.mean()), "ood_auroc": auroc(self.entropy, ood.entropy)}
        if self.information is not None and ood.information is not None:
            found["ood_auroc_information"] = auroc(self.information, ood.information)
        return found


@torch.no_grad()
def predict(model: Model, x: Tensor, classes: int, batch: int = 1000) -> Prediction:
    """A model's answers, batch by batch; outputs beyond the classes ("none of them") are left out.

    Raises:
        RecipeError: for models that stay apart, which have no common answer.
    """
    if not isinstance(model, Answering):
        raise RecipeError("models that stay apart have no common answer; ask each of its members")
    each = [each_draw(model, part)[..., :classes].double().log_softmax(-1).cpu() for part in x.split(batch)]
    log_probs = torch.cat([_average_draws(draws) for draws in each])
    if all(len(draws) == 1 for draws in each):
        return Prediction(log_probs)
    return Prediction(log_probs, torch.cat([mutual_information(draws) for draws in each]))


def each_draw(model: Answering, x: Tensor) -> Tensor:
    """Log probabilities of every network a Bayesian one draws, draws × rows × outputs; of any other model, one."""
    if isinstance(model, Single) and isinstance(network := model.spec.skeleton(), Bayesian):
        own = drop_tied_names(model.spec, model.posterior.mean)
        drawn: Tensor = functional_call(network, own, (model.spec.cast(x),), {"apart": True})
        return drawn
    return model.logits(x)[None]


def entropy(log_probs: Tensor) -> Tensor:
    """−Σ p log p over the last axis, in nats.

    Example:
        >>> entropy(torch.tensor([[0.5, 0.5], [1.0, 0.0]]).log())
        tensor([0.6931, -0.0000])
    """
    probs = log_probs.exp()
    each: Tensor = torch.special.xlogy(probs, probs)
    return -each.sum(-1)


def mutual_information(each: Tensor) -> Tensor:
    """What a row's label would tell about the weights: H(mean over draws) − mean over draws of H.

    Args:
        each: log probabilities, draws × rows × classes.

    Example:
        >>> sure_but_at_odds = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]]).log()
        >>> mutual_information(sure_but_at_odds)
        tensor([0.6931])
    """
    return (entropy(_average_draws(each)) - entropy(each).mean(0)).clamp(min=0)


def auroc(inside: Tensor, outside: Tensor) -> float:
    """The chance that a score from outside exceeds one from inside, ties counting half.

    Example:
        >>> auroc(torch.tensor([0.1, 0.2]), torch.tensor([0.2, 0.9]))
        0.875
    """
    inside = inside.double().sort().values
    below, up_to = (torch.searchsorted(inside, outside.double(), right=right).double() for right in (False, True))
    return float(((below + up_to) / 2).mean() / len(inside))


def _average_draws(each: Tensor) -> Tensor:
    """Log of the mean probability over draws."""
    return each[0] if len(each) == 1 else each.logsumexp(0) - math.log(len(each))

"""A model's predictive uncertainty: entropy, mutual information, and detection of out-of-distribution inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor
from torch.func import functional_call

from fedfuse.core.model import Answering, Model, Single, ask_in_batches
from fedfuse.core.spec import drop_tied_names
from fedfuse.errors import RecipeError
from fedfuse.models.bayes import Bayesian
from fedfuse.tasks import CLASSIFICATION, Task
from fedfuse.tasks.metrics import auroc


@dataclass(frozen=True, slots=True, eq=False)
class Prediction:
    """A model's predictions for some rows.

    Attributes:
        outputs: rows × outputs, float64: for classes, logits; of texts, rows × positions × outputs.
        information: per row, what the answer would tell about the weights; None for a model without draws.
        task: what the outputs mean.
    """

    outputs: Tensor
    information: Tensor | None = None
    task: Task = CLASSIFICATION

    @property
    def entropy(self) -> Tensor | None:
        """Per row, how undecided the answer is; None where the task knows no such thing."""
        return self.task.entropy(self.outputs)

    def scores(self) -> dict[str, float]:
        """Mean predictive entropy, and mean mutual information where there are draws; in nats."""
        means = {} if self.entropy is None else {"entropy": float(self.entropy.mean())}
        return means if self.information is None else means | {"mutual_information": float(self.information.mean())}

    def compare_ood(self, ood: Prediction) -> dict[str, float]:
        """How well entropy, or information, tells out-of-distribution rows from these: the area under the ROC curve."""
        found: dict[str, float] = {}
        if self.entropy is not None and ood.entropy is not None:
            found = {"ood_entropy": float(ood.entropy.mean()), "ood_auroc": auroc(self.entropy, ood.entropy)}
        if self.information is not None and ood.information is not None:
            found["ood_auroc_information"] = auroc(self.information, ood.information)
        return found


class Draws(NamedTuple):
    """How a Bayesian network is asked: how many networks are drawn, and from which seed; None is as it says itself."""

    number: int | None = None
    seed: int | None = None


AS_IT_SAYS = Draws()


def predict(model: Model, x: Tensor, classes: int, batch: int = 1000, task: Task = CLASSIFICATION) -> Prediction:
    """A model's answers, batch by batch; outputs beyond those the task has ("none of them") are left out.

    Raises:
        RecipeError: for models that stay apart, which have no common answer.
    """
    return read_draws(ask_in_batches(each_draw, need_answering(model), x, batch), classes, task)


def need_answering(model: Model) -> Answering:
    """The model, if it has a common answer.

    Raises:
        RecipeError: for models that stay apart.
    """
    if not isinstance(model, Answering):
        raise RecipeError("models that stay apart have no common answer; ask each of its members")
    return model


def read_draws(each: Tensor, classes: int, task: Task = CLASSIFICATION) -> Prediction:
    """The prediction of a model that gave these outputs, draws × rows × outputs."""
    each = each[..., : task.outputs(classes)]
    if len(each) == 1:
        return Prediction(each[0], task=task)
    return Prediction(task.average(each), mutual_information(each, task), task)


def each_draw(model: Answering, x: Tensor, draws: Draws = AS_IT_SAYS) -> Tensor:
    """Outputs of every network a Bayesian one draws, draws × rows × outputs; of any other model, one."""
    if isinstance(model, Single) and isinstance(network := model.spec.skeleton(), Bayesian):
        own = drop_tied_names(model.spec, model.posterior.mean)
        asked = {"apart": True, "draws": _fewer(draws.number, network.draws), "seed": draws.seed}
        drawn: Tensor = functional_call(network, own, (model.spec.cast(x),), asked)
        return drawn
    outputs = model.logits(x)
    return outputs[None] if outputs.ndim > 2 else outputs.reshape(1, len(x), -1)


def _fewer(asked: int | None, usual: int) -> int:
    """As many draws as are asked for, and never more than the network takes by itself."""
    return usual if asked is None else min(asked, usual)


def mutual_information(each: Tensor, task: Task = CLASSIFICATION) -> Tensor | None:
    """What a row's target would tell about the weights: H(mean over draws) − mean over draws of H.

    Args:
        each: outputs, draws × rows × outputs.
        task: what they mean.

    Example:
        >>> import torch
        >>> sure_but_at_odds = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]]).log()
        >>> mutual_information(sure_but_at_odds)
        tensor([0.6931])
    """
    whole, mean = task.entropy(task.average(each)), task.entropy(each)
    return None if whole is None or mean is None else (whole - mean.mean(0)).clamp(min=0)

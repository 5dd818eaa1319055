"""The judge: it alone holds the test rows, and its numbers go to the record, where no method can choose by them.

First how any model is asked (`predict`, `answers`), then `Judge`, then what sums up clients' scores.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol

from torch import Tensor
from torch.func import functional_call

from fedfuse.core.model import Answering, Apart, AskModel, Model, Single, ask_in_batches
from fedfuse.core.rows import Rows
from fedfuse.core.spec import Spec, drop_tied_names
from fedfuse.errors import RecipeError
from fedfuse.models.bayes import Bayesian
from fedfuse.server.admission.admit import Admission
from fedfuse.tasks import CLASSIFICATION, Task
from fedfuse.tasks.metrics import auroc
from fedfuse.wire.codec import fingerprint


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
        number = network.draws if draws.number is None else min(draws.number, network.draws)
        asked = {"apart": True, "draws": number, "seed": draws.seed}
        drawn: Tensor = functional_call(network, own, (model.spec.cast(x),), asked)
        return drawn
    outputs = model.logits(x)
    return outputs[None] if outputs.ndim > 2 else outputs.reshape(1, len(x), -1)


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


def log_probabilities(model: Model, x: Tensor, batch: int = 1000) -> Tensor:
    """Log softmax of the model's logits, batch by batch, in float64.

    Raises:
        RecipeError: for models that stay apart, which have no common answer.
    """
    return answers(model, x, batch).log_softmax(-1)


def answers(model: Model, x: Tensor, batch: int = 1000) -> Tensor:
    """The model's outputs, batch by batch, in float64.

    Raises:
        RecipeError: for models that stay apart, which have no common answer.
    """
    return ask_in_batches(logits_of, need_answering(model), x, batch)[0]


def logits_of(model: Answering, x: Tensor) -> Tensor:
    """A model's one answer to some inputs, as the only one of its draws."""
    return model.logits(x)[None]


_FEW_DRAWS = 10  # networks drawn for a score on the way, or of a client's own network


class AskModels(Protocol):
    """Asks several models about the same rows: in this process, or wherever there are hands free."""

    def __call__(self, ask: AskModel, models: Sequence[Answering], rows: Rows, batch: int) -> list[Tensor]:
        """What `ask(model, x)` gives for every model and all rows, batch by batch."""
        ...


def ask_here(ask: AskModel, models: Sequence[Answering], rows: Rows, batch: int) -> list[Tensor]:
    """What `ask(model, x)` gives for every model and all rows, batch by batch, in this process."""
    return [ask_in_batches(ask, model, rows.x, batch) for model in models]


@dataclass(frozen=True, slots=True)
class Judge:
    """Scores a model on rows that no client and no server step has.

    Attributes:
        test: the global test rows.
        classes: how many classes there are.
        bins: equal-width confidence bins of the calibration error.
        held_out: rows each client kept out of its own training.
        clients: when to score the clients' own models too; it costs one evaluation per client.
        batch: rows per forward pass.
        ood_inputs: out-of-distribution inputs, which a model should be less sure of.
        task: what is to be learned, and so what is scored.
        ask: how models are asked about the test rows: here, or in worker processes.
        seed: of the networks that a Bayesian one draws; each run has draws of its own, all its methods the same.
    """

    test: Rows
    classes: int
    bins: int = 15
    held_out: Mapping[str, Rows] = field(default_factory=dict)
    clients: Literal["never", "last", "every"] = "last"
    batch: int = 1000
    ood_inputs: Tensor | None = None
    task: Task = CLASSIFICATION
    ask: AskModels = ask_here
    seed: int = 0
    _test_scores: dict[tuple[Spec, str], float] = field(default_factory=dict, init=False, repr=False, compare=False)

    def score(self, model: Model, admission: Admission | None = None, last: bool = True) -> dict[str, Any]:
        """Every score of the task; and, when wanted, how the clients fare one by one."""
        draws = Draws(None if last else _FEW_DRAWS, self.seed)
        if isinstance(model, Apart):
            scores = self.task.pool([self.evaluate(member, draws=draws) for member in model.members])
        else:
            scores = self.evaluate(model, draws=draws)
        if admission is not None and (self.clients == "every" or (self.clients == "last" and last)):
            scores |= self._score_clients(model, admission)
        return scores

    def evaluate(self, model: Model, rows: Rows | None = None, draws: Draws = AS_IT_SAYS) -> dict[str, Any]:
        """Every score of one model that answers `logits`."""
        rows = self.test if rows is None else rows
        draw = partial(each_draw, draws=draws)
        [each] = self.ask(draw, [need_answering(model)], rows, self.batch)
        prediction = read_draws(each, self.classes, self.task)
        scores = self.task.measure(prediction.outputs, rows.y, self.classes, self.bins) | prediction.scores()
        if self.ood_inputs is None or rows is not self.test:
            return scores
        elsewhere = ask_in_batches(draw, need_answering(model), self.ood_inputs, self.batch)
        return scores | prediction.compare_ood(read_draws(elsewhere, self.classes, self.task))

    def _score_clients(self, model: Model, admission: Admission) -> dict[str, Any]:
        """Each client's own network on the test rows; on its held-out rows, the model it would go on to use."""
        cohort, headline = admission.cohort, self.task.headline
        # A client that took no step stands at the weights it was sent, and those are not its score.
        test = self._score_networks({u.client: Single(u.spec, u.posterior) for u in cohort if u.steps})
        used = (
            dict(zip(cohort.clients, model.members, strict=True))
            if isinstance(model, Apart)
            else dict.fromkeys(self.held_out, model)
        )
        own: dict[str, float] = {}
        for client, mine in used.items():
            if rows := self.held_out.get(client):
                own[client] = self._headline(ask_in_batches(self._few, need_answering(mine), rows.x, self.batch), rows)
        facts = {u.client: u.record() for u in cohort}
        for name, found in ((headline, test), (f"own_{headline}", own)):
            for client, score in found.items():
                facts.setdefault(client, {})[name] = score
        num_examples = {u.client: u.num_examples for u in cohort}
        own_rows, low = {client: float(len(self.held_out[client])) for client in own}, headline in self.task.lower
        return {
            "clients": facts,
            **summarize_clients(test, num_examples, f"client_{headline}", low),
            **summarize_clients(own, own_rows, f"own_{headline}", low),
        }

    def _score_networks(self, networks: Mapping[str, Single]) -> dict[str, float]:
        # Methods that fuse the same updates ask for the same networks, so scores are kept by fingerprint.
        keys = {client: (network.spec, fingerprint(network.posterior.mean)) for client, network in networks.items()}
        fresh = {key: networks[client] for client, key in keys.items() if key not in self._test_scores}
        for key, each in zip(fresh, self.ask(self._few, list(fresh.values()), self.test, self.batch), strict=True):
            self._test_scores[key] = self._headline(each, self.test)
        return {client: self._test_scores[key] for client, key in keys.items()}

    def _headline(self, each: Tensor, rows: Rows) -> float:
        return self.task.score(read_draws(each, self.classes, self.task).outputs, rows.y, self.classes)

    @property
    def _few(self) -> AskModel:
        """How a client's own network is asked: with a few draws."""
        return partial(each_draw, draws=Draws(_FEW_DRAWS, self.seed))


def summarize_clients(
    scores: Mapping[str, float], num_examples: Mapping[str, float], name: str = "client_accuracy", low: bool = False
) -> dict[str, float]:
    """How evenly clients fare: mean, mean weighted by examples, standard deviation, mean of the worst tenth.

    Args:
        scores: of each client.
        num_examples: behind each.
        name: what the scores are called.
        low: whether a lower score is a better one.

    Example:
        >>> summarize_clients({"a": 0.5, "b": 1.0}, {"a": 3, "b": 1})["client_accuracy_weighted"]
        0.625
    """
    if not scores:
        return {}
    values = sorted(scores.values(), reverse=low)
    mean = sum(values) / len(values)
    tenth = values[: math.ceil(len(values) / 10)]
    weighted = sum(scores[c] * num_examples[c] for c in scores) / sum(num_examples[c] for c in scores)
    return {
        f"{name}_mean": mean,
        f"{name}_weighted": weighted,
        f"{name}_std": math.sqrt(sum((v - mean) ** 2 for v in values) / len(values)),
        f"{name}_worst10": sum(tenth) / len(tenth),
    }


def accuracy_and_loss(model: Single, rows: Rows) -> tuple[float, float]:
    """A model's accuracy and mean cross entropy on some rows, in evaluation mode."""
    log_probs = log_probabilities(model, rows.x)
    right = log_probs.argmax(-1) == rows.y
    return float(right.double().mean()), float(-log_probs.gather(1, rows.y[:, None]).mean())

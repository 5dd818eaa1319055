"""The judge: holds the test set, gives numbers to the record, and lets nobody choose by them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol

from torch import Tensor

from fedfuse.core.model import Answering, Apart, AskModel, Model, Single, ask_in_batches
from fedfuse.core.rows import Rows
from fedfuse.core.spec import Spec
from fedfuse.server.door.admit import Admission
from fedfuse.server.uncertainty import AS_IT_SAYS, Draws, each_draw, need_answering, read_draws
from fedfuse.tasks import CLASSIFICATION, Task
from fedfuse.wire.digest import fingerprint

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
    """Scores a model on rows nobody else has.

    Attributes:
        test: the global test rows.
        classes: how many classes there are.
        bins: equal-width confidence bins of the calibration error.
        held_out: rows each client kept out of its own training.
        clients: when to score the clients' own models too; it costs one evaluation per client.
        batch: rows per forward pass.
        ood_inputs: out-of-distribution inputs, which a model should be less sure of.
        task: what is to be learned, and so what is scored.
        ask: who asks models about the test rows.
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
        scores = self._score_members(model, draws) if isinstance(model, Apart) else self.evaluate(model, draws=draws)
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

    def _score_members(self, model: Apart, draws: Draws) -> dict[str, Any]:
        """The members' mean scores, and their tables taken together."""
        return self.task.pool([self.evaluate(member, draws=draws) for member in model.members])

    def _score_clients(self, model: Model, admission: Admission) -> dict[str, Any]:
        """Each client's own network on the test rows; on its held-out rows, the model it would go on to use.

        Who took no step has no network of its own: it stands at the weights it was sent, and those are not its score.
        """
        networks = {u.client: Single(u.spec, u.posterior) for u in admission.cohort}
        facts = {u.client: u.record() for u in admission.cohort}
        test = self._client_scores({u.client: networks[u.client] for u in admission.cohort if u.steps})
        own = (
            self._held_out_scores(dict(zip(networks, model.members, strict=True)))
            if isinstance(model, Apart)
            else self._held_out_scores(dict.fromkeys(self.held_out, model))
        )
        headline, low = self.task.headline, self.task.headline in self.task.lower
        for name, found in ((headline, test), (f"own_{headline}", own)):
            for client, score in found.items():
                facts.setdefault(client, {})[name] = score
        num_examples = {u.client: u.num_examples for u in admission.cohort}
        own_masses = {client: float(len(self.held_out[client])) for client in own}
        return {
            "clients": facts,
            **summarize_clients(test, num_examples, f"client_{headline}", low),
            **summarize_clients(own, own_masses, f"own_{headline}", low),
        }

    def _held_out_scores(self, models: Mapping[str, Model]) -> dict[str, float]:
        rows = {client: self.held_out[client] for client in models if len(self.held_out.get(client, ()))}
        return {client: self._score(models[client], own) for client, own in rows.items()}

    def _client_scores(self, networks: Mapping[str, Single]) -> dict[str, float]:
        """Networks' headlines on the test rows; methods that fuse the same updates ask for them again and again."""
        keys = {client: (network.spec, fingerprint(network.posterior.mean)) for client, network in networks.items()}
        fresh = {key: networks[client] for client, key in keys.items() if key not in self._test_scores}
        for key, each in zip(fresh, self.ask(self._few, list(fresh.values()), self.test, self.batch), strict=True):
            self._test_scores[key] = self._headline(each, self.test)
        return {client: self._test_scores[key] for client, key in keys.items()}

    def _score(self, model: Model, rows: Rows) -> float:
        """The headline alone."""
        return self._headline(ask_in_batches(self._few, need_answering(model), rows.x, self.batch), rows)

    def _headline(self, each: Tensor, rows: Rows) -> float:
        return self.task.score(read_draws(each, self.classes, self.task).outputs, rows.y, self.classes)

    @property
    def _few(self) -> AskModel:
        """How a client's own network is asked: with a few draws."""
        return partial(each_draw, draws=Draws(_FEW_DRAWS, self.seed))


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

"""The judge against hand computations and torchmetrics; entropy, information and strangers by their definitions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from sklearn.metrics import roc_auc_score
from torch import Tensor
from torch.nn import functional as F
from torchmetrics.functional.classification import (
    multiclass_accuracy,
    multiclass_calibration_error,
    multiclass_confusion_matrix,
)

from builders import start_of, update_of
from fedfuse.core.messages import Cohort
from fedfuse.core.model import Answering, Apart, AskModel, Single
from fedfuse.core.posterior import Posterior
from fedfuse.core.rows import Rows
from fedfuse.core.spec import Spec
from fedfuse.errors import RecipeError
from fedfuse.models.bayes import BayesianLayers
from fedfuse.nets.mixture import MeanProbability, Mixture
from fedfuse.server.admission.admit import Admission, Spool
from fedfuse.server.judge import (
    Judge,
    ask_here,
    each_draw,
    log_probabilities,
    mutual_information,
    predict,
    summarize_clients,
)
from fedfuse.tasks import CLASSIFICATION
from fedfuse.tasks.metrics import auroc

LINEAR = Spec("mlp", {"inputs": 3, "hidden": [], "classes": 3})


def table(rows: int, classes: int, seed: int, sharpness: float = 3.0) -> tuple[Tensor, Tensor]:
    """Random log probabilities and labels that often agree with them."""
    draw = torch.Generator().manual_seed(seed)
    logits = sharpness * torch.randn(rows, classes, generator=draw, dtype=torch.float64)
    labels = torch.where(
        torch.rand(rows, generator=draw) < 0.6, logits.argmax(-1), torch.randint(classes, (rows,), generator=draw)
    )
    return logits.log_softmax(-1), labels


def network(weight: Tensor) -> Single:
    """A linear network with this weight matrix; a scaled identity says class = position of the largest input."""
    return Single(LINEAR, Posterior(dict(zip(LINEAR.build().state_dict(), (weight, torch.zeros(3)), strict=True))))


def admitted(**networks: Single) -> Admission:
    updates = [
        update_of(c, m.posterior.mean, m.spec, float(place), steps=place, facts={"loss": 0.5})
        for place, (c, m) in enumerate(networks.items(), 1)
    ]
    return Admission(Cohort.of(updates), Spool(2**20))


def corners(*labels: int) -> Rows:
    """Rows whose largest input stands at 0, 1, 2, 0, …: the identity network says exactly that."""
    return Rows(torch.eye(3)[torch.arange(len(labels)) % 3], torch.tensor(labels, dtype=torch.int64))


IDENTITY, TURNED = network(10 * torch.eye(3)), network(10 * torch.eye(3).roll(1, 0))


def test_scores_of_two_rows_by_hand() -> None:
    scores = CLASSIFICATION.measure(
        torch.tensor([[0.7, 0.3], [0.4, 0.6]], dtype=torch.float64).log(), torch.tensor([0, 0]), 2, bins=10
    )
    assert scores["accuracy"] == 0.5
    assert scores["nll"] == pytest.approx(-(math.log(0.7) + math.log(0.4)) / 2)
    assert scores["brier"] == pytest.approx(((0.3**2 + 0.3**2) + (0.6**2 + 0.6**2)) / 2)
    assert scores["ece"] == pytest.approx((abs(1 - 0.7) + abs(0 - 0.6)) / 2)
    assert scores["per_class"] == [0.5, None]
    assert scores["confusion"] == [[1, 1], [0, 0]]
    assert scores["reliability"]["count"] == [0, 0, 0, 0, 0, 1, 1, 0, 0, 0]


@pytest.mark.parametrize("bins", [1, 5, 15, 40])
@pytest.mark.parametrize("classes", [2, 10])
def test_scores_agree_with_torchmetrics(bins: int, classes: int) -> None:
    log_probs, labels = table(500, classes, seed=bins)
    scores, probs = CLASSIFICATION.measure(log_probs, labels, classes, bins), log_probs.exp()
    ece = multiclass_calibration_error(probs, labels, classes, n_bins=bins, norm="l1")
    matrix = multiclass_confusion_matrix(probs, labels, classes)
    per_class = multiclass_accuracy(probs, labels, classes, average="none")
    assert float(probs.max()) < 1  # torchmetrics puts a confidence of exactly one into a bin that does not exist
    assert scores["ece"] == pytest.approx(float(ece), abs=1e-6)
    assert scores["accuracy"] == pytest.approx(float(multiclass_accuracy(probs, labels, classes, average="micro")))
    assert scores["confusion"] == matrix.tolist()
    assert scores["per_class"] == pytest.approx(per_class.tolist())
    assert scores["nll"] == pytest.approx(float(F.nll_loss(log_probs, labels)))
    assert scores["brier"] == pytest.approx(float((probs - F.one_hot(labels, classes)).square().sum(-1).mean()))


@given(st.integers(1, 60), st.integers(2, 6), st.integers(1, 20), st.floats(0, 400), st.integers(0, 10**6))
def test_the_calibration_error_is_the_definition(rows: int, classes: int, bins: int, sharp: float, seed: int) -> None:
    log_probs, labels = table(rows, classes, seed, sharp)  # from uniform to certain beyond doubt
    confidence, guess = log_probs.exp().max(-1)
    gap = 0.0
    for b in range(bins):  # bins (lower, upper]
        inside = [i for i, c in enumerate(confidence.tolist()) if math.ceil(c * bins) == b + 1]
        if inside:
            right = sum(int(guess[i] == labels[i]) for i in inside) / len(inside)
            gap += len(inside) / rows * abs(right - float(confidence[inside].mean()))
    scores = CLASSIFICATION.measure(log_probs, labels, classes, bins)
    assert scores["ece"] == pytest.approx(gap, abs=1e-12)
    assert sum(scores["reliability"]["count"]) == rows
    assert 0 <= scores["ece"] <= 1
    assert 0 <= scores["brier"] <= 2


def test_certainty_falls_in_the_last_bin() -> None:
    scores = CLASSIFICATION.measure(torch.tensor([[0.0, -math.inf]] * 4), torch.tensor([0, 0, 0, 1]), 2, bins=15)
    assert scores["reliability"]["count"] == [0] * 14 + [4]
    assert scores["ece"] == pytest.approx(0.25)
    assert scores["nll"] == math.inf


def test_outputs_beyond_the_classes_are_left_out_and_the_rest_renormalized() -> None:
    logits = torch.tensor([[1.0, 2.0, 9.0], [0.5, -1.0, 3.0]], dtype=torch.float64)
    labels = torch.tensor([1, 0])
    open_set, closed = (
        CLASSIFICATION.measure(logits.log_softmax(-1), labels, 2),
        CLASSIFICATION.measure(logits[:, :2].log_softmax(-1), labels, 2),
    )
    for name in ("accuracy", "nll", "ece", "brier", "per_class"):
        assert open_set[name] == pytest.approx(closed[name])


def test_a_network_that_overflows_is_scored_and_not_feared() -> None:
    scores = CLASSIFICATION.measure(torch.full((3, 2), math.nan), torch.tensor([0, 1, 1]), 2)
    assert math.isnan(scores["nll"])
    assert sum(scores["reliability"]["count"]) == 3


def test_batches_do_not_matter() -> None:
    x = torch.randn(17, 3, generator=torch.Generator().manual_seed(0))
    whole = log_probabilities(TURNED, x, batch=100)
    torch.testing.assert_close(log_probabilities(TURNED, x, batch=4), whole)
    assert whole.dtype == torch.float64
    torch.testing.assert_close(whole.exp().sum(-1), torch.ones(17, dtype=torch.float64))


def test_a_mixture_is_scored_by_its_common_answer() -> None:
    both = Mixture((IDENTITY, TURNED), torch.tensor([0.9, 0.1], dtype=torch.float64), MeanProbability())
    scores = Judge(corners(0, 1, 2), 3).score(both)
    sure = math.exp(10) / (math.exp(10) + 2)
    assert scores["accuracy"] == 1.0
    assert scores["nll"] == pytest.approx(-math.log(0.9 * sure + 0.1 * (1 - sure) / 2), rel=1e-5)


def test_clients_are_scored_on_the_test_rows_and_on_rows_of_their_own() -> None:
    held = {"a": corners(0, 1), "b": corners(1, 1), "c": corners(2, 0, 1), "empty": corners()}
    judge = Judge(corners(0, 1, 2, 1), 3, held_out=held, clients="every")
    scores = judge.score(IDENTITY, admitted(a=IDENTITY, b=TURNED), last=False)
    clients = scores["clients"]
    told = {"facts": {"loss": 0.5}}
    assert clients["a"] == {"num_examples": 1.0, "steps": 1, **told, "accuracy": 0.75, "own_accuracy": 1.0}
    assert clients["b"] == {"num_examples": 2.0, "steps": 2, **told, "accuracy": 0.25, "own_accuracy": 0.5}
    assert clients["c"] == {"own_accuracy": 0.0}  # it was not asked in this round, and is judged all the same
    assert scores["client_accuracy_mean"] == 0.5
    assert scores["client_accuracy_weighted"] == pytest.approx((0.75 + 2 * 0.25) / 3)
    assert scores["client_accuracy_std"] == 0.25
    assert scores["own_accuracy_mean"] == 0.5
    assert scores["own_accuracy_weighted"] == pytest.approx((2 * 1.0 + 2 * 0.5 + 3 * 0.0) / 7)
    assert scores["own_accuracy_worst10"] == 0.0


def test_who_took_no_step_has_no_network_of_its_own() -> None:
    """Where sums are fused nobody trains: every client stands at the model it was sent, and that is not its score."""
    seen = admitted(a=IDENTITY, b=TURNED)
    resting = replace(seen, cohort=Cohort(tuple(replace(u, steps=0) for u in seen.cohort)))
    judge = Judge(corners(0, 1, 2, 1), 3, held_out={"a": corners(0, 1)}, clients="every")
    scores = judge.score(IDENTITY, resting, last=False)
    assert "client_accuracy_mean" not in scores
    assert "accuracy" not in scores["clients"]["b"]
    assert scores["own_accuracy_mean"] == 1.0


@pytest.mark.parametrize(
    ("when", "last", "told"), [("never", True, False), ("last", False, False), ("last", True, True)]
)
def test_clients_are_scored_when_asked_for(when: Any, last: bool, told: bool) -> None:
    scores = Judge(corners(0, 1, 2), 3, clients=when).score(IDENTITY, admitted(a=IDENTITY), last=last)
    assert ("clients" in scores) is told


def test_an_update_that_several_methods_fuse_is_judged_once() -> None:
    asked: list[Answering] = []

    def ask(how: AskModel, models: Sequence[Answering], rows: Rows, batch: int) -> list[Tensor]:
        if isinstance(how, partial) and how.keywords["draws"].number:  # few draws: a client's own network
            asked.extend(models)
        return ask_here(how, models, rows, batch)

    judge = Judge(corners(0, 1, 2, 1), 3, ask=ask)
    first = judge.score(IDENTITY, admitted(a=IDENTITY, b=TURNED))
    assert judge.score(TURNED, admitted(a=IDENTITY, b=TURNED))["clients"] == first["clients"]
    assert len(asked) == 2
    changed = judge.score(TURNED, admitted(a=TURNED, b=network(10 * torch.eye(3).roll(2, 0))))["clients"]
    assert [changed[c]["accuracy"] for c in "ab"] == [0.25, 0.0]
    assert len(asked) == 3


def test_networks_that_stay_apart_are_judged_one_by_one() -> None:
    test = corners(0, 1, 2, 1)
    held = {"a": corners(0, 1), "b": corners(1, 2)}
    judge = Judge(test, 3, held_out=held)
    scores = judge.score(Apart((IDENTITY, TURNED)), admitted(a=IDENTITY, b=TURNED))
    one, other = judge.evaluate(IDENTITY), judge.evaluate(TURNED)
    for name in ("accuracy", "nll", "ece", "brier"):
        assert scores[name] == pytest.approx((one[name] + other[name]) / 2)
    assert scores["confusion"] == (torch.tensor(one["confusion"]) + torch.tensor(other["confusion"])).tolist()
    assert scores["per_class"] == [0.5, 0.5, 0.5]
    assert scores["reliability"]["count"][-1] == 8
    assert scores["reliability"]["accuracy"][-1] == pytest.approx((0.75 + 0.25) / 2)
    assert [scores["clients"][c]["own_accuracy"] for c in "ab"] == [1.0, 1.0]  # each with its own network
    with pytest.raises(RecipeError, match="no common answer"):
        log_probabilities(Apart((IDENTITY,)), test.x)


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(1, 100)), min_size=1, max_size=40))
def test_spread_is_mean_deviation_and_worst_tenth(found: list[tuple[float, float]]) -> None:
    accuracies = {f"c{i}": a for i, (a, _) in enumerate(found)}
    num_examples = {f"c{i}": m for i, (_, m) in enumerate(found)}
    values = torch.tensor([a for a, _ in found], dtype=torch.float64)
    weights = torch.tensor([m for _, m in found], dtype=torch.float64)
    told = summarize_clients(accuracies, num_examples)
    worst = values.sort().values[: -(-len(values) // 10)]
    assert told["client_accuracy_mean"] == pytest.approx(float(values.mean()))
    assert told["client_accuracy_std"] == pytest.approx(float(values.std(correction=0)), abs=1e-9)
    assert told["client_accuracy_weighted"] == pytest.approx(float((values * weights).sum() / weights.sum()))
    assert told["client_accuracy_worst10"] == pytest.approx(float(worst.mean()))


def test_nobody_has_no_spread() -> None:
    assert summarize_clients({}, {}) == {}


@dataclass(frozen=True)
class Fixed:
    """A model that says the same of every row."""

    says: Tensor

    def logits(self, x: Tensor) -> Tensor:
        return self.says.expand(len(x), -1)

    members: ClassVar[tuple[Single, ...]] = ()

    def to(self, device: str) -> Fixed:
        return self


def test_the_server_may_ask_about_other_rows() -> None:
    judge = Judge(corners(0, 1, 2), 3)
    says_one: Any = Fixed(torch.tensor([0.0, 5.0, 0.0]))
    assert judge.evaluate(says_one)["accuracy"] == pytest.approx(1 / 3)
    assert judge.evaluate(says_one, corners(1, 1))["accuracy"] == 1.0


SPEC = Spec("mlp", {"inputs": 4, "hidden": [5], "classes": 3})


def plain() -> Single:
    return start_of(SPEC).single


def bayesian(**options: object) -> Single:
    return BayesianLayers(last=2, log_variance=0.0, draws=7, **options)(plain(), 3, seed=0)  # type: ignore[arg-type]


def inputs(n: int = 25, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(n, 4, generator=torch.Generator().manual_seed(n))


def test_entropy_is_scipys() -> None:
    p = torch.rand(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).softmax(-1)
    assert CLASSIFICATION.entropy(p.log()).numpy() == pytest.approx(stats.entropy(p.numpy(), axis=1))
    assert CLASSIFICATION.entropy(torch.tensor([[0.0, -torch.inf]])).item() == 0


def test_information_is_the_mean_divergence_of_draws_from_their_mean() -> None:
    p = torch.randn(5, 6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).softmax(-1)
    apart = stats.entropy(p.numpy(), p.mean(0, keepdim=True).numpy(), axis=2).mean(0)
    assert mutual_information(p.log()).numpy() == pytest.approx(apart)
    assert not mutual_information(p[:1].expand(4, 6, 3).log()).gt(1e-12).any()


def test_auroc_is_sklearns_with_ties_counting_half() -> None:
    draw = torch.Generator().manual_seed(0)
    inside, outside = torch.randint(0, 20, (50,), generator=draw), torch.randint(5, 25, (30,), generator=draw)
    labels = [0] * 50 + [1] * 30
    assert auroc(inside, outside) == pytest.approx(roc_auc_score(labels, torch.cat([inside, outside]).numpy()))


def test_a_bayesian_network_is_asked_draw_by_draw_and_answers_as_one() -> None:
    model, x = bayesian(), inputs()
    answer = predict(model, x, classes=3, batch=10)
    torch.testing.assert_close(answer.outputs.log_softmax(-1), log_probabilities(model, x), atol=1e-6, rtol=0)
    each = each_draw(model, x)
    assert each.shape == (7, 25, 3)
    assert answer.information is not None
    torch.testing.assert_close(answer.information, mutual_information(each.double()), atol=1e-6, rtol=0)
    assert answer.scores().keys() == {"entropy", "mutual_information"}


def test_models_without_draws_have_entropy_only() -> None:
    mixture = Mixture((plain(), plain()), torch.tensor([0.5, 0.5]), MeanProbability())
    for model in (plain(), mixture, bayesian(noise=False)):
        answer = predict(model, inputs(), classes=3)
        assert answer.information is None
        torch.testing.assert_close(answer.outputs.log_softmax(-1), log_probabilities(model, inputs()))
        assert answer.scores().keys() == {"entropy"}
    with pytest.raises(RecipeError, match="stay apart"):
        predict(Apart((plain(),)), inputs(), classes=3)


def test_the_judge_scores_how_strange_inputs_are_met() -> None:
    test = Rows(inputs(), torch.zeros(25, dtype=torch.int64))
    far = inputs(40, scale=30.0)
    judge = Judge(test, 3, ood_inputs=far)
    scores = judge.score(bayesian())
    here, there = predict(bayesian(), test.x, 3), predict(bayesian(), far, 3)
    assert scores["ood_auroc"] == auroc(here.entropy, there.entropy)
    assert scores["ood_auroc_information"] == auroc(here.information, there.information)  # type: ignore[arg-type]
    assert scores["ood_entropy"] == pytest.approx(float(there.entropy.mean()))
    assert "ood_auroc" not in judge.evaluate(plain(), Rows(far, torch.zeros(40, dtype=torch.int64)))
    assert "ood_auroc_information" not in judge.score(plain())
    apart = judge.score(Apart((plain(), plain())))
    assert "ood_auroc" not in apart

"""Each task against its likelihood's closed form, and against scikit-learn's scores."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn import metrics
from torch import Tensor

from fedfuse.errors import ConfigError
from fedfuse.tasks import BINARY, CLASSIFICATION, MULTILABEL, REGRESSION, Task, scores_better, task_named

DRAW = torch.Generator().manual_seed(0)
Z = torch.randn(40, 3, generator=DRAW, dtype=torch.float64)
TARGETS: dict[str, tuple[Tensor, Tensor]] = {
    "classification": (Z, torch.randint(0, 3, (40,), generator=DRAW)),
    "binary": (Z[:, :1], torch.randint(0, 2, (40,), generator=DRAW)),
    "multilabel": (Z, torch.randint(0, 2, (40, 3), generator=DRAW).float()),
    "regression": (Z, torch.randn(40, 3, generator=DRAW)),
}


def log_likelihood(task: Task, z: Tensor, y: Tensor) -> np.ndarray:
    """Each row's log-likelihood by scipy, constants of the Gaussian left out."""
    if task is CLASSIFICATION:
        return np.log(z.softmax(-1).numpy()[np.arange(len(y)), y.numpy()])
    if task is REGRESSION:
        return (stats.norm.logpdf(y.numpy(), z.numpy()) - stats.norm.logpdf(0)).sum(1)
    return stats.bernoulli.logpmf(y.reshape(len(y), -1).numpy(), z.sigmoid().numpy()).sum(1)


@pytest.mark.parametrize("name", TARGETS)
def test_the_loss_is_the_likelihoods(name: str) -> None:
    task, (z, y) = task_named(name), TARGETS[name]
    expected = -log_likelihood(task, z, y)
    assert float(task.loss(z, y)) == pytest.approx(expected.mean())
    assert float(task.loss(z, y, "sum")) == pytest.approx(expected.sum())


@pytest.mark.parametrize("name", TARGETS)
def test_sampled_targets_have_the_predicted_mean_and_are_targets(name: str) -> None:
    task, (z, _) = task_named(name), TARGETS[name]
    many = z[:1].expand(20_000, -1)
    drawn = task.sample(many.float(), torch.Generator().manual_seed(1))
    assert task.flaw(drawn) is None
    found = torch.bincount(drawn, minlength=3) / len(many) if task is CLASSIFICATION else drawn.double().mean(0)
    torch.testing.assert_close(found.double().reshape(-1), task.predict(z[:1])[0], atol=0.03, rtol=0)


@pytest.mark.parametrize("name", TARGETS)
def test_an_average_predicts_the_mean_prediction(name: str) -> None:
    task, (z, _) = task_named(name), TARGETS[name]
    each, weights = torch.stack([z, 2 * z, z + 1]), torch.tensor([0.2, 0.3, 0.5])
    mean = (weights[:, None, None] * task.predict(each)).sum(0)
    torch.testing.assert_close(task.predict(task.average(each, weights)), mean)
    torch.testing.assert_close(task.predict(task.average(each)), task.predict(each).mean(0))
    torch.testing.assert_close(task.predict(task.as_outputs(task.predict(z))), task.predict(z))


def test_binary_scores_are_scikit_learns() -> None:
    z, y = TARGETS["binary"]
    found, p = BINARY.measure(z, y, 2), z.sigmoid().flatten().numpy()
    assert found["auroc"] == pytest.approx(metrics.roc_auc_score(y, p))
    assert found["brier"] == pytest.approx(metrics.brier_score_loss(y, p))
    assert found["nll"] == pytest.approx(metrics.log_loss(y, p))
    assert found["accuracy"] == metrics.accuracy_score(y, p > 0.5)
    assert found["confusion"] == metrics.confusion_matrix(y, p > 0.5).tolist()
    assert BINARY.measure(z, torch.zeros_like(y), 2)["auroc"] is None  # one kind of row has no such area


def test_multilabel_scores_are_means_over_labels() -> None:
    z, y = TARGETS["multilabel"]
    found, p = MULTILABEL.measure(z, y, 3), z.sigmoid().numpy()
    assert found["auroc"] == pytest.approx(metrics.roc_auc_score(y, p, average="macro"))
    assert found["exact"] == metrics.accuracy_score(y, p > 0.5)
    assert found["accuracy"] == pytest.approx(1 - metrics.hamming_loss(y, p > 0.5))


def test_regression_scores_are_scikit_learns() -> None:
    z, y = TARGETS["regression"]
    found = REGRESSION.measure(z, y, 3)
    assert found["rmse"] == pytest.approx(math.sqrt(metrics.mean_squared_error(y, z)))
    assert found["mae"] == pytest.approx(metrics.mean_absolute_error(y, z))
    assert found["r2"] == pytest.approx(metrics.r2_score(y, z))
    assert REGRESSION.measure(z[:, :1], torch.ones(40), 1)["r2"] is None
    assert REGRESSION.score(z, y, 3) == found["rmse"]


@pytest.mark.parametrize(
    ("name", "y", "classes", "words"),
    [
        ("classification", torch.tensor([0, 3]), 3, "run from 0 to 3"),
        ("classification", torch.tensor([0.5]), 3, "float32"),
        ("binary", torch.tensor([0, 2]), 0, "expected 0 or 1"),
        ("binary", torch.tensor([0, 1]), 3, "3 classes"),
        ("multilabel", torch.tensor([[0.0, 0.5]]), 2, "hold 0.5"),
        ("multilabel", torch.tensor([[0.0, 1.0]]), 3, r"\(1, 3\)"),
        ("regression", torch.tensor([1]), 1, "int64"),
        ("regression", torch.tensor([math.nan]), 1, "finite"),
        ("regression", torch.zeros(2, 2), 3, r"\(2, 3\)"),
    ],
)
def test_targets_of_another_task_are_named(name: str, y: Tensor, classes: int, words: str) -> None:
    found = task_named(name).flaw(y, classes)
    assert found is not None
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(found)


@pytest.mark.parametrize("name", TARGETS)
def test_good_targets_have_no_flaw(name: str) -> None:
    task, (z, y) = task_named(name), TARGETS[name]
    classes = 2 if task is BINARY else 3
    assert task.flaw(y, classes) is None
    assert task.outputs(classes) == z.shape[1]
    pooled = task.pool([task.measure(z, y, classes), task.measure(2 * z, y, classes)])
    assert pooled.keys() >= set(task.scores)


def test_an_unknown_task_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected one of classification"):
        task_named("ranking")
    assert scores_better(CLASSIFICATION, 0.9, 0.8)


def test_entropy_of_one_yes_or_no_is_that_of_two_classes() -> None:
    z = Z[:, :1]
    two = torch.cat([torch.zeros_like(z), z], 1)
    torch.testing.assert_close(BINARY.entropy(z), CLASSIFICATION.entropy(two))
    assert REGRESSION.entropy(z) is None

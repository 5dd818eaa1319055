"""Texts: the next token's likelihood, and perplexity, against their formulas."""

from __future__ import annotations

import math

import pytest
import torch

from fedfuse.tasks import LANGUAGE_MODEL, TEXT_CLASSIFICATION, scores_better, task_header, task_named
from fedfuse.tasks.language import NO_TARGET

DRAW = torch.Generator().manual_seed(0)
Z = torch.randn(4, 5, 3, generator=DRAW, dtype=torch.float64)
Y = torch.randint(0, 3, (4, 5), generator=DRAW)
Y[0, 3:] = NO_TARGET


def each_nll() -> list[float]:
    log_probs = Z.log_softmax(-1)
    known = [(i, t) for i in range(4) for t in range(5) if int(Y[i, t]) != NO_TARGET]
    return [-float(log_probs[i, t, Y[i, t]]) for i, t in known]


def test_the_loss_is_over_targets_alone() -> None:
    expected = each_nll()
    assert len(expected) == 18
    assert float(LANGUAGE_MODEL.loss(Z, Y)) == pytest.approx(sum(expected) / 18)
    assert float(LANGUAGE_MODEL.loss(Z, Y, "sum")) == pytest.approx(sum(expected))
    assert float(LANGUAGE_MODEL.loss(Z[:1], torch.full((1, 5), NO_TARGET))) == 0.0


def test_perplexity_is_the_exponential_of_the_mean_loss() -> None:
    scores = LANGUAGE_MODEL.measure(Z, Y, 3)
    assert scores["perplexity"] == pytest.approx(math.exp(sum(each_nll()) / 18))
    known = Y != NO_TARGET
    assert scores["accuracy"] == pytest.approx(float((Z.argmax(-1) == Y)[known].double().mean()))
    assert LANGUAGE_MODEL.measure(Z, torch.full_like(Y, NO_TARGET), 3)["perplexity"] is None
    assert scores_better(LANGUAGE_MODEL, 3.0, 4.0)


def test_redrawn_targets_keep_what_is_nobodys() -> None:
    many = Z[:1].expand(20_000, -1, -1).float()
    nobody = torch.zeros(20_000, 5, dtype=torch.int64)
    nobody[:, 4] = NO_TARGET
    drawn = LANGUAGE_MODEL.redraw(many, nobody, torch.Generator().manual_seed(1))
    assert LANGUAGE_MODEL.flaw(drawn, 3) is None
    assert bool((drawn[:, 4] == NO_TARGET).all())
    found = torch.bincount(drawn[:, 0], minlength=3).double() / 20_000
    torch.testing.assert_close(found, Z[0, 0].softmax(-1), atol=0.03, rtol=0)


def test_an_average_predicts_the_mean_probability() -> None:
    each, weights = torch.stack([Z, 2 * Z, Z + 1]), torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    mean = torch.einsum("k,kntv->ntv", weights, each.softmax(-1))
    torch.testing.assert_close(LANGUAGE_MODEL.predict(LANGUAGE_MODEL.average(each, weights)), mean)
    torch.testing.assert_close(LANGUAGE_MODEL.average(each).softmax(-1), each.softmax(-1).mean(0))
    assert LANGUAGE_MODEL.entropy(Z).shape == (4, 5)


@pytest.mark.parametrize(
    ("y", "word"),
    [
        (torch.zeros(3, dtype=torch.int64), "shape"),
        (torch.zeros(3, 2), "int64"),
        (torch.full((3, 2), 7), "from 0 to 2"),
        (torch.full((3, 2), -1), "-1"),
    ],
)
def test_targets_that_are_no_tokens_are_named(y: torch.Tensor, word: str) -> None:
    assert word in (LANGUAGE_MODEL.flaw(y, 3) or "")


def test_texts_with_a_class_are_classified() -> None:
    assert task_named("text-classification") is TEXT_CLASSIFICATION
    assert task_header(TEXT_CLASSIFICATION) == {"task": "text-classification"}
    assert TEXT_CLASSIFICATION.flaw(torch.tensor([0, 1]), 2) is None

"""Entropy, information and strangers, against the definitions."""

from __future__ import annotations

import pytest
import torch
from scipy import stats
from sklearn.metrics import roc_auc_score
from torch import Tensor

from fedfuse.core.model import Apart, Single
from fedfuse.core.rows import Rows
from fedfuse.core.spec import Spec
from fedfuse.errors import RecipeError
from fedfuse.models.bayes import BayesianLayers
from fedfuse.nets.mixture import MeanProbability, Mixture
from fedfuse.server.judge import Judge, each_draw, log_probabilities, mutual_information, predict
from fedfuse.tasks import CLASSIFICATION
from fedfuse.tasks.metrics import auroc

SPEC = Spec("mlp", {"inputs": 4, "hidden": [5], "classes": 3})


def plain() -> Single:
    torch.manual_seed(0)
    return Single.of(SPEC.build(), SPEC)


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

"""Single networks and mixtures answer logits."""

from __future__ import annotations

import torch
from torch import nn

from fedfuse.core.combine import MeanProbability
from fedfuse.core.model import Mixture, Single
from fedfuse.core.spec import Spec


def test_a_single_network_answers_as_its_module_does_in_evaluation_mode() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
    module(torch.randn(8, 3))  # moves the running statistics
    single = Single.of(module, Spec.of(module))
    x = torch.randn(5, 3)
    expected = module.eval()(x)
    assert single.logits(x).equal(expected)
    module[0].weight.data.zero_()
    assert single.logits(x).equal(expected), "a model's weights are its own"


def test_a_mixture_answers_with_the_log_of_the_mean_probability() -> None:
    modules = [nn.Linear(3, 4) for _ in range(3)]
    weights = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    mixture = Mixture(tuple(Single.of(m, Spec.of(m)) for m in modules), weights, MeanProbability())
    x = torch.randn(6, 3)
    expected = sum(w * m(x).softmax(-1) for w, m in zip(weights.tolist(), modules, strict=True)).log()
    assert torch.allclose(mixture.logits(x), expected, atol=1e-6)


def test_vanishing_probabilities_stay_finite_in_log_space() -> None:
    logits = torch.tensor([[[200.0, -200.0]], [[210.0, -210.0]]])
    assert MeanProbability()(torch.tensor([0.5, 0.5]), logits).isfinite().all()

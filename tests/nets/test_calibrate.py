"""Temperatures and z-scores against closed forms and a general optimizer."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.optimize import minimize_scalar
from torch import Tensor

from fedfuse.nets.mixture import calibration, fit_temperature


def loss(log_t: float, logits: Tensor, labels: Tensor) -> float:
    """Cross entropy of softmax(z / T) against Platt's targets."""
    n, classes = logits.shape
    target = torch.full((n, classes), 1 / (n + classes), dtype=torch.float64)
    target[range(n), labels] = (n + 1) / (n + classes)
    return float(-(target * (logits.double() / math.exp(log_t)).log_softmax(-1)).sum(-1).mean())


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("size", [0.1, 3.0, 50.0])
def test_the_temperature_is_the_likeliest(seed: int, size: float) -> None:
    draw = torch.Generator().manual_seed(seed)
    logits = size * torch.randn(60, 5, generator=draw)
    labels = torch.where(torch.rand(60, generator=draw) < 0.7, logits.argmax(-1), 0)
    found = minimize_scalar(loss, bounds=(-7, 7), args=(logits, labels), method="bounded", options={"xatol": 1e-10})
    assert math.log(fit_temperature(logits, labels)) == pytest.approx(found.x, abs=1e-5)


def test_scaling_logits_scales_the_temperature() -> None:
    draw = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(40, 3, generator=draw), torch.randint(3, (40,), generator=draw)
    labels[:25] = logits[:25].argmax(-1)
    assert fit_temperature(7 * logits, labels) == pytest.approx(7 * fit_temperature(logits, labels), rel=1e-6)


def test_rows_that_are_all_right_still_have_a_finite_temperature() -> None:
    """For margins m and n rows of two classes, softmax(m/T) = (n+1)/(n+2), so m/T = log(n+1)."""
    logits, labels = torch.tensor([[3.0, 0.0]] * 20), torch.zeros(20, dtype=torch.int64)
    assert fit_temperature(logits, labels) == pytest.approx(3 / math.log(21), rel=1e-9)
    nine = torch.cat([logits, torch.tensor([[900.0, 0.0]])])
    assert math.isfinite(fit_temperature(nine, torch.zeros(21, dtype=torch.int64)))


def test_a_network_that_says_nothing_keeps_its_scale() -> None:
    flat, labels = torch.zeros(9, 4), torch.zeros(9, dtype=torch.int64)
    assert fit_temperature(flat, labels) == 1.0
    assert calibration("zscore", flat, labels) == (0.0, 1.0)


def test_zscores_standardize_the_largest_logit() -> None:
    logits = 4 + 3 * torch.randn(500, 6, generator=torch.Generator().manual_seed(1))
    shift, scale = calibration("zscore", logits, torch.zeros(500, dtype=torch.int64))
    confidence = ((logits.double() - shift) / scale).amax(-1)
    assert float(confidence.mean()) == pytest.approx(0, abs=1e-9)
    assert float(confidence.std(correction=0)) == pytest.approx(1, abs=1e-9)
    assert calibration("temperature", logits, logits.argmax(-1)).shift == 0.0

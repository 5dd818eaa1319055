"""From spectra to rates."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fedfuse.linalg.lanczos import Spectrum
from fedfuse.nets.curvature import Curvature
from fedfuse.server.steps.prune import (
    SpectralRate,
    combined_rate,
    gap_rate,
    magnitude_threshold,
    plateau_rate,
    share_below,
    share_of_small,
)


def exact(*values: float) -> Spectrum:
    return Spectrum(torch.tensor([values]).double(), torch.full((1, len(values)), 1 / len(values)).double())


def test_the_first_gap_of_four_lipschitz_constants_is_the_rate() -> None:
    """Gaps 0.1, 0.3, 2, 5: with 𝓛 = 0.1 the third is the first above 0.4, so three of five may go."""
    spectrum = exact(-0.1, 0.0, 0.3, 2.3, 7.3)
    assert gap_rate(spectrum, 0.1) == pytest.approx(3 / 5)
    assert gap_rate(spectrum, 0.6) == pytest.approx(4 / 5)
    assert gap_rate(spectrum, 2.0) == 0.0


def test_several_probes_count_together() -> None:
    two = Spectrum(torch.tensor([[0.0, 9.0], [0.5, 9.5]]), torch.tensor([[0.8, 0.2], [0.6, 0.4]]))
    assert gap_rate(two, 1.0) == pytest.approx((0.8 + 0.6) / 2)


def test_the_plateau_lies_where_hardly_an_eigenvalue_is() -> None:
    """A flat bulk up to 0.01 and three outliers far away: what lies below the plateau is at least what is not positive
    and at most the bulk, and of four shares at equal steps none moves."""
    bulk = torch.linspace(-0.01, 0.01, 97)
    spectrum = exact(*bulk.tolist(), 5.0, 8.0, 10.0)
    rate = plateau_rate(spectrum)
    assert 0.48 <= rate <= 0.75
    assert rate <= 1 - (1 - share_below(spectrum, 0.0, 0.01)) / 2


def test_a_spectrum_without_positive_values_is_flat_all_over() -> None:
    assert plateau_rate(exact(-3.0, -2.0, -1.0)) == pytest.approx(1.0, abs=1e-6)
    assert plateau_rate(exact(0.0, 0.0)) == 1.0


def test_everybody_counts_by_rows_and_by_nearness_to_all_labels() -> None:
    """Eq. 6 by hand."""
    num_examples, apart, rates, eps = [400.0, 400.0, 800.0], [0.61, 0.31, 0.0], [0.7, 0.5, 0.2], 1e-2
    raw = [400 / 0.62, 400 / 0.32, 800 / 0.01]
    rate, weights = combined_rate(rates, num_examples, apart, eps)
    assert weights == pytest.approx([w / sum(raw) for w in raw])
    assert rate == pytest.approx(sum(w * p for w, p in zip(raw, rates, strict=True)) / sum(raw))


def test_threshold_and_layer_rates_by_hand() -> None:
    """Ten weights, p* = 0.45: the ⌊4.5⌋ = 4th smallest magnitude is 0.4; below it are 2 of 4 and 1 of 6."""
    first, second = torch.tensor([0.1, -0.2, 0.8, -0.9]), torch.tensor([0.3, -0.4, 0.5, -0.6, 0.7, 1.0])
    threshold = magnitude_threshold([first, second], 0.45)
    assert threshold == pytest.approx(0.4)
    assert share_of_small([first], threshold) == 0.5
    assert share_of_small([second], threshold) == pytest.approx(1 / 6)
    assert share_of_small([first, second], threshold) == pytest.approx(3 / 10)
    assert magnitude_threshold([first, second], 0.05) == 0.0


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_the_threshold_leaves_about_the_rate_below(rate: float) -> None:
    weights: list[Tensor] = [torch.randn(70, 30, generator=torch.Generator().manual_seed(0))]
    assert share_of_small(weights, magnitude_threshold(weights, rate)) == pytest.approx(rate, abs=1.01 / 2100)


def test_the_rule_is_the_users_choice() -> None:
    seen = Curvature(exact(-1.0, 0.0, 0.1, 30.0), 0.5)
    assert SpectralRate("gap").rate_of(seen) == pytest.approx(0.75)
    assert SpectralRate("plateau").rate_of(seen) == plateau_rate(seen.spectrum)
    assert math.isfinite(plateau_rate(seen.spectrum))

"""The analytic Gaussian mechanism against the definition of (ε, δ)-privacy, integrated numerically."""

import math

import pytest
from scipy import integrate, stats

from fedfuse.errors import ConfigError
from fedfuse.linalg.privacy import compose_signals, gaussian_delta, gaussian_epsilon, gaussian_sigma, sampled_epsilon


def divergence(epsilon: float, signal: float) -> float:
    """∫ max(0, p − e^ε q) of N(μ, 1) and N(0, 1): the least δ by definition."""

    def gap(x: float) -> float:
        return max(0.0, stats.norm.pdf(x, signal) - math.exp(epsilon) * stats.norm.pdf(x))

    begin = epsilon / signal + signal / 2  # where p = e^ε q
    return float(integrate.quad(gap, begin, begin + 40, epsabs=1e-14)[0])


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 4.0])
@pytest.mark.parametrize("signal", [0.2, 1.0, 3.0])
def test_delta_is_the_divergence_of_two_gaussians(epsilon: float, signal: float) -> None:
    assert gaussian_delta(epsilon, signal) == pytest.approx(divergence(epsilon, signal), rel=1e-6, abs=1e-13)


@pytest.mark.parametrize(("epsilon", "delta"), [(0.05, 1e-6), (1.0, 1e-5), (8.0, 1e-9), (500.0, 1e-5)])
def test_sigma_is_the_least_that_is_private(epsilon: float, delta: float) -> None:
    sigma = gaussian_sigma(epsilon, delta, sensitivity=2.0)
    assert gaussian_delta(epsilon, 2 / sigma) <= delta * (1 + 1e-6)
    assert gaussian_delta(epsilon, 2 / (sigma * 0.999)) > delta
    assert gaussian_epsilon(2 / sigma, delta) == pytest.approx(epsilon, rel=1e-6)


def test_it_takes_less_noise_than_the_classical_formula() -> None:
    assert gaussian_sigma(0.9, 1e-5) < math.sqrt(2 * math.log(1.25 / 1e-5)) / 0.9


def test_releases_compose_as_one_with_their_signals_added_in_squares() -> None:
    """Two releases of (μ₁, μ₂) are one of a point in the plane at distance √(μ₁² + μ₂²)."""
    both = compose_signals([0.6, 0.8])
    assert both == pytest.approx(1.0)
    assert gaussian_epsilon(both, 1e-5) < gaussian_epsilon(0.6, 5e-6) + gaussian_epsilon(0.8, 5e-6)


def test_sampling_amplifies_and_never_beats_the_exact_answer() -> None:
    exact = gaussian_epsilon(compose_signals([1 / 2.0] * 10), 1e-5)
    assert exact <= sampled_epsilon(2.0, 1.0, 10, 1e-5) < 1.3 * exact
    assert sampled_epsilon(2.0, 0.1, 10, 1e-5) < exact / 3


def test_the_sum_over_orders_is_the_divergence_of_a_mixture() -> None:
    """E over N(0, z²) of ((1 − q) + q p(x)/p₀(x))^α, integrated numerically, for every order that could be best."""
    noise, share, rounds, delta = 1.5, 0.2, 4, 1e-5
    found = []
    for order in range(2, 30):

        def term(x: float, order: int = order) -> float:
            ratio = math.log(1 - share + share * math.exp((2 * x - 1) / (2 * noise**2)))
            return math.exp(float(stats.norm.logpdf(x, scale=noise)) + order * ratio)

        moment = integrate.quad(term, -30, 30 + 2 * order, limit=500)[0]
        loss = rounds * math.log(moment) / (order - 1)
        found.append(loss + math.log((order - 1) / order) - (math.log(delta) + math.log(order)) / (order - 1))
    assert sampled_epsilon(noise, share, rounds, delta) == pytest.approx(min(found), rel=1e-6)


@pytest.mark.parametrize(("epsilon", "delta"), [(0.0, 0.1), (1.0, 0.0), (1.0, 1.0)])
def test_what_is_no_privacy_is_refused(epsilon: float, delta: float) -> None:
    with pytest.raises(ConfigError, match="expected epsilon > 0"):
        gaussian_sigma(epsilon, delta)


def test_a_share_is_a_share() -> None:
    with pytest.raises(ConfigError, match="a share up to 1"):
        sampled_epsilon(1.0, 2.0, 1, 1e-5)

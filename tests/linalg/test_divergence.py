import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import scipy.integrate
import scipy.spatial.distance
import scipy.special
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedfuse.errors import ConfigError
from fedfuse.linalg import divergence
from fedfuse.linalg.divergence import (
    jensen_shannon,
    k_statistics,
    non_gaussianity,
    renyi,
    renyi_to_gaussian,
)

ORDERS = [0.0, 0.5, 1.0, 2.0, 0.3, 3.7]


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def skewed(*shape: int, seed: int = 0) -> torch.Tensor:
    return normal(*shape, seed=seed).exp()


def all_four(x: torch.Tensor) -> list[float]:
    k = k_statistics(x)
    return [float(v) for v in (k.k1, k.k2, k.k3, k.k4)]


def kstats(x: torch.Tensor) -> list[float]:
    return [float(scipy.stats.kstat(x.double().numpy().ravel(), n)) for n in (1, 2, 3, 4)]


@given(n=st.integers(4, 200), block=st.integers(1, 50), seed=st.integers(0, 99))
@settings(deadline=None, max_examples=50)
def test_k_statistics_equal_scipys_in_blocks_of_any_size(n: int, block: int, seed: int) -> None:
    x = skewed(n, seed=seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(divergence, "_BLOCK", block)
        assert all_four(x) == pytest.approx(kstats(x), rel=1e-8, abs=1e-10)


def test_float32_layers_are_scored_in_float64() -> None:
    x = (0.02 * skewed(16, 3, 5, 5)).float()
    assert all_four(x) == pytest.approx(kstats(x), rel=1e-12)


def test_large_tensors_and_large_offsets_cost_no_precision() -> None:
    x = torch.sort(skewed(2_200_000)).values  # n³ does not fit 64 bits
    centred = all_four(x)[1:]
    assert centred == pytest.approx(kstats(x)[1:], rel=1e-10)
    assert all_four(x + 1e6)[1:] == pytest.approx(centred, rel=1e-5)


def test_rows_are_scored_one_by_one() -> None:
    x = skewed(40, 3, 7).float()
    k = k_statistics(x, per_row=True)
    for i, row in enumerate(x):
        assert [float(v[i]) for v in (k.k1, k.k2, k.k3, k.k4)] == pytest.approx(kstats(row), rel=1e-9)
    assert non_gaussianity(x, per_row=True).shape == (40,)


def test_one_row_is_a_vector() -> None:
    x = skewed(1, 50)
    for standardized in (False, True):
        alone = non_gaussianity(x, standardized=standardized, per_row=True)
        assert alone.shape == (1,)
        assert alone.dtype == torch.float64
        assert float(alone) == float(non_gaussianity(x[0], standardized=standardized))


@pytest.mark.parametrize("offset", [0.0, 0.5, 3.0, 1e4, -1e4])
def test_the_mean_may_be_small_or_large_beside_the_spread(offset: float) -> None:
    x = skewed(5000) - 1.65
    exact = scipy.stats.kstat(x.numpy(), 3), scipy.stats.kstat(x.numpy(), 4)
    assert all_four(x + offset)[2:] == pytest.approx(exact, rel=1e-8)


def test_threads_do_not_disturb_each_other() -> None:
    layers = [skewed(300_000, seed=s).float() for s in range(4)]
    alone = [float(non_gaussianity(x)) for x in layers]
    with ThreadPoolExecutor(4) as pool:
        assert [float(v) for v in pool.map(non_gaussianity, layers * 5)] == alone * 5


def test_long_rows_are_split_and_many_rows_are_grouped(monkeypatch: pytest.MonkeyPatch) -> None:
    x = skewed(9, 35)
    whole = non_gaussianity(x, per_row=True)
    for block in (10, 80):
        monkeypatch.setattr(divergence, "_BLOCK", block)
        assert torch.allclose(non_gaussianity(x, per_row=True), whole, rtol=1e-10)


def test_the_score_is_the_absolute_product_and_grows_with_the_seventh_power() -> None:
    x = -skewed(500)
    _, _, k3, k4 = kstats(x)
    assert k3 * k4 < 0
    assert float(non_gaussianity(x)) == pytest.approx(-k3 * k4)
    assert float(non_gaussianity(1.1 * x)) == pytest.approx(1.1**7 * -k3 * k4)


def test_the_standardized_score_has_no_scale_and_no_offset() -> None:
    x = skewed(500)
    _, k2, k3, k4 = kstats(x)
    score = float(non_gaussianity(x, standardized=True))
    assert score == pytest.approx(abs(k3 * k4) / k2**3.5)
    assert float(non_gaussianity(1e-12 * x, standardized=True)) == pytest.approx(score)
    assert float(non_gaussianity(3 * x + 7, standardized=True)) == pytest.approx(score)


def test_a_gaussian_scores_low() -> None:
    gauss, laplace = normal(100_000), normal(100_000).sign() * skewed(100_000, seed=1)
    assert float(non_gaussianity(gauss)) < 1e-3 * float(non_gaussianity(laplace))


@pytest.mark.parametrize(
    "x",
    [
        torch.tensor([1.0, 2.0, 5.0]),
        torch.empty(0),
        torch.full((1000,), 0.1),
        torch.full((100_000,), 0.1).double(),
        torch.zeros(50),
        torch.tensor([1.0, 2.0, 3.0, torch.nan, 4.0]),
        torch.tensor([1.0, 2.0, 3.0, torch.inf, 4.0]),
    ],
    ids=["tiny", "empty", "constant", "constant-double", "zero", "nan", "inf"],
)
def test_what_has_no_score_is_nan_and_raises_nothing(x: torch.Tensor) -> None:
    assert all(math.isnan(k) for k in all_four(x))
    assert math.isnan(float(non_gaussianity(x)))
    assert math.isnan(float(non_gaussianity(x, standardized=True)))
    rng = torch.Generator().manual_seed(0)
    for density in ("histogram", "samples", "grid"):
        assert math.isnan(renyi_to_gaussian(x, 2, density=density, generator=rng))


def test_one_bad_row_does_not_spoil_the_others() -> None:
    x = skewed(3, 20)
    x[1] = 4.0
    assert non_gaussianity(x, per_row=True).isnan().tolist() == [False, True, False]
    assert non_gaussianity(torch.zeros(2, 0), per_row=True).isnan().all()


@pytest.mark.parametrize("order", [0.3, 0.5, 1.0, 1.5, 2.0])
@pytest.mark.parametrize(("m", "sigma"), [(0.0, 0.05), (0.5, 0.8), (-0.3, 1.0)])
def test_the_histogram_recovers_the_closed_form_as_rows_grow(order: float, m: float, sigma: float) -> None:
    wide = order + (1 - order) * sigma**2  # Gil, Alajaji and Linder 2013; Kullback–Leibler at order 1
    expected = (sigma**2 + m**2 - 1) / 2 - math.log(sigma)
    if order != 1:
        expected = order * m**2 / (2 * wide) - math.log(sigma) - math.log(wide) / (2 * (order - 1))
    errors = [
        np.mean([abs(renyi_to_gaussian(m + sigma * normal(n, seed=s), order) - expected) for s in range(3)])
        for n in (500, 200_000)
    ]
    assert errors[1] < 0.02 + 0.01 * expected
    assert errors[1] < errors[0] or errors[0] < 1e-3


def test_order_zero_sees_the_support_alone() -> None:
    x = torch.linspace(-0.5, 2, 1001)
    expected = -math.log(scipy.stats.norm.cdf(2) - scipy.stats.norm.cdf(-0.5))
    assert renyi_to_gaussian(x, 0) == pytest.approx(expected)
    assert renyi_to_gaussian(x.square() - 1, 0) > renyi_to_gaussian(3 * x, 0)


def test_the_histogram_of_a_layer_is_minus_log_sigma_minus_a_half() -> None:
    assert renyi_to_gaussian(0.05 * normal(100_000).float()) == pytest.approx(-math.log(0.05) - 0.5, abs=0.02)
    assert renyi_to_gaussian(1e-20 * normal(100_000)) == pytest.approx(-math.log(1e-20) - 0.5, abs=0.02)


def test_the_fitted_gaussian_forgets_location_and_scale() -> None:
    x = skewed(20_000)
    fitted = renyi_to_gaussian(x, reference="fitted")
    assert fitted == pytest.approx(renyi_to_gaussian(100 + 1e-3 * x, reference="fitted"), rel=1e-6)
    assert renyi_to_gaussian(3 + 5 * normal(20_000), reference="fitted") < 0.01 < fitted


def test_the_histogram_of_a_laplacian_finds_its_divergence() -> None:
    u = torch.rand(400_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) - 0.5
    x = -u.sign() * (1 - 2 * u.abs()).log()
    p, q = scipy.stats.laplace.pdf, scipy.stats.norm.pdf
    expected, _ = scipy.integrate.quad(lambda t: 2 * p(t) * math.log(p(t) / q(t)), 0, 20)
    assert renyi_to_gaussian(x, 1.0) == pytest.approx(expected, rel=0.02)


def test_far_tails_stay_finite_and_outliers_do_not_explode_the_bins() -> None:
    far = renyi_to_gaussian(60 + normal(10_000))
    assert far == pytest.approx(1800, rel=0.01)
    lone = torch.cat([normal(1000), torch.tensor([1e9]).double()])
    assert 0 < renyi_to_gaussian(lone, 0.5) < math.inf


def test_bins_by_hand() -> None:
    x = torch.tensor([-1.0, -0.5, 0.5, 0.9, 1.0])
    q = np.diff(scipy.stats.norm.cdf([-1, 0, 1]))
    expected = 0.4 * math.log(0.4 / q[0]) + 0.6 * math.log(0.6 / q[1])
    assert renyi_to_gaussian(x, 1, bins=2) == pytest.approx(expected)
    assert renyi_to_gaussian(x, 0, bins=2) == pytest.approx(-math.log(q.sum()))


def test_bin_masses_are_scipys_everywhere() -> None:
    edges = torch.linspace(-8, 8, 4001, dtype=torch.float64)
    ours = divergence._log_normal_mass(edges[:-1], edges[1:]).numpy()
    left, right = edges[:-1].numpy(), edges[1:].numpy()
    low = np.where(left > 0, -right, left), np.where(left > 0, -left, right)
    exact = np.log(scipy.special.ndtr(low[1]) - scipy.special.ndtr(low[0]))
    assert np.allclose(ours, exact, rtol=1e-9, atol=1e-9)
    tight = torch.tensor([0.0, 1e-12, 1.0, 1.0 + 1e-7], dtype=torch.float64)
    ours = divergence._log_normal_mass(tight[:-1], tight[1:])
    assert float(ours[0]) == pytest.approx(math.log(1e-12 * scipy.stats.norm.pdf(0)), rel=1e-9)
    assert float(ours[2]) == pytest.approx(math.log(1e-7 * scipy.stats.norm.pdf(1)), rel=1e-7)


@pytest.mark.parametrize("order", ORDERS)
def test_samples_compare_softmax_with_softmax(order: float) -> None:
    x = normal(300)
    found = renyi_to_gaussian(x, order, density="samples", generator=torch.Generator().manual_seed(5))
    p, q = scipy.special.softmax(x.numpy()), scipy.special.softmax(normal(300, seed=5).numpy())
    if order == 1:
        expected = float(scipy.stats.entropy(p, q))
    elif order == 0:
        expected = 0.0
    else:
        expected = math.log((p**order * q ** (1 - order)).sum()) / (order - 1)
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("order", ORDERS)
def test_the_grid_is_the_released_formula(order: float) -> None:
    x = 0.05 * normal(16, 3, 5, 5)
    p = scipy.special.softmax(x.numpy().ravel())
    q = scipy.stats.norm.pdf(np.linspace(-1, 1, p.size))
    if order == 1:
        expected = float(scipy.stats.entropy(p + 1e-10, q + 1e-10))
    elif order == 0:
        expected = abs(math.log(q[p != 0].sum()))
    else:
        expected = abs(math.log((p**order * q ** (1 - order)).sum()) / (order - 1))
    assert renyi_to_gaussian(x, order, density="grid") == pytest.approx(expected, rel=1e-9)


def test_the_released_scores_are_nearly_the_same_for_all_clients() -> None:
    for order in (0, 0.5, 1, 2):
        scores = [renyi_to_gaussian(0.05 * normal(2400, seed=s), order, density="grid") for s in range(3)]
        assert max(abs(s / sum(scores) - 1 / 3) for s in scores) < 0.02


@pytest.mark.parametrize("order", ORDERS)
def test_discrete_divergence_equals_its_definition_and_is_zero_for_equals(order: float) -> None:
    p, q = skewed(20), skewed(20, seed=1)
    a, b = (p / p.sum()).numpy(), (q / q.sum()).numpy()
    if order == 0:
        expected = 0.0
    elif order == 1:
        expected = float(scipy.stats.entropy(a, b))
    else:
        expected = math.log((a**order * b ** (1 - order)).sum()) / (order - 1)
    assert renyi(p, q, order) == pytest.approx(expected, abs=1e-12)
    assert renyi(p, 3 * p, order) == pytest.approx(0.0, abs=1e-12)


def test_empty_outcomes() -> None:
    p, q = torch.tensor([0.5, 0.5, 0.0]), torch.tensor([0.25, 0.25, 0.5])
    assert renyi(p, q, 0) == pytest.approx(math.log(2))
    assert renyi(p, q, 1) == pytest.approx(math.log(2))
    assert renyi(q, p, 1) == math.inf
    assert renyi(q, p, 2) == math.inf
    assert renyi(q, p, 0.5) == pytest.approx(-2 * math.log(2 * math.sqrt(0.125)))


@given(a=st.floats(0.05, 6), b=st.floats(0.05, 6), seed=st.integers(0, 99))
@settings(deadline=None, max_examples=30)
def test_divergence_grows_with_its_order(a: float, b: float, seed: int) -> None:
    low, high = sorted((a, b))
    p, q = skewed(10, seed=seed), skewed(10, seed=seed + 100)
    assert 0 <= renyi(p, q, low) <= renyi(p, q, high) + 1e-9


@pytest.mark.parametrize(("classes", "expected"), [(1, 0.7583), (2, 0.6100), (5, 0.3113), (10, 0.0)])
def test_jensen_shannon_of_a_few_of_ten_balanced_classes(classes: int, expected: float) -> None:
    few = [400] * classes + [0] * (10 - classes)
    assert jensen_shannon(few, [1000] * 10) == pytest.approx(expected, abs=5e-5)


def test_jensen_shannon_equals_scipy_and_is_symmetric() -> None:
    p, q = skewed(10), skewed(10, seed=1)
    p[3] = q[5] = p[7] = q[7] = 0
    for base in (2, math.e):
        ours = jensen_shannon(p, q, base)
        assert ours == pytest.approx(scipy.spatial.distance.jensenshannon(p, q, base) ** 2)
        assert ours == pytest.approx(jensen_shannon(q, p, base))
    assert jensen_shannon([5, 0, 0], [0, 0, 9]) == pytest.approx(1.0)


def test_bad_input_is_explained() -> None:
    x = normal(10)
    with pytest.raises(ConfigError, match="order is -1"):
        renyi_to_gaussian(x, -1)
    with pytest.raises(ConfigError, match="order is inf"):
        renyi_to_gaussian(x, math.inf)
    with pytest.raises(ConfigError, match="density is 'kde'"):
        renyi_to_gaussian(x, density="kde")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="reference 'mine'"):
        renyi_to_gaussian(x, reference="mine")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="expected a generator"):
        renyi_to_gaussian(x, density="samples")
    with pytest.raises(ConfigError, match="bins is 0"):
        renyi_to_gaussian(x, bins=0)
    with pytest.raises(ConfigError, match="3 and 2 outcomes"):
        renyi(torch.ones(3), torch.ones(2))
    for wrong in ([0, 0], [1, -1], [math.nan, 1]):
        with pytest.raises(ConfigError, match=r"p sums to .*, expected finite counts"):
            jensen_shannon(wrong, [1, 1])
    with pytest.raises(ConfigError, match="2 and 3 bins"):
        jensen_shannon([1, 1], [1, 1, 1])

import math

import numpy as np
import pytest
import scipy.linalg
import torch
from torch import nn
from torch.func import functional_call

from fedfuse.errors import ConfigError, NotConverged
from fedfuse.linalg.lanczos import Spectrum, hessian_vector_product, lanczos, ritz, spectrum


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def symmetric(values: torch.Tensor, seed: int = 0) -> torch.Tensor:
    Q, _ = torch.linalg.qr(torch.randn(len(values), len(values), dtype=torch.float64, generator=rng(seed)))
    return Q @ values.double().diag() @ Q.T


@pytest.mark.parametrize(
    "values",
    [
        torch.linspace(-3, 8, 40),
        torch.logspace(-8, 4, 40),
        torch.tensor([1.0, 1.0, 1.0, 2.0, 2.0, -7.0, 0.0, 0.0]),
        torch.zeros(5),
        torch.ones(6),
        torch.tensor([4.0]),
    ],
    ids=["log_variance", "wide", "repeated", "zero", "identity", "one"],
)
def test_every_eigenvalue_is_found_with_as_many_steps_as_dimensions(values: torch.Tensor) -> None:
    A = symmetric(values)
    found, weights = ritz(lanczos(lambda v: A @ v, len(A), len(A), rng(1)))
    assert np.allclose(found, scipy.linalg.eigvalsh(A.numpy()), atol=1e-10 * max(1.0, float(values.abs().max())))
    assert float(weights.sum()) == pytest.approx(1)


def test_weights_are_the_squared_parts_of_the_probe() -> None:
    A = symmetric(torch.linspace(1, 5, 12))
    start = torch.randn(12, dtype=torch.float64, generator=rng(2))
    values, weights = ritz(lanczos(lambda v: A @ v, 12, 12, rng(), start=start))
    exact, vectors = torch.linalg.eigh(A)
    assert torch.allclose(values, exact)
    assert torch.allclose(weights, (vectors.T @ start / start.norm()).square(), atol=1e-10)


def test_a_probe_inside_an_invariant_subspace_gives_no_weight_outside() -> None:
    A = torch.diag(torch.tensor([1.0, 2.0, 3.0, 4.0]).double())
    start = torch.tensor([1.0, 1.0, 0.0, 0.0]).double()
    values, weights = ritz(lanczos(lambda v: A @ v, 4, 4, rng(), start=start))
    assert torch.allclose(values, A.diagonal())
    assert torch.allclose(weights, torch.tensor([0.5, 0.5, 0.0, 0.0]).double(), atol=1e-12)


def test_few_steps_find_the_ends_of_the_spectrum_without_ghosts() -> None:
    values = torch.cat([torch.linspace(0, 1, 297), torch.tensor([-4.0, 10.0, 20.0])])
    A = symmetric(values)
    found, _ = ritz(lanczos(lambda v: A @ v, 300, 60, rng()))
    assert torch.allclose(found[[0, -2, -1]], torch.tensor([-4.0, 10.0, 20.0]).double(), atol=1e-6)
    assert int((found > 5).sum()) == 2


def test_quadrature_is_exact_for_polynomials() -> None:
    A = symmetric(torch.linspace(-1, 2, 50))
    start = torch.randn(50, dtype=torch.float64, generator=rng(3))
    values, weights = ritz(lanczos(lambda v: A @ v, 50, 5, rng(), start=start))
    for power in range(10):
        exact = start @ torch.linalg.matrix_power(A, power) @ start / start.dot(start)
        assert float((weights * values**power).sum()) == pytest.approx(float(exact), rel=1e-9, abs=1e-9)


def test_probes_average_to_traces_shares_and_density() -> None:
    values = torch.cat([torch.full((60,), 0.0), torch.linspace(1, 3, 40)])
    A = symmetric(values)
    seen = spectrum(lambda v: A @ v, 100, steps=45, generator=rng(), probes=60)
    assert seen.values.shape == seen.weights.shape == (60, 45)
    assert float((seen.values**2 * seen.weights).sum() / 60) == pytest.approx(float(values.square().mean()), rel=0.05)
    assert seen.share_below(0.5) == pytest.approx(0.6, abs=0.03)
    assert seen.share_below(10.0) == pytest.approx(1.0)
    grid = torch.linspace(-2, 5, 2001, dtype=torch.float64)
    density = seen.density(grid, width=0.1)
    assert float(torch.trapezoid(density, grid)) == pytest.approx(1.0, abs=1e-6)
    peak = 0.6 / (0.1 * math.sqrt(2 * math.pi))
    assert float(density[(grid - 0).abs().argmin()]) == pytest.approx(peak, rel=0.06)


def test_same_seed_same_bytes_and_more_steps_than_dimensions_are_not_made() -> None:
    A = symmetric(torch.linspace(1, 2, 8))
    one, two = (spectrum(lambda v: A @ v, 8, steps=20, generator=rng(4), probes=2) for _ in range(2))
    assert torch.equal(one.values, two.values)
    assert one.values.shape == (2, 8)


def test_float32_vectors_suffice_for_a_rough_look() -> None:
    A = symmetric(torch.linspace(-1, 3, 60))
    seen = spectrum(lambda v: A.float() @ v, 60, steps=60, generator=rng(), dtype=torch.float32)
    assert torch.allclose(seen.values[0], torch.linspace(-1, 3, 60).double(), atol=1e-4)


def test_impossible_requests_are_explained() -> None:
    with pytest.raises(ConfigError, match="0 steps"):
        lanczos(lambda v: v, 3, 0, rng())
    with pytest.raises(ConfigError, match="0 probes"):
        spectrum(lambda v: v, 3, steps=1, generator=rng(), probes=0)
    with pytest.raises(NotConverged, match="client 4: product 1 with the operator is not finite"):
        lanczos(lambda v: v * math.nan, 3, 2, rng(), what="client 4")


def net() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, 3)).double()
    return model, torch.randn(10, 1, 6, 6, generator=rng()).double(), torch.arange(10) % 3


def dense_hessian(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    names, shapes = zip(*[(n, p.shape) for n, p in model.named_parameters()], strict=True)
    sizes = [s.numel() for s in shapes]

    def loss(flat: torch.Tensor) -> torch.Tensor:
        parts = [part.view(shape) for part, shape in zip(flat.split(sizes), shapes, strict=True)]
        return nn.functional.cross_entropy(functional_call(model, dict(zip(names, parts, strict=True)), (x,)), y)

    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    return torch.autograd.functional.hessian(loss, flat)


def test_the_spectrum_of_a_small_net_equals_its_dense_hessians() -> None:
    model, x, y = net()
    H = hessian_vector_product(
        lambda p: nn.functional.cross_entropy(functional_call(model, dict(p), (x,)), y), dict(model.named_parameters())
    )
    exact = dense_hessian(model, x, y)
    assert H.size == len(exact)
    v = torch.randn(H.size, dtype=torch.float64, generator=rng())
    assert torch.allclose(H(v), exact @ v)
    found, _ = ritz(lanczos(H, H.size, H.size, rng()))
    assert torch.allclose(found, torch.linalg.eigvalsh(exact), atol=1e-6)
    assert all(p.grad is None for p in model.parameters())


def test_the_product_works_without_gradients_around_it_and_in_the_parameters_precision() -> None:
    with torch.no_grad():
        H = hessian_vector_product(
            lambda p: (p["w"] ** 4).sum() + p["b"].sum(), {"w": torch.ones(2), "b": torch.ones(1)}
        )
        assert torch.equal(H(torch.ones(3, dtype=torch.float64)), torch.tensor([12.0, 12.0, 0.0]))


def test_losses_without_curvature_or_without_a_parameter_have_zero_rows() -> None:
    linear = hessian_vector_product(lambda p: 3 * p["w"].sum(), {"w": torch.ones(2), "unused": torch.ones(2)})
    assert torch.equal(linear(torch.ones(4)), torch.zeros(4))
    with pytest.raises(ConfigError, match=r"shape \(2,\), expected a scalar"):
        hessian_vector_product(lambda p: p["w"], {"w": torch.ones(2)})


def test_a_spectrum_is_plain_tensors() -> None:
    seen = Spectrum(torch.tensor([[0.0, 1.0], [0.0, 3.0]]), torch.tensor([[0.5, 0.5], [0.9, 0.1]]))
    assert seen.share_below(0.5) == pytest.approx(0.7)

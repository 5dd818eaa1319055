import numpy as np
import pytest
import scipy.linalg
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedfuse.errors import ConfigError, NotConverged
from fedfuse.linalg import psd


def gram(d: int, rank: int, seed: int = 0) -> torch.Tensor:
    X = torch.randn(rank, d, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return X.T @ X / rank


@given(d=st.integers(1, 12), stack=st.integers(0, 3), seed=st.integers(0, 99))
def test_packing_loses_nothing_and_is_numpys_upper_triangle(d: int, stack: int, seed: int) -> None:
    A = psd.symmetrize(torch.randn(stack, d, d, generator=torch.Generator().manual_seed(seed)))
    packed = psd.pack(A)
    assert packed.shape == (stack, psd.packed_size(d))
    assert torch.equal(psd.unpack(packed, d), A)
    for one, flat in zip(A, packed, strict=True):
        assert np.array_equal(flat.numpy(), one.numpy()[np.triu_indices(d)])


def test_packing_keeps_the_dtype() -> None:
    assert psd.unpack(psd.pack(torch.eye(3, dtype=torch.float16)), 3).dtype == torch.float16


def test_wrong_sizes_are_explained() -> None:
    with pytest.raises(ConfigError, match=r"\(2, 3\), expected square"):
        psd.pack(torch.zeros(2, 3))
    with pytest.raises(ConfigError, match="expected 6 numbers for a symmetric 3 × 3"):
        psd.unpack(torch.zeros(5), 3)


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gram_matrices_are_psd_at_any_scale(scale: float, dtype: torch.dtype) -> None:
    X = torch.randn(5, 40, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert psd.is_psd((X.T @ X) * scale)
    assert not psd.is_psd(-(X.T @ X) * scale)


def test_the_tolerance_is_relative_to_the_frobenius_norm() -> None:
    for over, expected in ((0.99, True), (1.01, False)):
        d = torch.tensor([1.0, 1.0, 0.0]).double()
        d[2] = -over * 1e-3 * float(torch.tensor([1.0, 1.0, 1e-3]).norm())
        Q, _ = torch.linalg.qr(gram(3, 5))
        assert psd.is_psd(Q @ d.diag() @ Q.T, tol=1e-3) is expected


def test_borderline_singular_matrices_pass_through_the_eigenvalues() -> None:
    A = gram(50, 3)
    assert psd.is_psd(A, tol=1e-14)
    assert psd.is_psd(torch.zeros(4, 4), tol=0.0)
    assert psd.is_psd(torch.diag(torch.tensor([1.0, 0.0])), tol=0.0)


@pytest.mark.parametrize(
    "A",
    [
        torch.zeros(2, 3),
        torch.zeros(2),
        torch.tensor([[1.0, 0.5], [-0.5, 1.0]]),
        torch.tensor([[1.0, torch.nan], [torch.nan, 1.0]]),
        torch.tensor([[torch.inf, 0.0], [0.0, 1.0]]),
        torch.tensor([[1.0, 2.0], [2.0, 1.0]]),
    ],
    ids=["oblong", "vector", "skew", "nan", "inf", "indefinite"],
)
def test_what_is_not_psd_is_told_without_an_exception(A: torch.Tensor) -> None:
    assert not psd.is_psd(A)


def test_huge_entries_do_not_overflow() -> None:
    assert psd.is_psd(torch.eye(3, dtype=torch.float64) * 1e300)


@pytest.mark.parametrize("rank", [4, 30])
def test_inverse_equals_the_pseudo_inverse(rank: int) -> None:
    A = gram(12, rank)
    assert np.allclose(psd.inverse(A), scipy.linalg.pinvh(A.numpy()), rtol=1e-7, atol=1e-9)


def test_inverse_of_a_barely_factored_matrix_is_no_noise() -> None:
    A = gram(12, 4) + 1e-18 * torch.eye(12).double()
    assert float(psd.inverse(A).abs().max()) < 1e3


def test_solves_equal_numpy_for_vectors_and_matrices() -> None:
    A, b = gram(12, 30), torch.randn(12, 3, generator=torch.Generator().manual_seed(1)).double()
    assert np.allclose(psd.solve(A, b), np.linalg.solve(A.numpy(), b.numpy()))
    assert np.allclose(psd.solve(A, b[:, 0]), np.linalg.solve(A.numpy(), b[:, 0].numpy()))


def test_jitter_bridges_rounding_and_nothing_more() -> None:
    A = gram(20, 5)
    b = A @ torch.ones(20).double()
    assert torch.allclose(A @ psd.solve(A, b), b, rtol=1e-4)
    L = psd.cholesky(A)
    assert torch.allclose(L @ L.T, A, atol=1e-5)
    for wrong in (torch.diag(torch.tensor([1.0, -0.1])), torch.full((2, 2), torch.nan)):
        with pytest.raises(NotConverged, match=r"fc2: .*positive semi-definite"):
            psd.cholesky(wrong, what="fc2")


def test_shifting_leaves_the_original_alone() -> None:
    A = torch.zeros(2, 3, 3)
    assert torch.equal(psd.add_diagonal(A, 2.0), 2 * torch.eye(3).expand(2, 3, 3))
    assert not A.any()

"""The inverse of damped Kronecker sums by their high directions: exact where all are kept, near where most are."""

import pytest
import torch

from fedfuse.linalg import kron
from fedfuse.linalg.kron import SpikedInverse

CLIENTS, OUT, INN = 3, 8, 12


def spiked(size: int, rank: int, seed: int, rests: tuple[float, ...] = (0.1, 0.3, 0.2)) -> torch.Tensor:
    """One matrix per rest: so much along the diagonal, and a few directions far above it."""
    rng = torch.Generator().manual_seed(seed)
    X = torch.randn(len(rests), size, rank, dtype=torch.float64, generator=rng)
    heights = torch.logspace(1, 0, rank).double()
    turn = torch.linalg.qr(X).Q
    return (turn * heights) @ turn.mT + torch.tensor(rests).double()[:, None, None] * torch.eye(size)


def dense_sum(lefts: torch.Tensor, rights: torch.Tensor) -> torch.Tensor:
    """The operator on matrices laid flat, row by row."""
    return torch.stack([torch.kron(B, A) for B, A in zip(lefts, rights, strict=True)]).sum(0)


def dense_inverse(inverse: SpikedInverse) -> torch.Tensor:
    units = torch.eye(OUT * INN, dtype=torch.float64).view(-1, OUT, INN)
    return torch.stack([inverse(unit).flatten() for unit in units], 1)


def found(lefts: torch.Tensor, rights: torch.Tensor) -> SpikedInverse:
    inverse = SpikedInverse.of(lefts, rights)
    assert inverse is not None
    return inverse


def condition(lefts: torch.Tensor, rights: torch.Tensor) -> float:
    """The ratio of the extreme eigenvalues of the sum behind the inverse."""
    values = torch.linalg.eigvals(dense_inverse(found(lefts, rights)) @ dense_sum(lefts, rights)).real
    return float(values.max() / values.min())


def test_it_is_the_inverse_where_all_directions_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kron, "_LOW", 0.0)
    lefts, rights = spiked(OUT, 3, 1), spiked(INN, 5, 2)
    assert torch.allclose(dense_inverse(found(lefts, rights)), torch.linalg.inv(dense_sum(lefts, rights)), rtol=1e-6)


@pytest.fixture(autouse=True)
def _any_number_of_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kron, "_SHARE", 0.0)


@pytest.mark.parametrize("most", [0, 3, 20])
def test_it_is_symmetric_and_positive_whatever_is_kept(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr(kron, "_MOST", most)
    inverse = dense_inverse(found(spiked(OUT, 3, 1), spiked(INN, 5, 2)))
    assert torch.allclose(inverse, inverse.mT, rtol=1e-9, atol=1e-9)
    assert float(torch.linalg.eigvalsh(inverse).min()) > 0


def test_the_more_pairs_the_nearer(monkeypatch: pytest.MonkeyPatch) -> None:
    lefts, rights = spiked(OUT, 4, 1), spiked(INN, 6, 2)
    conditions = []
    for most in (0, 20, 60):
        monkeypatch.setattr(kron, "_MOST", most)
        conditions.append(condition(lefts, rights))
    assert conditions == sorted(conditions, reverse=True)
    assert 3 * conditions[-1] < conditions[0]


@pytest.mark.parametrize("rank", [3, 20])
def test_more_directions_are_found_where_the_first_are_not_all(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kron, "_HIGH", 3.0)
    found = kron._Spikes.of(spiked(100, rank, 1))
    assert found.vectors.shape[2] == (12 if rank < 12 else 24)
    assert torch.allclose(found.rests, torch.tensor([0.1, 0.3, 0.2]).double(), rtol=1e-3)
    assert torch.allclose(found.heights[:, -rank:], torch.logspace(0, 1, rank).double(), rtol=1e-3)


def test_factors_without_a_floor_leave_it_positive() -> None:
    rng = torch.Generator().manual_seed(0)
    X, Y = (torch.randn(CLIENTS, d, 2 * d, dtype=torch.float64, generator=rng) for d in (OUT, INN))
    falling = torch.logspace(0, -3, INN).double()[:, None]
    inverse = dense_inverse(found(X @ X.mT, (falling * Y) @ (falling * Y).mT))
    assert float(torch.linalg.eigvalsh((inverse + inverse.mT) / 2).min()) > 0


def test_factors_with_nothing_along_the_diagonal_have_none() -> None:
    rng = torch.Generator().manual_seed(0)
    x, y = (torch.randn(CLIENTS, d, 1, dtype=torch.float64, generator=rng) for d in (OUT, INN))
    assert SpikedInverse.of(x @ x.mT, y @ y.mT) is None


def test_factors_with_nothing_but_a_diagonal_need_no_pairs() -> None:
    lefts, rights = torch.eye(OUT).double().repeat(CLIENTS, 1, 1), 2 * torch.eye(INN).double().repeat(CLIENTS, 1, 1)
    inverse = found(lefts, rights)
    assert not len(inverse.pairs)
    assert torch.allclose(dense_inverse(inverse), torch.eye(OUT * INN).double() / (2 * CLIENTS))


def test_a_client_without_any_belief_is_no_trouble() -> None:
    lefts, rights = spiked(OUT, 3, 1), spiked(INN, 5, 2)
    lefts[1] = 0
    rest = [0, 2]
    assert torch.allclose(dense_inverse(found(lefts, rights)), dense_inverse(found(lefts[rest], rights[rest])))

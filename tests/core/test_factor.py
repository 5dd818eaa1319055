import torch

from fedfuse.linalg.factor import LowRank, as_stack, dense


def spiked(seed: int = 0, groups: tuple[int, ...] = (), d: int = 6, r: int = 2) -> LowRank:
    draw = torch.Generator().manual_seed(seed)
    vectors = torch.randn(*groups, d, r, dtype=torch.float64, generator=draw)
    return LowRank(
        vectors, torch.rand(*groups, r, generator=draw).double(), torch.rand(*groups, d, generator=draw).double()
    )


def test_every_answer_is_the_written_matrixs_own() -> None:
    for factor in (spiked(), LowRank.diagonal(torch.rand(6).double())):
        full = factor.dense()
        assert torch.allclose(factor.trace(), full.trace())
        assert torch.allclose(factor.norm(), full.norm())
        assert torch.allclose((factor * 3.0).dense(), 3 * full)
        assert torch.allclose(factor.plus(0.5).dense(), full + 0.5 * torch.eye(6))
        index = torch.tensor([4, 1, 0])
        assert torch.allclose(factor.reorder(index).dense(), full[index][:, index])
        assert len(factor) == 6
        assert factor.ndim == 2
        assert bool(factor.any())
        assert not bool((factor * 0.0).any())


def test_a_stack_is_its_matrices() -> None:
    stack = spiked(1, groups=(2,))
    assert stack.ndim == 3
    assert len(stack) == 2
    assert torch.allclose(dense(stack)[1], dense(stack[1]))
    index = torch.tensor([[4, 1], [0, 2]])
    moved = stack.reorder(index).dense()
    assert torch.allclose(moved[1], dense(stack[1])[index[1]][:, index[1]])
    assert torch.allclose(dense(as_stack(stack[0])), dense(stack)[:1])
    assert as_stack(stack) is stack
    assert as_stack(torch.eye(2)).shape == (1, 2, 2)


def test_leading_eigenpairs_and_one_number_for_the_rest() -> None:
    values, vectors = torch.linalg.eigh(spiked(3, r=6).dense())
    factor = LowRank.leading(vectors[:, -2:], values[-2:], values[:-2].mean())
    found = torch.linalg.eigvalsh(factor.dense())
    assert torch.allclose(found[-2:], values[-2:])
    assert torch.allclose(found[:-2], values[:-2].mean().expand(4))
    assert torch.allclose(factor.trace(), values.sum())

"""`block_width`: factors of wide layers as blocks along their diagonals, from client through door to solver."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fedfuse
from fedfuse.errors import RecipeError
from fedfuse.linalg.factor import BlockDiagonal, dense
from fedfuse.linalg.kron import damp, natural_mean
from fedfuse.nets.kronecker import read_factor
from fedfuse.wire.codec import decode
from fedfuse.wire.messages import split


class Odd(nn.Module):
    """A convolution of groups, a linear layer and an attention: what a wide network has."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, 4, 3, groups=2)
        self.attend = nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4 * 6, 3)

    def forward(self, x: Tensor) -> Tensor:
        z = self.conv(x).mT
        answer: Tensor = self.head(self.attend(z, z, z, need_weights=False)[0].flatten(1))
        return answer


def updates(method: str, **options: object) -> list[fedfuse.Update]:
    found = []
    for seed in range(3):
        torch.manual_seed(seed)
        net, rows = Odd(), (torch.randn(40, 4, 8), torch.arange(40) % 3)
        recipe = fedfuse.recipe(method, min_rows=1, **options)
        found.append(fedfuse.bring_evidence(net, rows, recipe, client=f"c{seed}"))
    return found


def notes_of(update: fedfuse.Update) -> dict[str, Tensor]:
    return {n: t.clone() for n, t in split(decode(update.payload))[1].items()}


@pytest.mark.parametrize("method", ["regmean", "fedlpa"])
def test_what_is_sent_are_the_blocks_of_the_whole_factor(method: str) -> None:
    whole, cut = notes_of(updates(method)[0]), notes_of(updates(method, block_width=5)[0])
    A, part = read_factor(whole, "kron/head/in"), read_factor(cut, "kron/head/in")
    assert isinstance(A, Tensor)
    assert isinstance(part, BlockDiagonal)
    assert part.sizes == (5, 5, 5, 5, 5)
    torch.testing.assert_close(part.dense(), BlockDiagonal.of(A, 5).dense(), rtol=1e-5, atol=1e-6)
    assert sum(t.numel() for t in cut.values()) < sum(t.numel() for t in whole.values())
    grouped = read_factor(cut, "kron/conv/in")
    assert grouped is not None
    assert dense(grouped).shape == (2, 7, 7)


def test_fedlpa_solves_the_equation_of_the_blocks() -> None:
    sent = updates("fedlpa", block_width=5, scale="none", damping=0.1)
    fused = fedfuse.fuse(
        sent, fedfuse.recipe("fedlpa", block_width=5, scale="none", damping=0.1, tol=1e-12)
    ).state_dict()
    Ms = [torch.cat([u.state_dict()["head.weight"], u.state_dict()["head.bias"][:, None]], 1).double() for u in sent]
    pairs = [[read_factor(notes_of(u), f"kron/head/{side}") for side in ("in", "out")] for u in sent]
    damped = [damp(dense(A).double(), dense(B).double(), 0.1, "trace") for A, B in pairs]
    expected = natural_mean(Ms, [A for A, _ in damped], [B for _, B in damped], [1, 1, 1], tol=1e-12).x
    found = torch.cat([fused["head.weight"], fused["head.bias"][:, None]], 1).double()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_regmean_solves_the_regression_of_the_blocks() -> None:
    sent = updates("regmean", block_width=5)
    fused = fedfuse.fuse(sent, fedfuse.recipe("regmean", block_width=5, alpha=1.0)).state_dict()
    total = right = torch.zeros((), dtype=torch.float64)
    for u in sent:
        A = dense(read_factor(notes_of(u), "kron/head/in")).double()
        M = torch.cat([u.state_dict()["head.weight"], u.state_dict()["head.bias"][:, None]], 1).double()
        total, right = total + A, right + M @ A
    found = torch.cat([fused["head.weight"], fused["head.bias"][:, None]], 1).double()
    torch.testing.assert_close(found, torch.linalg.solve(total, right.mT).mT, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", ["regmean", "fedlpa"])
def test_a_width_that_nothing_exceeds_changes_no_byte(method: str) -> None:
    plain, wide = (updates(method, **options)[0] for options in ({}, {"block_width": 1000}))
    assert {n: t.tolist() for n, t in notes_of(plain).items()} == {n: t.tolist() for n, t in notes_of(wide).items()}


def test_blocks_that_are_no_moments_are_refused_and_few_rows_tell_sizes() -> None:
    recipe = fedfuse.recipe("regmean", block_width=5, min_rows=1)
    sent = updates("regmean", block_width=5)
    packet = decode(sent[0].payload)
    spoiled = {n: -t if n.endswith("head/in/block1") else t for n, t in packet.tensors.items()}
    from fedfuse.wire.codec import encode

    bad = fedfuse.Update("bad", encode(spoiled, packet.header), spec=sent[0].spec)
    refused = fedfuse.fuse([bad, *sent[1:]], recipe).refused
    assert refused[0]["field"] == "kron/head/in"
    with pytest.raises(RecipeError, match="two ways to make factors small"):
        fedfuse.recipe("fedlpa", rank=2, block_width=5)
    net = Odd()
    few = fedfuse.bring_evidence(
        net, (torch.randn(4, 4, 8), torch.arange(4) % 3), fedfuse.recipe("regmean", block_width=5)
    )
    A = dense(read_factor(notes_of(few), "kron/head/in"))
    torch.testing.assert_close(A, A[0, 0] * torch.eye(25))

"""A pull by curvature: what a client's rows did not see, the others' did."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from fedfuse.core.factor import BlockDiagonal, Factor, LowRank, dense
from fedfuse.core.precision import in_full
from fedfuse.core.seams import Batch, Objective, TaskLoss
from fedfuse.core.state import Local, entries_of
from fedfuse.nets.blocks import Block, blocks_of
from fedfuse.nets.factors import SIDES, read_factor
from fedfuse.wire.codec import forms_of


class _Gap(NamedTuple):
    """A layer's global factors less the client's own, stacked over its groups, and where it began."""

    block: Block
    A: Tensor
    B: Tensor
    start: Tensor


@dataclass(frozen=True, slots=True)
class PosteriorPull:
    """FedLPA beyond the first round: base + η Σ_layers max(0, ½ ⟨D, (B − B_k) D (A − A_k)⟩), D = M − M_global.

    A, B are the cohort's mean factors, which the server publishes, and A_k, B_k the client's own from its last round:
    moving is dear along directions that matter to others and not to the client's own rows. A layer's term counts only
    while it is positive, for a difference of curvatures can be of either sign. Until both are known, which is in
    every client's first round, the loss is exactly the base's.

    Attributes:
        eta: η; the released code has 1.
        base: the loss without the pull.
    """

    eta: float
    base: Objective = field(default_factory=TaskLoss)

    def __call__(self, local: Local, batch: Batch) -> Tensor:
        """The base loss and the pull."""
        loss = self.base(local, batch)
        gaps = local.once("kron gaps", _gaps)
        if not gaps or self.eta == 0:
            return loss
        return loss + self.eta / 2 * torch.stack([_pull(gap, local) for gap in gaps]).clamp(min=0).sum()


def _pull(gap: _Gap, local: Local) -> Tensor:
    away = in_full(gap.block.matrices(local.live)) - gap.start
    inner = gap.B @ away
    return (away * (inner * gap.A[:, None] if gap.block.has_diagonal_inputs else inner @ gap.A)).sum()


def _gaps(local: Local) -> list[_Gap]:
    theirs, mine = entries_of(local.brief.memory, "kron"), local.recall("kron")
    known = [b for b in blocks_of(local.brief.spec) if _is_known(b, theirs, local) and _is_known(b, mine, local)]
    return [_gap(block, theirs, mine, local) for block in known]


def _is_known(block: Block, factors: dict[str, Tensor], local: Local) -> bool:
    """Whether there are factors of this layer as it is now: after a pruning there are none of its size."""
    if not local.live.keys() >= set(block.tensors):
        return False
    sizes = zip(SIDES, block.sizes(forms_of(local.brief.params)), strict=True)
    return all(_size(read_factor(factors, f"{block.name}/{side}")) == size for side, size in sizes)


def _size(factor: Factor | None) -> int:
    if factor is None:
        return 0
    if isinstance(factor, BlockDiagonal):
        return sum(factor.sizes)
    return factor.rest.shape[-1] if isinstance(factor, LowRank) else factor.shape[-1]


def _gap(block: Block, theirs: dict[str, Tensor], mine: dict[str, Tensor], local: Local) -> _Gap:
    start = in_full(block.matrices(local.anchor))
    A, B = (_difference(theirs, mine, f"{block.name}/{side}").to(start) for side in SIDES)
    return _Gap(block, A, B, start)


def _difference(theirs: dict[str, Tensor], mine: dict[str, Tensor], path: str) -> Tensor:
    """The global factor less the client's own, stacked over groups; of diagonals, the diagonal."""
    known = [read_factor(factors, path) for factors in (theirs, mine)]
    if all(isinstance(f, LowRank) and f.is_diagonal for f in known):
        first, second = (f.rest.double() for f in known if isinstance(f, LowRank))
        return (first - second).reshape(-1, first.shape[-1])
    first, second = (dense(f).double() for f in known if f is not None)
    return (first - second).reshape(-1, *first.shape[-2:])

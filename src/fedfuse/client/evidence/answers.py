"""What a client's own layer answers to what the layers fused so far let it read: sums for RegMean++."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from fedfuse.client.evidence.inputs import input_factors
from fedfuse.client.evidence.moments import Moments
from fedfuse.client.memory import KeepModel
from fedfuse.core.effort import Effort
from fedfuse.core.factor import as_stack
from fedfuse.core.messages import Brief, Flaw, Form
from fedfuse.core.params import Params
from fedfuse.core.seams import ClientMemory, PlainEvidence
from fedfuse.core.state import Local
from fedfuse.linalg.psd import pack, packed_size
from fedfuse.linalg.ridge import shrink_moments
from fedfuse.linalg.subspace import times
from fedfuse.nets.factors import find_flaw, mean_eigenvalue_of
from fedfuse.nets.turns import block_in_turn
from fedfuse.wire.codec import forms_of

KIND = "layer"
_IN, _ANSWERS = f"{KIND}/in", f"{KIND}/answers"


@dataclass(frozen=True, slots=True)
class LayerAnswers(PlainEvidence):
    """Ã = α A + (1 − α) diag(A) and M_k Ã of the layer whose turn it is, and at the head its `Moments`.

    A = Σ a aᵀ / N is of what the layer reads in the network of the brief, whose lower layers are fused already; M_k is
    the client's own layer, as it was trained. A client that has none answers by the brief's. Both are means over
    rows, so sums over clients suffice.

    Attributes:
        head: what is brought at the last layer.
        alpha: what A's off-diagonals are multiplied by.
        batch: rows per pass.
    """

    head: Moments = field(default_factory=Moments)
    alpha: float = 0.9
    batch: int = 256
    name: ClassVar[str] = "moments"
    recalls: ClassVar[tuple[ClientMemory, ...]] = (KeepModel(),)
    needs_one_target: ClassVar[bool] = True

    @property
    def reveals(self) -> str:
        """The head's, and one layer's in each exchange before."""
        return (
            "second moments of what every layer reads and their products with the client's own layer, averaged over "
            f"its rows; at the last layer {self.head.reveals}"
        )

    def __call__(self, local: Local) -> Params:
        """The layer's moments and answers at the brief's weights."""
        block = block_in_turn(local.brief.spec, local.brief.memory, self.head.layer)
        if block is None:
            return self.head(local)
        A = as_stack(input_factors(local.module, [block], local.rows.x, self.batch)[block.name])
        shrunk = torch.stack([shrink_moments(A[group], self.alpha) for group in range(block.groups)])
        own = {n: local.recall("last").get(n, local.module.state_dict()[n]) for n in block.tensors}
        layers = block.matrices({n: t.detach() for n, t in own.items()}).to(shrunk)
        answers = torch.stack([times(M, a) for M, a in zip(layers, shrunk, strict=True)])
        return {**_pack_moments(shrunk, block.has_diagonal_inputs), _ANSWERS: answers.float().cpu()}

    def passes(self, effort: Effort) -> float:
        """A pass forward; the products of one layer are few beside it."""
        return self.head.passes(effort)

    def expects(self, brief: Brief) -> Mapping[str, Form]:
        """A triangle and a matrix per group, or the head's."""
        block = block_in_turn(brief.spec, brief.memory, self.head.layer)
        if block is None:
            return self.head.expects(brief)
        inn, out = block.sizes(forms_of(brief.params))
        form = {f"{_IN}/diagonal": inn} if block.has_diagonal_inputs else {_IN: packed_size(inn)}
        moments = {name: Form((block.groups, size), torch.float32) for name, size in form.items()}
        return {**moments, _ANSWERS: Form((block.groups, out, inn), torch.float32)}

    def check(self, notes: Params, num_examples: float) -> Flaw | None:
        """Moments are positive semi-definite with a bounded trace; at the head what `Moments` says."""
        return find_flaw(notes, _IN) if _ANSWERS in notes else self.head.check(notes, num_examples)

    def influence(self, notes: Params) -> Mapping[str, float]:
        """The mean eigenvalue of the moments, by which the answers are scaled too."""
        return {KIND: mean_eigenvalue_of(notes, _IN)} if _ANSWERS in notes else self.head.influence(notes)


def _pack_moments(moments: Tensor, diagonal: bool) -> dict[str, Tensor]:
    """Moments as they travel: triangles in float32, or diagonals."""
    return {f"{_IN}/diagonal": moments.float().cpu()} if diagonal else {_IN: pack(moments.float()).cpu()}

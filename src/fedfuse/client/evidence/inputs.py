"""Second moments of what every layer reads: half of the Kronecker factors, and no label or gradient is needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from fedfuse.client.evidence.kfac import even_out, too_few_rows
from fedfuse.client.moments import input_moments
from fedfuse.client.recording import record_calls
from fedfuse.core.effort import Effort
from fedfuse.core.factor import Factor, LowRank
from fedfuse.core.messages import Brief, Flaw, Form
from fedfuse.core.params import Params
from fedfuse.core.posterior import Geometry, Kron
from fedfuse.core.seams import PlainEvidence
from fedfuse.core.state import Local
from fedfuse.nets.blocks import Block, Which, mixing_blocks
from fedfuse.nets.cost import layer_costs
from fedfuse.nets.factors import Packing, factors_in, find_flaw, layers_in, mean_eigenvalue_of
from fedfuse.wire.codec import forms_of

_PACKING = Packing(outputs=False)


@torch.no_grad()
def input_factors(module: nn.Module, blocks: Sequence[Block], x: Tensor, batch: int = 256) -> dict[str, Factor]:
    """A = Σ a aᵀ / N of every block over N rows, a being what it reads with a 1 for its bias, in one pass forward.

    Positions of a convolution or a sequence are summed. A block that is used several times counts every use, one that
    is not used at all has a factor of zeros.

    Args:
        module: the network, in evaluation mode.
        blocks: which layers; norms have no inputs to mix and must not be among them.
        x: the rows' inputs.
        batch: rows per pass.

    Returns:
        Per layer A, stacked over its groups, float64; of an embedding a diagonal, how often each token occurs per row.

    Example:
        >>> net = nn.Linear(2, 2, bias=False)
        >>> input_factors(net, [Block("weight", "linear", "weight")], torch.tensor([[1.0, 2.0]]))["weight"].tolist()
        [[[1.0, 2.0], [2.0, 4.0]]]
    """
    forms = {n: Form.of(t) for n, t in module.state_dict().items()}
    sums: dict[str, Tensor] = {}
    for block in blocks:
        size = (block.sizes(forms)[0],) * (1 if block.has_diagonal_inputs else 2)
        sums[block.name] = torch.zeros(block.groups, *size, dtype=torch.float64, device=x.device)
    with record_calls(module, blocks) as calls:
        for part in x.split(batch):
            calls.clear()
            module(part)
            for call in calls:
                where = slice(None) if call.group is None else slice(call.group, call.group + 1)
                moments = input_moments(call.module, call.x, call.block.bias is not None)
                sums[call.block.name][where].add_(moments)
    means = {name: total / len(x) for name, total in sums.items()}
    return {b.name: LowRank.diagonal(means[b.name]) if b.has_diagonal_inputs else means[b.name] for b in blocks}


@dataclass(frozen=True, slots=True)
class InputFactors(PlainEvidence):
    """The input factor A of every layer that mixes what it reads, beside an output factor B = I.

    Attributes:
        layers: "all", or "plain": linear layers and convolutions alone.
        min_rows: a client with fewer rows sends no directions, only how large its factors are; None for twice the
            batch it trains with.
        batch: rows per pass.
    """

    layers: Which = "all"
    min_rows: int | None = None
    batch: int = 256
    name: ClassVar[str] = "kron"
    weighs: ClassVar[bool] = True
    reveals: ClassVar[str] = (
        "second moments of every layer's inputs and the mean input of every layer with a bias, averaged over the "
        "client's rows; an embedding's tell how often each token occurs"
    )

    def __call__(self, local: Local) -> Params:
        """One pass forward over the rows with the trained weights."""
        blocks = mixing_blocks(local.brief.spec, self.layers)
        inputs = input_factors(local.module, blocks, local.rows.x, self.batch)
        if too_few_rows(local, self.min_rows):
            inputs = {layer: even_out(A) for layer, A in inputs.items()}
        forms = forms_of(local.brief.params)
        notes: dict[str, Tensor] = {}
        for block in blocks:
            identity = LowRank.diagonal(torch.ones(block.groups, block.sizes(forms)[1]))
            notes |= _PACKING.notes(block, (inputs[block.name], identity))
        return notes

    def passes(self, effort: Effort) -> float:
        """A pass forward, and the products of A: d² for d d′."""
        costs = layer_costs(effort.spec, effort.shape)
        forms = {n: Form.of(t) for n, t in effort.spec.skeleton().state_dict().items()}
        blocks = [b for b in mixing_blocks(effort.spec, self.layers) if b.name in costs]
        moments = sum(costs[b.name].positions * b.groups * b.sizes(forms)[0] ** 2 for b in blocks)
        return 1 + moments / max(1, sum(cost.products for cost in costs.values()))

    def expects(self, brief: Brief) -> Mapping[str, Form]:
        """A triangle per layer, and a row of ones."""
        forms = forms_of(brief.params)
        wanted: dict[str, Form] = {}
        for block in mixing_blocks(brief.spec, self.layers):
            wanted |= _PACKING.forms(block, forms)
        return wanted

    def check(self, notes: Params, num_examples: float) -> Flaw | None:  # noqa: ARG002 - the seam's signature
        """Input factors are positive semi-definite with a bounded trace; output factors are the identity."""
        for layer in layers_in(notes):
            if flaw := find_flaw(notes, f"kron/{layer}/in"):
                return flaw
            ones = notes[f"kron/{layer}/out/diagonal"]
            if not bool((ones == 1).all()):
                return Flaw(f"kron/{layer}/out/diagonal", f"{float(ones.min()):g} to {float(ones.max()):g}", "ones")
        return None

    def geometry(self, notes: Params) -> Geometry | None:
        """Kronecker factors with the identity on the outputs' side."""
        return Kron(factors_in(notes))

    def influence(self, notes: Params) -> Mapping[str, float]:
        """The mean eigenvalue of every input factor: whoever's inputs are larger determines more of the layer."""
        return {path: mean_eigenvalue_of(notes, path) for path in (f"kron/{layer}/in" for layer in layers_in(notes))}

"""Second moments of what every layer reads: half of the Kronecker factors, and no label or gradient is needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, TypeVar

import torch
from torch import Tensor, nn

from fedfuse.client.kfac import even_out, too_few_rows
from fedfuse.client.recording import record_calls
from fedfuse.client.second_moments import run_moments
from fedfuse.core.messages import Brief, Flaw, Form
from fedfuse.core.params import Params
from fedfuse.core.posterior import Geometry, Kron
from fedfuse.core.seams import Effort, PlainEvidence
from fedfuse.core.spec import Spec
from fedfuse.core.state import Local
from fedfuse.linalg.factor import BlockDiagonal, Factor, LowRank, block_sizes
from fedfuse.models.adapted import INPUTS, pairs_in
from fedfuse.nets.cost import layer_costs
from fedfuse.nets.kronecker import (
    Block,
    Packing,
    Which,
    factors_in,
    find_flaw,
    layers_in,
    mean_eigenvalue_of,
    mixing_blocks,
)
from fedfuse.wire.codec import forms_of

T = TypeVar("T")


@torch.no_grad()
def input_factors(
    module: nn.Module, blocks: Sequence[Block], x: Tensor, batch: int = 256, width: int | None = None
) -> dict[str, Factor]:
    """A = Σ a aᵀ / N of every block over N rows, a being what it reads with a 1 for its bias, in one pass forward.

    Positions of a convolution or a sequence are summed. A block that is used several times counts every use, one that
    is not used at all has a factor of zeros.

    Args:
        module: the network, in evaluation mode.
        blocks: which layers; norms have no inputs to mix and must not be among them.
        x: the rows' inputs.
        batch: rows per pass.
        width: of a layer that reads more numbers, the moments within runs of at most so many.

    Returns:
        Per layer A, stacked over its groups, float64; of an embedding a diagonal, how often each token occurs per row.

    Example:
        >>> net = nn.Linear(2, 2, bias=False)
        >>> input_factors(net, [Block("weight", "linear", "weight")], torch.tensor([[1.0, 2.0]]))["weight"].tolist()
        [[[1.0, 2.0], [2.0, 4.0]]]
    """
    forms = {n: Form.of(t) for n, t in module.state_dict().items()}
    runs: dict[str, tuple[int, ...]] = {}
    sums: dict[str, list[Tensor]] = {}
    for block in blocks:
        size = block.sizes(forms)[0]
        runs[block.name] = (size,) if width is None or block.has_diagonal_inputs else block_sizes(size, width)
        sides = 1 if block.has_diagonal_inputs else 2
        shapes = [(block.groups, *[run] * sides) for run in runs[block.name]]
        sums[block.name] = [torch.zeros(shape, dtype=torch.float64, device=x.device) for shape in shapes]
    with record_calls(module, blocks) as calls:
        for part in x.split(batch):
            calls.clear()
            module(part)
            for call in calls:
                where = slice(None) if call.group is None else slice(call.group, call.group + 1)
                name, one = call.block.name, call.block.bias is not None
                for total, moments in zip(sums[name], run_moments(call.module, call.x, one, runs[name]), strict=True):
                    total[where].add_(moments)
    found: dict[str, Factor] = {}
    for block in blocks:
        parts = [total / len(x) for total in sums[block.name]]
        if block.has_diagonal_inputs:
            found[block.name] = LowRank.diagonal(parts[0])
        else:
            found[block.name] = parts[0] if len(parts) == 1 else BlockDiagonal(tuple(parts))
    return found


@dataclass(frozen=True, slots=True)
class InputFactors(PlainEvidence):
    """The input factor A of every layer that mixes what it reads, with an output factor B = I.

    Attributes:
        layers: "all", or "plain": linear layers and convolutions alone.
        min_rows: a client with fewer rows sends no directions, only how large its factors are; None for twice the
            batch it trains with.
        batch: rows per pass.
        width: of a layer that reads more numbers, blocks of at most so many along its factor's diagonal; None for all.
    """

    layers: Which = "all"
    min_rows: int | None = None
    batch: int = 256
    width: int | None = None
    name: ClassVar[str] = "kron"
    weighs: ClassVar[bool] = True
    reveals: ClassVar[str] = (
        "second moments of every layer's inputs and the mean input of every layer with a bias, averaged over the "
        "client's rows; an embedding's tell how often each token occurs"
    )

    @property
    def _packing(self) -> Packing:
        return Packing(outputs=False, width=self.width)

    def blocks(self, spec: Spec) -> Sequence[Block]:
        """The layers whose inputs are looked at."""
        return mixing_blocks(spec, self.layers)

    def __call__(self, local: Local) -> Params:
        """One pass forward over the rows with the trained weights."""
        return self.notes_of(local, self.blocks(local.brief.spec))

    def notes_of(self, local: Local, blocks: Sequence[Block]) -> dict[str, Tensor]:
        """What is sent of some layers; of few rows no more than how large their factors are."""
        inputs = input_factors(local.module, blocks, local.rows.x, self.batch, self.width)
        if too_few_rows(local, self.min_rows):
            inputs = {layer: even_out(A) for layer, A in inputs.items()}
        forms = forms_of(local.brief.params)
        notes: dict[str, Tensor] = {}
        for block in blocks:
            identity = LowRank.diagonal(torch.ones(block.groups, block.sizes(forms)[1]))
            notes |= self._packing.notes(block, (inputs[block.name], identity))
        return notes

    def passes(self, effort: Effort) -> float:
        """A pass forward, and the products of A: d² for d d′."""
        return self.passes_for(effort, self.blocks(effort.spec))

    def passes_for(self, effort: Effort, blocks: Sequence[Block]) -> float:
        """The same for some layers."""
        costs = layer_costs(effort.spec, effort.shape)
        forms = {n: Form.of(t) for n, t in effort.spec.skeleton().state_dict().items()}
        known = [b for b in blocks if b.name in costs]
        moments = sum(costs[b.name].positions * b.groups * b.sizes(forms)[0] ** 2 for b in known)
        return 1 + moments / max(1, sum(cost.products for cost in costs.values()))

    def expects(self, brief: Brief) -> Mapping[str, Form]:
        """A triangle per layer, and a row of ones."""
        return self.forms_of_notes(brief, self.blocks(brief.spec))

    def forms_of_notes(self, brief: Brief, blocks: Sequence[Block]) -> dict[str, Form]:
        """What the notes of some layers look like."""
        forms = forms_of(brief.params)
        return {name: form for block in blocks for name, form in self._packing.forms(block, forms).items()}

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
        """The mean eigenvalue of every input factor: a client with larger inputs determines more of the layer."""
        return {path: mean_eigenvalue_of(notes, path) for path in (f"kron/{layer}/in" for layer in layers_in(notes))}


@dataclass(frozen=True, slots=True)
class AdapterInputs(PlainEvidence):
    """What modules with a low-rank adapter read: the moments of the inputs of its factor A, and nothing else.

    Attributes:
        of: how moments are taken and sent.
    """

    of: InputFactors = field(default_factory=InputFactors)
    name: ClassVar[str] = INPUTS
    weighs: ClassVar[bool] = True
    reveals: ClassVar[str] = (
        "second moments of the inputs of every layer that has an adapter, averaged over the client's rows"
    )

    def blocks(self, spec: Spec) -> Sequence[Block]:
        """The factors A."""
        firsts = {pair.a for pair in pairs_in(spec.layout.roles)}
        return [block for block in self.of.blocks(spec) if block.weight in firsts]

    def __call__(self, local: Local) -> Params:
        """One pass forward over the rows with the trained weights."""
        return _input_sides(self.of.notes_of(local, self.blocks(local.brief.spec)))

    def passes(self, effort: Effort) -> float:
        """A pass forward, and the products of A."""
        return self.of.passes_for(effort, self.blocks(effort.spec))

    def expects(self, brief: Brief) -> Mapping[str, Form]:
        """A triangle per adapted layer."""
        return _input_sides(self.of.forms_of_notes(brief, self.blocks(brief.spec)))

    def check(self, notes: Params, num_examples: float) -> Flaw | None:  # noqa: ARG002 - the seam's signature
        """Moments are positive semi-definite with a bounded trace."""
        return next((flaw for path in _paths(notes) if (flaw := find_flaw(notes, path))), None)

    def influence(self, notes: Params) -> Mapping[str, float]:
        """The mean eigenvalue of every layer's moments: a client with larger inputs decides more of what is lost."""
        return {path: mean_eigenvalue_of(notes, path) for path in _paths(notes)}


def _input_sides(found: Mapping[str, T]) -> dict[str, T]:
    """What stands under "kron/LAYER/in", as "inputs/LAYER/in"."""
    split = {name: name.split("/") for name in found}
    return {"/".join([INPUTS, *split[name][1:]]): value for name, value in found.items() if split[name][2] == "in"}


def _paths(notes: Params) -> tuple[str, ...]:
    return tuple(dict.fromkeys("/".join(name.split("/")[:3]) for name in notes if name.startswith(f"{INPUTS}/")))

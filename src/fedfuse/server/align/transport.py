"""Transporting units: OTFusion's layer-by-layer maps, between networks of any widths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedfuse.core.state import Bench
from fedfuse.errors import ConfigError
from fedfuse.linalg.assign import match, sinkhorn
from fedfuse.nets.channels import Group
from fedfuse.server.align.activations import Inputs, check_rows, cross_moments, probes
from fedfuse.server.align.nets import Coupling, Move, Moves, Net, blend_units, diagonal_blocks
from fedfuse.server.align.weights import PAIRWISE_LAWS, wiring

Ground = Literal["weights", "activations"]
Reading = Literal["conserve", "average"]


@dataclass(frozen=True, slots=True)
class ByTransport:
    """Transport a network's units onto the reference's, layer by layer from the input (Singh and Jaggi 2020).

    With uniform masses on both sides and ground cost C the plan Π minimizes ⟨Π, C⟩, or ⟨Π, C⟩ − reg · entropy. New
    unit i is Σ_j Π_ij / Π_i· of the old ones; what read old unit j now reads new unit i with weight Π_ij / Π_·j of
    its own, so that units which merge are read by what both were read. Between equal widths the exact plan is a
    permutation, the assignment of least cost, and carries any geometry along.

    Attributes:
        reg: the entropic temperature as a share of the mean cost; 0 is exact.
        ground: the distance between the "weights" with which units are wired to the layer before (with biases and
            norms), or between their "activations".
        reading: "conserve" as above; "average" reads with Π_ij / Π_i·, as the paper's eq. 4 has it, which halves a
            layer that reads units merged in pairs. Between equal widths they are the same.
        inputs: for activations: the "server"'s rows, "synthetic" noise, or "auto" for rows where there are any.
        rows: for activations: how many inputs at most.
    """

    reg: float = 0.0
    ground: Ground = "weights"
    reading: Reading = "conserve"
    inputs: Inputs = "auto"
    rows: int = 256
    any_width: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not self.reg >= 0:
            raise ConfigError(f"transport: reg is {self.reg}, expected 0 for exact plans or a temperature above 0")
        check_rows(self.rows)

    @property
    def laws(self) -> frozenset[str]:
        """A blurred plan moves even agreeing clients."""
        return PAIRWISE_LAWS - (frozenset({"agree"}) if self.reg else frozenset())

    @property
    def needs(self) -> frozenset[str]:
        """Rows, where the user insists on them."""
        insists = self.ground == "activations" and self.inputs == "server"
        return frozenset({"server_rows"}) if insists else frozenset()

    def __call__(self, nets: Sequence[Net], reference: Net, bench: Bench) -> list[Moves]:
        """An order, or a coupling, for every group of every network."""
        x = probes(reference, bench, self.inputs, self.rows) if self.ground == "activations" else None
        return [self.transport(reference, net, x) for net in nets]

    def transport(self, reference: Net, net: Net, x: Tensor | None = None) -> Moves:
        """The maps of one network's units onto the reference's."""
        moments = None if x is None else cross_moments(reference, net, x)
        target, tensors = reference.matched_tensors(), net.matched_tensors()
        moves: dict[str, Move] = {}
        for theirs, ours in zip(reference.groups, net.groups, strict=True):
            if moments is None:
                cost = _distance(theirs, target, ours, tensors, net.groups, moves)
            elif moments[ours.name].count:
                cost = moments[ours.name].distance()
            else:
                raise ConfigError(
                    f"transport by activations: no linear layer or convolution makes the units of {ours.name!r}, so "
                    'their activations cannot be watched; set ground = "weights"'
                )
            moves[ours.name] = self._move(cost, theirs, f"transport of {ours.name} of {net.client}")
        return moves

    def _move(self, cost: Tensor, theirs: Group, what: str) -> Move:
        """What becomes of the units of one group, section by section."""
        blocks = diagonal_blocks(cost, theirs.sections)
        if cost.shape[0] == cost.shape[1] and self.reg == 0:
            return torch.cat([k * len(block) + match(block).cols for k, block in enumerate(blocks)])
        plans = [self.plan(block, what) for block in blocks]
        make = torch.block_diag(*(p / p.sum(1, keepdim=True) for p in plans))
        conserved = torch.block_diag(*(p / p.sum(0) for p in plans))
        return Coupling(make, conserved if self.reading == "conserve" else make)

    def plan(self, cost: Tensor, what: str = "transport") -> Tensor:
        """The plan of least cost between uniform masses, (new × old)."""
        if self.reg:
            scale = float(cost.mean()) or 1.0
            return sinkhorn(cost, reg=self.reg * scale, tol=1e-6, what=what).plan
        return exact_plan(cost)


def exact_plan(cost: Tensor) -> Tensor:
    """The exact transport plan between uniform masses.

    Example:
        >>> exact_plan(torch.tensor([[0.0, 0.0, 9.0, 9.0], [9.0, 9.0, 0.0, 0.0]]))
        tensor([[0.2500, 0.2500, 0.0000, 0.0000],
                [0.0000, 0.0000, 0.2500, 0.2500]], dtype=torch.float64)
    """
    try:
        import ot
    except ImportError as why:
        raise ConfigError(
            "exact transport between unequal widths needs the package POT; install fedfuse[match], or set reg"
        ) from why
    table = cost.double().cpu().numpy()
    masses = [torch.full((size,), 1 / size, dtype=torch.float64).numpy() for size in table.shape]
    return torch.from_numpy(ot.emd(*masses, table))


def _distance(
    theirs: Group,
    target: Mapping[str, Tensor],
    ours: Group,
    tensors: Mapping[str, Tensor],
    groups: tuple[Group, ...],
    settled: Moves,
) -> Tensor:
    """Euclidean distances between units by how they are wired to what is settled already."""
    squares = torch.zeros(theirs.size, ours.size, dtype=torch.float64)
    for there, here in zip(theirs.makers, ours.makers, strict=True):
        adjacent = {name for _, name in wiring(groups)[ours.name][here]}
        if here.tensor in tensors and adjacent.issubset(settled):
            moved = blend_units({here.tensor: tensors[here.tensor]}, groups, {name: settled[name] for name in adjacent})
            a, b = there.rows(target, theirs.size).double(), here.rows(moved, ours.size).double()
            squares += torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist").square()
    return squares.sqrt()

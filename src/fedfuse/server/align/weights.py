"""Matching units by their weights: who is wired alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedfuse.core.state import Bench
from fedfuse.errors import ConfigError
from fedfuse.server.align.nets import Moves, Net
from fedfuse.server.align.weight_matching import WeightMatching

_MEMORY = 1 << 24  # numbers of all networks that are moved about at once

PAIRWISE_LAWS = frozenset({"one", "agree", "scale", "pure", "dtype", "finite", "repeat"})


@dataclass(frozen=True, slots=True)
class ByWeights:
    """Put every unit where the reference has the unit wired most like it.

    Over orders P of all groups at once, the inner product Σ_t ⟨reference_t, (P network)_t⟩ is raised group by group,
    each by an exact assignment with the others fixed, until none can raise it: a fixed point over layers, equal to a
    local minimum of ‖reference − P network‖². It begins with a pass that matches each layer by what it reads, or with
    the order as it is where that is nearer, so the distance never grows (Ainsworth et al., "Git Re-Basin", 2023,
    algorithm 1).

    Attributes:
        sweeps: passes over all groups before it stops; a fixed point is usually there after three to ten.
    """

    sweeps: int = 50
    any_width: ClassVar[bool] = False
    laws: ClassVar[frozenset[str]] = PAIRWISE_LAWS

    def __post_init__(self) -> None:
        if self.sweeps < 1:
            raise ConfigError(f"matching weights: sweeps is {self.sweeps}, expected at least one pass over the layers")

    def __call__(self, nets: Sequence[Net], reference: Net, bench: Bench) -> list[Moves]:  # noqa: ARG002
        """An order for every group of every network."""
        target = reference.matched_tensors()
        few = max(1, _MEMORY // max(1, sum(t.numel() for t in target.values())))
        return [move for k in range(0, len(nets), few) for move in self.match(target, nets[k : k + few])]

    def match(self, target: Mapping[str, Tensor], nets: Sequence[Net]) -> list[Moves]:
        """The orders that bring each of some networks near the target."""
        matching = WeightMatching.of(target, [net.matched_tensors() for net in nets], nets[0].groups)
        matching.match_once()
        matching.climb(self.sweeps)
        return [{name: orders[k] for name, orders in matching.orders.items()} for k in range(len(nets))]

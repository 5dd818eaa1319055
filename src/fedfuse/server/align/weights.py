"""Matching units by their weights: who is wired alike."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from fedfuse.core.channels import Group, Place, placed
from fedfuse.core.state import Bench
from fedfuse.errors import ConfigError
from fedfuse.linalg.assign import match
from fedfuse.server.align.nets import Moves, Net

PAIRWISE_LAWS = frozenset({"one", "agree", "scale", "pure", "dtype", "finite", "repeat"})


@dataclass(frozen=True, slots=True)
class ByWeights:
    """Put every unit where the reference has the unit wired most like it.

    Over orders P of all groups at once, the inner product Σ_t ⟨reference_t, (P network)_t⟩ is raised group by group,
    each by an exact assignment with the others fixed, until none can raise it: a fixed point over layers, equal to a
    local minimum of ‖reference − P network‖². It begins twice, from the order as it is and from a pass that matches
    each layer by what it reads, and the better end is taken, so the distance never grows (Singh and Jaggi 2020;
    Ainsworth et al., "Git Re-Basin", 2023, algorithm 1).

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
        return [self.match(target, net) for net in nets]

    def match(self, target: Mapping[str, Tensor], net: Net) -> Moves:
        """The orders that bring one network near the target."""
        tensors = net.matched_tensors()
        ends = []
        for start in (Board.as_is, Board.forward):
            board = start(target, tensors, net.groups)
            board.climb(self.sweeps)
            ends.append(board)
        best = max(ends, key=lambda board: board.score)  # the first where both are equal: units stay where they are
        return {group.name: best.orders[group.name] for group in net.groups}


def best_order(gain: Tensor, rooms: int = 1) -> Tensor:
    """The order of columns that makes the sum of the diagonal largest, each within its room.

    Example:
        >>> best_order(torch.tensor([[0.0, 2.0], [1.0, 0.0]]))
        tensor([1, 0])
    """
    if rooms == 1:
        return match(gain, maximise=True).cols
    room = len(gain) // rooms
    starts = range(0, len(gain), room)
    return torch.cat([s + match(gain[s : s + room, s : s + room], maximise=True).cols for s in starts])


@lru_cache(maxsize=64)
def wiring(groups: tuple[Group, ...]) -> Mapping[str, tuple[tuple[Place, frozenset[str]], ...]]:
    """For every group its places, each with the groups that stand on the other axes of the same tensor.

    A group may be among its own: a tensor that reads and makes the same units joins it to itself.
    """
    standing: dict[str, dict[int, set[str]]] = {}
    for group in groups:
        for place in group.places:
            standing.setdefault(place.tensor, {}).setdefault(place.axis, set()).add(group.name)
    return {group.name: tuple((p, _beside(p, standing[p.tensor])) for p in group.places) for group in groups}


def _beside(place: Place, standing: Mapping[int, set[str]]) -> frozenset[str]:
    return frozenset[str]().union(*(names for axis, names in standing.items() if axis != place.axis))


class Board:
    """A network's tensors as they are moved about beside a target's; a working space, not a value.

    Attributes:
        orders: by group, the order so far.
    """

    def __init__(self, target: Mapping[str, Tensor], tensors: Mapping[str, Tensor], groups: tuple[Group, ...]) -> None:
        self.target, self.tensors, self.groups = target, dict(tensors), groups
        self.orders = {group.name: torch.arange(group.size) for group in groups}
        self.wiring = {
            name: [(p, others) for p, others in places if p.tensor in tensors]
            for name, places in wiring(groups).items()
        }

    @classmethod
    def as_is(cls, target: Mapping[str, Tensor], tensors: Mapping[str, Tensor], groups: tuple[Group, ...]) -> Board:
        """Every unit where it stands."""
        return cls(target, tensors, groups)

    @classmethod
    def forward(cls, target: Mapping[str, Tensor], tensors: Mapping[str, Tensor], groups: tuple[Group, ...]) -> Board:
        """Every group matched once, from the input on, by what is settled already."""
        board = cls(target, tensors, groups)
        settled: set[str] = set()
        for group in groups:
            board.move(group, best_order(board.gain(group, settled), group.rooms))
            settled.add(group.name)
        return board

    @property
    def score(self) -> float:
        """Σ_t ⟨target_t, network_t⟩."""
        return sum(float((self.target[n] * t).sum(dtype=torch.float64)) for n, t in self.tensors.items())

    def gain(self, group: Group, settled: Collection[str] | None = None) -> Tensor:
        """How alike each unit of the target is to each unit of the network, by settled tensors or by all."""
        total = torch.zeros(group.size, group.size)
        for place, others in self.wiring[group.name]:
            if settled is None or others.issubset(settled):
                total.addmm_(place.rows(self.target, group.size), place.rows(self.tensors, group.size).mT)
        return total

    def move(self, group: Group, order: Tensor) -> None:
        """Rearrange a group's units."""
        if order.equal(torch.arange(len(order))):
            return
        for place, _ in self.wiring[group.name]:
            self.tensors[place.tensor] = reordered(self.tensors[place.tensor], place, order)
        self.orders[group.name] = self.orders[group.name][order]

    def climb(self, sweeps: int) -> None:
        """Raise the score group by group until none can; a group is asked again only if one beside it has moved."""
        restless = {group.name for group in self.groups}
        for _ in range(sweeps):
            for group in self.groups:
                if group.name in restless:
                    restless.discard(group.name)
                    if self._improve(group):
                        restless.update(*(others for _, others in self.wiring[group.name]))
            if not restless:
                return

    def _improve(self, group: Group) -> bool:
        """Move one group where the others want it; whether that raised the score."""
        gain = self.gain(group)
        order = best_order(gain, group.rooms)
        raised = float(gain.gather(1, order[:, None]).sum() - gain.trace())
        if raised <= 1e-6 * float(gain.abs().mean()) * len(gain):
            return False
        before = self.score if self._joins_itself(group) else None
        self.move(group, order)
        if before is None or self.score > before:
            return True
        self.move(group, order.argsort())  # where a group is joined to itself its gain is only a guess
        return False

    def _joins_itself(self, group: Group) -> bool:
        return any(group.name in others for _, others in self.wiring[group.name])


def reordered(t: Tensor, place: Place, order: Tensor) -> Tensor:
    """One tensor with the units of one place in another order.

    Example:
        >>> reordered(torch.arange(4.0).view(1, 4), Place("w", 1, per=2), torch.tensor([1, 0]))
        tensor([[2., 3., 0., 1.]])
    """
    if place.per == place.blocks == 1 and len(order) == t.shape[place.axis]:
        return t.index_select(place.axis, order)
    return placed({place.tensor: t}, {Group(place.tensor, len(order), (place,), place.blocks): order})[place.tensor]

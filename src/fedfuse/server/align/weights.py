"""Matching units by their weights: who is wired alike."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from fedfuse.core.channels import Group, Place
from fedfuse.core.state import Bench
from fedfuse.errors import ConfigError
from fedfuse.linalg.assign import match_each
from fedfuse.server.align.nets import Moves, Net, reordered

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
        board = Board.of(target, [net.matched_tensors() for net in nets], nets[0].groups)
        board.begin()
        board.climb(self.sweeps)
        return [{name: orders[k] for name, orders in board.orders.items()} for k in range(len(nets))]


def best_orders(gains: Tensor, rooms: int = 1) -> Tensor:
    """For each of several matrices the order of columns that makes its trace largest, each within its room.

    Example:
        >>> best_orders(torch.tensor([[[0.0, 2.0], [1.0, 0.0]]]))
        tensor([[1, 0]])
    """
    room = gains.shape[1] // rooms
    starts = range(0, gains.shape[1], room)
    return torch.cat([s + match_each(gains[:, s : s + room, s : s + room]) for s in starts], 1)


def best_order(gain: Tensor, rooms: int = 1) -> Tensor:
    """The order of columns that makes the sum of the diagonal largest, each within its room.

    Example:
        >>> best_order(torch.tensor([[0.0, 2.0], [1.0, 0.0]]))
        tensor([1, 0])
    """
    return best_orders(gain[None], rooms)[0]


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
    """Some networks' tensors, stacked, as they are moved about beside a target's; a working space, not a value.

    Attributes:
        tensors: by name, one after another.
        orders: by group, the order of every network so far.
    """

    def __init__(self, target: Mapping[str, Tensor], stacks: Mapping[str, Tensor], groups: tuple[Group, ...]) -> None:
        self.target, self.tensors, self.groups = target, dict(stacks), groups
        self.count = len(next(iter(stacks.values()))) if stacks else 0
        self.wiring = {
            name: [(p, others) for p, others in places if p.tensor in target] for name, places in wiring(groups).items()
        }
        self.orders = {g.name: torch.arange(g.size).expand(self.count, -1).clone() for g in groups}
        self._parts = {
            (g.name, place): _Part(place.rows(target, g.size), self.count, g.size)
            for g in groups
            for place, _ in self.wiring[g.name]
        }

    @classmethod
    def of(
        cls, target: Mapping[str, Tensor], every: Sequence[Mapping[str, Tensor]], groups: tuple[Group, ...]
    ) -> Board:
        """Networks as they are."""
        return cls(target, {n: torch.stack([tensors[n] for tensors in every]) for n in target}, groups)

    def begin(self) -> None:
        """Match every group once, from the input on, by what is settled already; keep that where it is nearer."""
        before, stays, ours = self.scores(), dict(self.tensors), {n: o.clone() for n, o in self.orders.items()}
        settled: set[str] = set()
        everybody = torch.arange(self.count)
        for group in self.groups:
            self.move(group, everybody, best_orders(self.gains(group, everybody, settled), group.rooms))
            settled.add(group.name)
        worse = (self.scores() <= before).nonzero()[:, 0]
        if worse.shape[0]:
            self.tensors = {n: _put(t, worse, stays[n][worse]) for n, t in self.tensors.items()}
            self.orders = {n: _put(o, worse, ours[n][worse]) for n, o in self.orders.items()}
            for part in self._parts.values():
                part.stale[worse] = True

    def scores(self) -> Tensor:
        """Σ_t ⟨target_t, network_t⟩ of every network."""
        flat = [t.reshape(self.count, -1) @ self.target[n].flatten() for n, t in self.tensors.items()]
        return torch.stack(flat).sum(0)

    def gains(self, group: Group, who: Tensor, settled: Collection[str] | None = None) -> Tensor:
        """How alike each unit of the target is to each unit of some networks, by settled tensors or by all."""
        total = torch.zeros(who.shape[0], group.size, group.size)
        for place, others in self.wiring[group.name]:
            if settled is None or others.issubset(settled):
                part = self._parts[group.name, place]
                if (old := who[part.stale[who]]).shape[0]:
                    part.renew(old, _rows(_some(self.tensors[place.tensor], old), place, group.size))
                total += _some(part.gains, who)
        return total.mT

    def move(self, group: Group, who: Tensor, orders: Tensor) -> None:
        """Rearrange a group's units in some networks."""
        for place, others in self.wiring[group.name]:
            stack = self.tensors[place.tensor]
            self.tensors[place.tensor] = _put(stack, who, _reordered(_some(stack, who), place, orders))
            self._parts[group.name, place].reorder(who, orders)
            for name in others:
                for beside, _ in self.wiring[name]:
                    if beside.tensor == place.tensor:
                        self._parts[name, beside].stale[who] = True
        self.orders[group.name][who] = self.orders[group.name][who].gather(1, orders)

    def climb(self, sweeps: int) -> None:
        """Raise the scores group by group until none can; a group is asked again only if one beside it has moved."""
        restless = {group.name: torch.ones(self.count, dtype=torch.bool) for group in self.groups}
        for _ in range(sweeps):
            for group in self.groups:
                who = restless[group.name].nonzero()[:, 0]
                restless[group.name][who] = False
                moved = self._improve(group, who) if who.shape[0] else who
                if moved.shape[0]:
                    for name in frozenset[str]().union(*(others for _, others in self.wiring[group.name])):
                        restless[name][moved] = True
            if not any(bool(still.any()) for still in restless.values()):
                return

    def _improve(self, group: Group, who: Tensor) -> Tensor:
        """Move one group where the others want it; the networks whose score that raised."""
        gains = self.gains(group, who)
        orders = best_orders(gains, group.rooms)
        raised = gains.gather(2, orders[..., None]).sum((1, 2)) - gains.diagonal(dim1=1, dim2=2).sum(1)
        better = raised > 1e-6 * gains.abs().mean((1, 2)) * group.size
        who, orders = who[better], orders[better]
        if not who.shape[0]:
            return who
        joined = any(group.name in others for _, others in self.wiring[group.name])
        before = self.scores()[who] if joined else None
        self.move(group, who, orders)
        if before is None:
            return who
        worse = self.scores()[who] <= before  # where a group is joined to itself its gain is only a guess
        if bool(worse.any()):
            self.move(group, who[worse], orders[worse].argsort(1))
        return who[~worse]


class _Part:
    """What one place adds to the gains of its group, (networks × their units × the target's), kept until stale."""

    __slots__ = ("gains", "stale", "target")

    def __init__(self, target: Tensor, count: int, size: int) -> None:
        self.target, self.gains = target, torch.empty(count, size, size)
        self.stale = torch.ones(count, dtype=torch.bool)

    def renew(self, who: Tensor, rows: Tensor) -> None:
        """Compare the units of some networks with the target's once more."""
        if who.shape[0] == self.gains.shape[0]:
            torch.mm(rows, self.target.mT, out=self.gains.view(-1, self.gains.shape[-1]))
        else:
            self.gains[who] = (rows @ self.target.mT).view(-1, *self.gains.shape[1:])
        self.stale[who] = False

    def reorder(self, who: Tensor, orders: Tensor) -> None:
        """Units that moved take their gains along."""
        mine = _some(self.gains, who)
        places = (orders + orders.shape[1] * torch.arange(orders.shape[0])[:, None]).flatten()
        self.gains = _put(self.gains, who, mine.flatten(0, 1).index_select(0, places).view(mine.shape))


def _some(stack: Tensor, who: Tensor) -> Tensor:
    return stack if who.shape[0] == stack.shape[0] else stack[who]


def _put(stack: Tensor, who: Tensor, new: Tensor) -> Tensor:
    return new if who.shape[0] == stack.shape[0] else stack.index_copy(0, who, new)


def _rows(stack: Tensor, place: Place, size: int) -> Tensor:
    """What a tensor knows of each unit of some networks, one row per network and unit."""
    if place.blocks > 1:
        rows = stack.view(stack.shape[0], place.blocks, -1, *stack.shape[2:]).transpose(2, 3)
    else:
        rows = stack.narrow(place.axis + 1, place.offset, size * place.per).movedim(place.axis + 1, 1)
    return rows.reshape(stack.shape[0] * size, -1)


def _reordered(stack: Tensor, place: Place, orders: Tensor) -> Tensor:
    """Tensors with the units of one place in other orders, each in its own."""
    size = orders.shape[1]
    if place.blocks > 1 or size * place.per != stack.shape[place.axis + 1]:
        return torch.stack([reordered(t, place, order) for t, order in zip(stack, orders, strict=True)])
    front = stack.movedim(place.axis + 1, 1)
    units = front.reshape(stack.shape[0] * size, place.per, *front.shape[2:])
    places = (orders + size * torch.arange(orders.shape[0])[:, None]).flatten()
    return units.index_select(0, places).view(front.shape).movedim(1, place.axis + 1)

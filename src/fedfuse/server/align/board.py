"""The board: some networks beside a target, and how their units may stand to be like it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import TypeAlias

import torch
from torch import Tensor

from fedfuse.linalg.assign import match_each
from fedfuse.nets.channels import Group, Place
from fedfuse.server.align.nets import reordered

Stand: TypeAlias = tuple[Place, str]  # a place, and the name of the group whose units stand there


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
def wiring(groups: tuple[Group, ...]) -> Mapping[str, Mapping[Place, Sequence[Stand]]]:
    """For every group its places, and for each who stands where on the other axes of the same tensor.

    A group may be among its own: a tensor that reads and makes the same units joins it to itself.
    """
    standing: dict[str, list[Stand]] = {}
    for group in groups:
        for place in group.places:
            standing.setdefault(place.tensor, []).append((place, group.name))
    return {g.name: {p: [s for s in standing[p.tensor] if s[0].axis != p.axis] for p in g.places} for g in groups}


class Board:
    """Some networks, stacked, beside a target; a working space, not a value.

    Networks stay as they came: what moves are their `orders`. Of the gains only those are counted anew whose
    neighbours have moved.

    Attributes:
        orders: by group, for every network which of its units stands at each of the target's places.
    """

    def __init__(self, target: Mapping[str, Tensor], stacks: Mapping[str, Tensor], groups: tuple[Group, ...]) -> None:
        self.target, self.stacks, self.groups = target, stacks, groups
        self.count = len(next(iter(stacks.values()))) if stacks else 0
        self.orders = {g.name: torch.arange(g.size).repeat(self.count, 1) for g in groups}
        self.parts = {
            g.name: [
                _Part(place, beside, target[place.tensor], stacks[place.tensor], g.size)
                for place, beside in wiring(groups)[g.name].items()
                if place.tensor in target
            ]
            for g in groups
        }

    @classmethod
    def of(
        cls, target: Mapping[str, Tensor], every: Sequence[Mapping[str, Tensor]], groups: tuple[Group, ...]
    ) -> Board:
        """Networks as they are."""
        return cls(target, {n: torch.stack([tensors[n] for tensors in every]) for n in target}, groups)

    def begin(self) -> None:
        """Match every group once, from the input on, by what is settled already; keep that where it is nearer."""
        if not self.groups:  # a network without hidden units that could move
            return
        before = torch.stack([t.flatten(1) @ self.target[n].flatten() for n, t in self.stacks.items()]).sum(0)
        everybody, settled = torch.arange(self.count), set[str]()
        for group in self.groups:
            self.put(group, everybody, best_orders(self.gains(group, everybody, settled), group.rooms))
            settled.add(group.name)
        worse = (self.scores() <= before).nonzero()[:, 0]
        for group in self.groups:
            self.put(group, worse, torch.arange(group.size).repeat(worse.shape[0], 1))

    def tensors(self, names: Collection[str]) -> dict[str, Tensor]:
        """Some tensors of the networks with their units in order, stacked."""
        moved = {name: self.stacks[name] for name in names}
        for name, parts in self.parts.items():
            for part in (part for part in parts if part.place.tensor in moved):
                moved[part.place.tensor] = _reordered(moved[part.place.tensor], part.place, self.orders[name])
        return moved

    def scores(self) -> Tensor:
        """Σ_t ⟨target_t, network_t⟩ of every network in order."""
        whole = {part.place.tensor: (part, name) for name, parts in self.parts.items() for part in parts if part.whole}
        everybody = torch.arange(self.count)
        known = [_along(part.fresh(everybody, self.orders), self.orders[name]) for part, name in whole.values()]
        moved = self.tensors(self.stacks.keys() - whole.keys())
        return torch.stack([*known, *(t.flatten(1) @ self.target[n].flatten() for n, t in moved.items())]).sum(0)

    def gains(self, group: Group, who: Tensor, settled: Collection[str] | None = None) -> Tensor:
        """How alike each unit of the target is to each unit of some networks, by settled tensors or by all."""
        parts = [p for p in self.parts[group.name] if settled is None or p.neighbours.issubset(settled)]
        if not parts:
            return torch.zeros(who.shape[0], group.size, group.size)
        total = _some(parts[0].fresh(who, self.orders), who)
        for part in parts[1:]:
            total = total + _some(part.fresh(who, self.orders), who)
        return total

    def put(self, group: Group, who: Tensor, orders: Tensor) -> None:
        """Put a group's units of some networks into other orders."""
        if who.shape[0]:
            self.orders[group.name][who] = orders
            for part in (part for parts in self.parts.values() for part in parts if group.name in part.neighbours):
                part.stale[who] = True

    def climb(self, sweeps: int) -> None:
        """Raise the scores group by group until none can; a group is asked again only if one beside it has moved.

        The restless group nearest the output is asked first: it is the deep ones that move most, and what stands
        before them is asked once they are calm.
        """
        restless = {group.name: torch.ones(self.count, dtype=torch.bool) for group in self.groups}
        for _ in range(sweeps * len(self.groups)):
            group = next((g for g in reversed(self.groups) if bool(restless[g.name].any())), None)
            if group is None:
                return
            who = restless[group.name].nonzero()[:, 0]
            restless[group.name][who] = False
            moved = self._improve(group, who)
            for name in frozenset[str]().union(*(part.neighbours for part in self.parts[group.name])):
                restless[name][moved] = True

    def _improve(self, group: Group, who: Tensor) -> Tensor:
        """Move one group where the others want it; the networks whose score that raised."""
        gains, old = self.gains(group, who), self.orders[group.name][who]
        new = best_orders(gains, group.rooms)
        better = _along(gains, new) - _along(gains, old) > 1e-6 * gains.abs().mean((1, 2)) * group.size
        who, old, new = who[better], old[better], new[better]
        joined = any(group.name in part.neighbours for part in self.parts[group.name])
        before = self.scores()[who] if joined else None
        self.put(group, who, new)
        if before is None:
            return who
        worse = self.scores()[who] <= before  # where a group is joined to itself its gain is only a guess
        self.put(group, who[worse], old[worse])
        return who[~worse]


class _Part:
    """What one tensor adds to the gains of a group, (networks × the target's units × theirs), kept until stale.

    Attributes:
        place: where the group's units stand in the tensor.
        neighbours: the groups on the tensor's other axes.
        stale: the networks of which a neighbour has moved since.
        whole: whether every number of the tensor belongs to one of the units.
    """

    __slots__ = ("beside", "gains", "neighbours", "place", "stack", "stale", "target", "walls", "whole")

    def __init__(self, place: Place, beside: Sequence[Stand], target: Tensor, stack: Tensor, size: int) -> None:
        self.place, self.beside, self.neighbours = place, beside, frozenset(name for _, name in beside)
        self.walls = any(p.blocks > 1 for p in (place, *(p for p, _ in beside)))
        self.whole = place.blocks > 1 or size * place.per == target.shape[place.axis]
        self.stack = stack if self.walls else _units_last(stack, place, size)
        self.gains, self.stale = torch.empty(len(stack), size, size), torch.ones(len(stack), dtype=torch.bool)
        self.target = self._columns(target[None] if self.walls else _units_last(target[None], place, size))[0].mT

    def fresh(self, who: Tensor, orders: Mapping[str, Tensor]) -> Tensor:
        """The gains, those of some networks counted anew if they must be."""
        old = who[self.stale[who]]
        if old.shape[0]:
            stack = _some(self.stack, old)
            for place, name in self.beside:
                stack = _reordered(stack, place, _some(orders[name], old))
            if old.shape[0] == self.gains.shape[0]:
                torch.matmul(self.target, self._columns(stack), out=self.gains)
            else:
                self.gains[old] = self.target @ self._columns(stack)
            self.stale[old] = False
        return self.gains

    def _columns(self, stack: Tensor) -> Tensor:
        """What some networks' tensors know of each unit, one column per unit."""
        size = self.gains.shape[-1]
        if not self.walls:
            return stack.reshape(stack.shape[0], -1, size)
        rows = torch.stack([self.place.rows({self.place.tensor: t}, size) for t in stack])
        return rows.mT


def _units_last(stack: Tensor, place: Place, size: int) -> Tensor:
    """The units of a place on the last axis, all other axes where they were: whole rows move when a neighbour does."""
    axis = place.axis + 1
    units = stack.narrow(axis, place.offset, size * place.per).unflatten(axis, (size, place.per))
    moved: Tensor = units.movedim(axis, -1)
    return moved.contiguous()


def _along(gains: Tensor, orders: Tensor) -> Tensor:
    """The sum of what each order picks from its matrix."""
    return gains.gather(2, orders[..., None]).sum((1, 2))


def _some(stack: Tensor, who: Tensor) -> Tensor:
    return stack if who.shape[0] == stack.shape[0] else stack[who]


def _reordered(stack: Tensor, place: Place, orders: Tensor) -> Tensor:
    """Tensors with the units of one place in other orders, each in its own."""
    size = orders.shape[1]
    if place.blocks > 1 or size * place.per != stack.shape[place.axis + 1]:
        return torch.stack([reordered(t, place, order) for t, order in zip(stack, orders, strict=True)])
    front = stack.movedim(place.axis + 1, 1)
    units = front.reshape(stack.shape[0] * size, -1)
    places = (orders + size * torch.arange(orders.shape[0])[:, None]).flatten()
    return units.index_select(0, places).view(front.shape).movedim(1, place.axis + 1)

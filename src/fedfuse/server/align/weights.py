"""Matching units by their weights: orders of several networks' units that bring each network near a target."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, TypeAlias

import torch
from torch import Tensor

from fedfuse.core.state import Bench
from fedfuse.errors import ConfigError
from fedfuse.linalg.assign import match_each
from fedfuse.nets.channels import Group, Location
from fedfuse.server.align.nets import Moves, Net, reorder_tensor

PlaceOfGroup: TypeAlias = tuple[Location, str]  # a place in a tensor, and the name of the group whose units it holds
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


class WeightMatching:
    """Several networks, stacked, that are matched to one target; a mutable working space.

    The networks' tensors never change, only their `orders` do. A gain is computed again only if a neighboring group
    has been reordered since.

    Attributes:
        orders: by group, for every network the index of the unit matched with each unit of the target.
    """

    def __init__(self, target: Mapping[str, Tensor], stacks: Mapping[str, Tensor], groups: tuple[Group, ...]) -> None:
        self.target, self.stacks, self.groups = target, stacks, groups
        self.count = len(next(iter(stacks.values()))) if stacks else 0
        self.orders = {g.name: torch.arange(g.size).repeat(self.count, 1) for g in groups}
        self.terms = {
            g.name: [
                _GainTerm(place, adjacent, target[place.tensor], stacks[place.tensor], g.size)
                for place, adjacent in wiring(groups)[g.name].items()
                if place.tensor in target
            ]
            for g in groups
        }

    @classmethod
    def of(
        cls, target: Mapping[str, Tensor], every: Sequence[Mapping[str, Tensor]], groups: tuple[Group, ...]
    ) -> WeightMatching:
        """Networks as they are."""
        return cls(target, {n: torch.stack([tensors[n] for tensors in every]) for n in target}, groups)

    def match_once(self) -> None:
        """Match every group once, from the input on, by the groups matched before; keep it where it is nearer."""
        if not self.groups:  # a network without hidden units that could move
            return
        # greedy matching looks back only, so it can end worse than it began; then the order stays as it was
        before = torch.stack([t.flatten(1) @ self.target[n].flatten() for n, t in self.stacks.items()]).sum(0)
        all_networks, settled = list(range(self.count)), set[str]()
        for group in self.groups:
            self.set_orders(group, all_networks, best_orders(self.gains(group, all_networks, settled), group.sections))
            settled.add(group.name)
        worse = [k for k, is_worse in enumerate((self.scores() <= before).tolist()) if is_worse]
        for group in self.groups:
            self.set_orders(group, worse, torch.arange(group.size).repeat(len(worse), 1))

    def tensors(self, names: Collection[str]) -> dict[str, Tensor]:
        """Some tensors of all networks, stacked, with the orders applied."""
        moved = {name: self.stacks[name] for name in names}
        for name, terms in self.terms.items():
            for term in (term for term in terms if term.place.tensor in moved):
                moved[term.place.tensor] = _reorder_stack(moved[term.place.tensor], term.place, self.orders[name])
        return moved

    def scores(self) -> Tensor:
        """Σ_t ⟨target_t, network_t⟩ of every network in order."""
        # a tensor all of whose numbers belong to a group's units has its score in that group's gains already
        whole = {term.place.tensor: (term, name) for name, terms in self.terms.items() for term in terms if term.whole}
        all_networks = range(self.count)
        known = [
            _sum_along(term.current_gains(all_networks, self.orders), self.orders[name])
            for term, name in whole.values()
        ]
        moved = self.tensors(self.stacks.keys() - whole.keys())
        return torch.stack([*known, *(t.flatten(1) @ self.target[n].flatten() for n, t in moved.items())]).sum(0)

    def gains(self, group: Group, who: Sequence[int], settled: Collection[str] | None = None) -> Tensor:
        """Inner products of the target's units with those of some networks, over settled tensors or over all."""
        terms = [p for p in self.terms[group.name] if settled is None or p.neighbors.issubset(settled)]
        if not terms:
            return torch.zeros(len(who), group.size, group.size)
        total = _rows_of(terms[0].current_gains(who, self.orders), who)
        for term in terms[1:]:
            total = total + _rows_of(term.current_gains(who, self.orders), who)
        return total

    def set_orders(self, group: Group, who: Sequence[int], orders: Tensor) -> None:
        """Set the orders of one group in some networks, and mark the gains that depend on them as stale."""
        if who:
            self.orders[group.name][who] = orders
            for term in (term for terms in self.terms.values() for term in terms if group.name in term.neighbors):
                term.stale.update(who)

    def climb(self, sweeps: int) -> None:
        """Raise the scores group by group until no group can; a group is tried again only if a neighbor has changed.

        The dirty group nearest the output goes first: deep groups change most, so earlier ones are tried once the
        deep ones have settled.
        """
        dirty = {group.name: set(range(self.count)) for group in self.groups}
        for _ in range(sweeps * len(self.groups)):
            group = next((g for g in reversed(self.groups) if dirty[g.name]), None)
            if group is None:
                return
            who = sorted(dirty[group.name])
            dirty[group.name].clear()
            moved = self._improve(group, who)
            for name in frozenset[str]().union(*(term.neighbors for term in self.terms[group.name])):
                dirty[name].update(moved)

    def _improve(self, group: Group, who: Sequence[int]) -> Sequence[int]:
        """Reorder one group for the best score with the others fixed; returns the networks whose score rose."""
        gains, old = self.gains(group, who), _rows_of(self.orders[group.name], who)
        new = best_orders(gains, group.sections)
        # rounding makes equal orders look better by turns: below this the climb would go on for ever
        slack = 1e-6 * gains.abs().mean((1, 2)) * group.size
        better = (_sum_along(gains, new) - _sum_along(gains, old) > slack).nonzero()[:, 0].tolist()
        who, old, new = [who[k] for k in better], _rows_of(old, better), _rows_of(new, better)
        joined = any(group.name in term.neighbors for term in self.terms[group.name])
        if not joined:
            self.set_orders(group, who, new)
            return who
        # where a group is joined to itself its gain is only a guess
        before, old = self.scores()[who], old.clone()
        self.set_orders(group, who, new)
        worse = (self.scores()[who] <= before).tolist()
        back = [k for k, is_worse in enumerate(worse) if is_worse]
        self.set_orders(group, [who[k] for k in back], old[back])
        return [k for k, is_worse in zip(who, worse, strict=True) if not is_worse]


class _GainTerm:
    """One tensor's term of a group's gains, (networks × the target's units × theirs), cached until stale.

    Attributes:
        place: where the group's units are in the tensor.
        neighbors: the groups on the tensor's other axes.
        stale: the networks in which a neighbor has been reordered since.
        whole: whether every number of the tensor belongs to one of the units.
    """

    __slots__ = ("adjacent", "blocked", "gains", "neighbors", "place", "stack", "stale", "target", "whole")

    def __init__(
        self, place: Location, adjacent: Sequence[PlaceOfGroup], target: Tensor, stack: Tensor, size: int
    ) -> None:
        self.place, self.adjacent, self.neighbors = place, adjacent, frozenset(name for _, name in adjacent)
        self.blocked = any(p.blocks > 1 for p in (place, *(p for p, _ in adjacent)))
        self.whole = place.blocks > 1 or size * place.per == target.shape[place.axis]
        self.stack = stack if self.blocked else _units_last(stack, place, size)
        self.gains, self.stale = torch.empty(len(stack), size, size), set(range(len(stack)))
        self.target = self._columns(target[None] if self.blocked else _units_last(target[None], place, size))[0].mT

    def current_gains(self, who: Sequence[int], orders: Mapping[str, Tensor]) -> Tensor:
        """The gains, after computing again those of the given networks that are stale."""
        old = [k for k in who if k in self.stale]
        if old:
            stack = _rows_of(self.stack, old)
            for place, name in self.adjacent:
                stack = _reorder_stack(stack, place, _rows_of(orders[name], old))
            if len(old) == self.gains.shape[0]:  # all of them, as in every first sweep: no copy through an index
                torch.matmul(self.target, self._columns(stack), out=self.gains)
            else:
                self.gains[old] = self.target @ self._columns(stack)
            self.stale.difference_update(old)
        return self.gains

    def _columns(self, stack: Tensor) -> Tensor:
        """The numbers that belong to each unit, one column per unit, for several networks."""
        size = self.gains.shape[-1]
        if not self.blocked:
            return stack.reshape(stack.shape[0], -1, size)
        rows = torch.stack([self.place.rows({self.place.tensor: t}, size) for t in stack])
        return rows.mT


@lru_cache(maxsize=64)
def wiring(groups: tuple[Group, ...]) -> Mapping[str, Mapping[Location, Sequence[PlaceOfGroup]]]:
    """For every group its places, and for each place the groups on the other axes of the same tensor.

    A group may be its own neighbor: a tensor that reads and makes the same units joins it to itself.
    """
    groups_of: dict[str, list[PlaceOfGroup]] = {}
    for group in groups:
        for place in group.locations:
            groups_of.setdefault(place.tensor, []).append((place, group.name))
    return {g.name: {p: [s for s in groups_of[p.tensor] if s[0].axis != p.axis] for p in g.locations} for g in groups}


def best_orders(gains: Tensor, sections: int = 1) -> Tensor:
    """For each of several matrices the order of columns that makes its trace largest, each within its section.

    Example:
        >>> best_orders(torch.tensor([[[0.0, 2.0], [1.0, 0.0]]]))
        tensor([[1, 0]])
    """
    if sections == 1:
        return match_each(gains)
    size = gains.shape[1] // sections
    starts = range(0, gains.shape[1], size)
    return torch.cat([s + match_each(gains[:, s : s + size, s : s + size]) for s in starts], 1)


def best_order(gain: Tensor, sections: int = 1) -> Tensor:
    """The order of columns that makes the sum of the diagonal largest, each within its section.

    Example:
        >>> best_order(torch.tensor([[0.0, 2.0], [1.0, 0.0]]))
        tensor([1, 0])
    """
    return best_orders(gain[None], sections)[0]


def _units_last(stack: Tensor, place: Location, size: int) -> Tensor:
    """A place's units on the last axis, so that reordering a neighbor moves whole rows of memory."""
    axis = place.axis + 1
    units = stack.narrow(axis, place.offset, size * place.per).unflatten(axis, (size, place.per))
    moved: Tensor = units.movedim(axis, -1)
    return moved.contiguous()


def _sum_along(gains: Tensor, orders: Tensor) -> Tensor:
    """For each matrix, the sum of the entries that its order picks."""
    return gains.gather(2, orders[..., None]).sum((1, 2))


def _rows_of(stack: Tensor, who: Sequence[int]) -> Tensor:
    return stack if len(who) == stack.shape[0] else stack.index_select(0, torch.tensor(who, dtype=torch.int64))


def _reorder_stack(stack: Tensor, place: Location, orders: Tensor) -> Tensor:
    """Stacked tensors with the units of one place reordered, each tensor by its own order."""
    size = orders.shape[1]
    if place.blocks > 1 or size * place.per != stack.shape[place.axis + 1]:
        return torch.stack([reorder_tensor(t, place, order) for t, order in zip(stack, orders, strict=True)])
    # all networks at once: row k·size + order of one long table of units, which is read in whole rows
    front = stack.movedim(place.axis + 1, 1)
    units = front.reshape(stack.shape[0] * size, -1)
    places = (orders + size * torch.arange(orders.shape[0])[:, None]).flatten()
    return units.index_select(0, places).view(front.shape).movedim(1, place.axis + 1)

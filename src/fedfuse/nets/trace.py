"""Which axes of a network's tensors hold the same units, found by following an input through it.

`fedfuse.nets.follow` says which positions of which weights an answer binds to each other. What is found is not believed
but proved: the network, with random weights, must answer the same with every group permuted.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fedfuse.core.inputs import reads_tokens
from fedfuse.core.rng import seeded, stream
from fedfuse.core.spec import Spec, drop_tied_names
from fedfuse.errors import ConfigError, error_text
from fedfuse.nets.channels import Group, Location, by_axis, keep_channels, move_units, places_in
from fedfuse.nets.follow import OUTPUT, POSITION_IN_BLOCK, Axis, Follower, follow

_ROWS = 4  # inputs that go through the network: enough to tell functions apart
_TOLERANCE = 1e-7  # relative, in float64: rounding is a million times smaller, a unit out of place far larger
_REMEDY = (
    "write it with layers of torch.nn, or give the network an attribute `channel_groups` with groups of your own "
    "(fedfuse.nets.channels.Group)"
)


class Trace(NamedTuple):
    """What was found of a network: its groups, and the tensors whose units stand in none, with the reason of each."""

    groups: tuple[Group, ...]
    left_out: tuple[str, ...]


def trace(spec: Spec, shape: Sequence[int]) -> Trace:
    """The groups of a network, proved, and what stands in none; see `channel_groups`.

    Example:
        >>> [g.size for g in trace(Spec("mlp", {"inputs": 4, "hidden": [3, 5], "classes": 2}), (4,)).groups]
        [3, 5]
    """
    with seeded(0, "trace"):
        net = without_noise(spec.build())
        randomize(net)
        x = drawn_inputs(spec, tuple(shape))
        declared = getattr(net, "channel_groups", None)
        if declared is not None:
            _check_apart(spec, groups := tuple(declared))
            if failed := _groups_noticed(spec, net, x, groups):
                raise ConfigError(
                    f"model {spec.factory!r}: moving the units of {failed[0].name!r} changes what the network answers"
                    f"{_ties(spec)}; correct its `channel_groups`"
                )
            return Trace(groups, ())
        found = _FoundUnits.of(net, _follow(spec, net, x))
        groups = _in_order(net, found.groups())
        _check_apart(spec, groups)
        wrong = set(_groups_noticed(spec, net, x, groups))
    kept = tuple(g for g in groups if g not in wrong)
    found.refused |= {location.tensor: "moving it changes the answers" for g in wrong for location in g.makers[:1]}
    return Trace(kept, found.left_out(kept))


def drawn_inputs(spec: Spec, shape: tuple[int, ...]) -> Tensor:
    """Inputs that tell functions apart: normal numbers, or for a network that reads tokens the first two of them."""
    x = torch.randn(_ROWS, *shape, generator=stream(0, "trace")).double()
    return (x > 0).long() if reads_tokens(spec, shape) else x


def without_noise(net: nn.Module) -> nn.Module:
    """The network as a plain function: no dropout, and Bayesian layers at their means."""
    for part in net.modules():
        if isinstance(getattr(part, "noise", None), bool) and "noise" in vars(part):
            part.noise = False  # type: ignore[assignment]
    return net.double().eval().requires_grad_(False)


@torch.no_grad()
def randomize(net: nn.Module) -> None:
    """Weights among which no two units are alike, so that no misplaced unit goes unseen."""
    draw = stream(0, "trace", "weights")
    for name, t in net.state_dict(keep_vars=True).items():
        if not t.is_floating_point():
            continue
        noise = torch.rand(t.shape, generator=draw, dtype=torch.float64)
        if t.ndim > 1:  # of variance 2 / fan-in: numbers stay of one size through any depth, as `_TOLERANCE` needs
            t.copy_((noise - 0.5) * math.sqrt(24 / t[0].numel()))
        else:
            t.copy_(noise + 0.5 if name.endswith(("weight", "running_var")) else noise - 0.5)


def _follow(spec: Spec, net: nn.Module, x: Tensor) -> Follower:
    """What the network binds; an error of its own forward is passed on."""
    try:
        return follow(net, x)
    except Exception as why:
        raise ConfigError(
            f"model {spec.factory!r} cannot be followed with an input of shape {tuple(x.shape[1:])}: "
            f"{error_text(why)}; {_REMEDY}"
        ) from why


class _Spot(NamedTuple):
    """An axis of a tensor of the network."""

    tensor: int
    axis: int


@dataclass(slots=True, eq=False)
class _FoundUnits:
    """Units, each with its positions on every axis that it has a part of.

    Attributes:
        follower: what the network binds.
        names: of every tensor, by its identity; a tied one has several.
        units: by label, the positions of each unit on every axis.
        refused: tensors whose units cannot be described, with the reason.
    """

    follower: Follower
    names: dict[int, list[str]]
    units: dict[int, dict[_Spot, list[int]]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, net: nn.Module, follower: Follower) -> _FoundUnits:
        """Everything that can move."""
        names: dict[int, list[str]] = {}
        for name, t in net.state_dict(keep_vars=True).items():
            names.setdefault(id(t), []).append(name)
        found = cls(follower, names)
        for tensor, axes in follower.weights.items():
            for axis, (labels, _) in enumerate(axes):
                for position, root in enumerate(follower.bindings.roots(labels).tolist()):
                    if not follower.bindings.pins(root):
                        found.units.setdefault(root, {}).setdefault(_Spot(tensor, axis), []).append(position)
        return found

    def groups(self) -> Iterator[Group]:
        """One group per run of adjacent units that stand on the same axes."""
        for run in self._runs():
            spots = self.units[run[0]]
            try:
                locations = [place for spot in spots for place in self._locations(spot, run)]
                locations += self._blocked_readers(run)
                sections = self._sections(run)
            except _UnknownArrangement as why:
                self.refused |= {name: str(why) for spot in spots for name in self.names[spot.tensor]}
                continue
            if all(place.reads for place in locations):  # tied weights: what reads them is also what makes them
                locations[0] = replace(locations[0], reads=False)
            if len(run) > sections:  # else every section has one unit, and nothing can move
                yield Group("", len(run), tuple(locations), sections)

    def _runs(self) -> Iterator[list[int]]:
        """Units in the order of their first positions, cut where they stand elsewhere or are not adjacent."""
        run: list[int] = []
        for root, spots in self.units.items():
            if run and not self._follows(self.units[run[-1]], spots):
                yield run
                run = []
            run.append(root)
        if run:
            yield run

    @staticmethod
    def _follows(before: dict[_Spot, list[int]], unit: dict[_Spot, list[int]]) -> bool:
        if {spot: len(p) for spot, p in before.items()} != {spot: len(p) for spot, p in unit.items()}:
            return False
        first, then = next(iter(before.values())), next(iter(unit.values()))[0]
        return next(iter(before)) == next(iter(unit)) and then - 1 in first

    def _locations(self, spot: _Spot, run: Sequence[int]) -> Iterator[Location]:
        axis = self.follower.weights[spot.tensor][spot.axis]
        reads = not self.follower.reading.isdisjoint(axis.labels.tolist())
        for offset, per in _stretches([self.units[root][spot] for root in run]):
            for name in self.names[spot.tensor]:
                yield Location(name, spot.axis, per, offset, reads=reads)

    def _blocked_readers(self, run: Sequence[int]) -> Iterator[Location]:
        """What grouped convolutions read of these units, all of them and nothing else."""
        for weight, labels, groups in self.follower.blocked:
            roots = self.follower.bindings.roots(labels).tolist()
            if set(run).isdisjoint(roots):
                continue
            if roots != list(run):
                raise _UnknownArrangement("a convolution with groups reads them among others")
            yield from (Location(name, 1, blocks=groups, reads=True) for name in self.names[weight])

    def _sections(self, run: Sequence[int]) -> int:
        """Into how many parts walls cut a run of units, all of one size."""
        parts: list[list[int]] = [[] for _ in run]
        for labels, count in self.follower.walls:
            roots = self.follower.bindings.roots(labels).tolist()
            part = {root: i * count // len(roots) for i, root in enumerate(roots)}
            for unit, own in zip(run, parts, strict=True):
                own.append(part.get(unit, -1))
        sizes = [len(list(same)) for _, same in groupby(parts)]
        # walls of several operations may cut at different places; the largest equal sections respect all of them
        return len(run) // math.gcd(*sizes)

    def left_out(self, groups: Sequence[Group]) -> tuple[str, ...]:
        """Weights that make units which stand in no group, with the reason; outputs are no units."""
        moving = {(place.tensor, place.axis) for group in groups for place in group.locations}
        named = []
        for tensor, axes in self.follower.weights.items():
            name = self.names[tensor][0]
            making = [a for a in range(len(axes)) if self._makes(axes[a])]
            if len(axes) < 2 or not making or any((name, a) in moving for a in making):
                continue
            reasons = {why for a in making for label in axes[a].labels.tolist() for why in self._pins(label)}
            if OUTPUT not in reasons and any(len(axes[a].labels) > 1 for a in making):
                why = self.refused.get(name) or ", ".join(sorted(reasons)) or "each stands by itself"
                named.append(f"{name} ({why})")
        return tuple(named)

    def _makes(self, axis: Axis) -> bool:
        return self.follower.reading.isdisjoint(axis.labels.tolist()) and not {
            why for label in axis.labels.tolist() for why in self._pins(label)
        } & {POSITION_IN_BLOCK}

    def _pins(self, label: int) -> frozenset[str]:
        return self.follower.bindings.pins(label)


class _UnknownArrangement(Exception):
    """Units whose positions no `Location` can describe."""


def _stretches(positions: Sequence[list[int]]) -> Iterator[tuple[int, int]]:
    """Where units stand on an axis: an offset and a width for every time they occur."""
    first, begin = sorted(positions[0]), 0
    every = [set(mine) for mine in positions]
    for end in range(1, len(first) + 1):
        if end == len(first) or first[end] != first[end - 1] + 1:
            offset, per = first[begin], end - begin
            begin = end
            if not all(offset + i * per + k in mine for i, mine in enumerate(every) for k in range(per)):
                raise _UnknownArrangement("in an order that is neither a flatten's nor a concatenation's")
            yield offset, per


def _in_order(net: nn.Module, groups: Iterable[Group]) -> tuple[Group, ...]:
    """Groups and their locations in the order of the state dict, each named after the first layer that makes it."""
    rank = {name: i for i, name in enumerate(net.state_dict())}
    found = [replace(g, locations=tuple(sorted(g.locations, key=lambda p: (rank[p.tensor], p.axis)))) for g in groups]
    found.sort(key=lambda g: (rank[g.makers[0].tensor], g.makers[0].axis, g.makers[0].offset))
    times = Counter(_maker(g) for g in found)
    seen = Counter[str]()
    named = []
    for group in found:
        name = _maker(group)
        named.append(replace(group, name=f"{name}[{seen[name]}]" if times[name] > 1 else name))
        seen[name] += 1
    return tuple(named)


def _maker(group: Group) -> str:
    return group.makers[0].tensor.rpartition(".")[0] or group.makers[0].tensor


def _check_apart(spec: Spec, groups: Sequence[Group]) -> None:
    """No position of a tensor may hold units of two kinds, which only tied weights make happen.

    Raises:
        ConfigError: naming the tied tensors.
    """
    for (tensor, _), here in by_axis(groups):
        ends = [location.offset + group.size * location.per for group, location in here if location.blocks == 1]
        if all(end <= location.offset for end, (_, location) in zip(ends, here[1:], strict=False)):
            continue
        tied = next((same for same in spec.layout.tied if tensor in same), (tensor,))
        raise ConfigError(
            f"model {spec.factory!r}: {' and '.join(tied)} are one tensor and hold units of several layers, which "
            "cannot move apart; untie them, or fuse without moving units"
        )


def _ties(spec: Spec) -> str:
    pairs = [" and ".join(same) for same in spec.layout.tied]
    return f" ({', '.join(pairs)} are one tensor, which moves as one)" if pairs else ""


@torch.no_grad()
def _groups_noticed(spec: Spec, net: nn.Module, x: Tensor, groups: tuple[Group, ...]) -> list[Group]:
    """The groups that the network notices when they are permuted: there should be none."""
    weights = drop_tied_names(spec, net.state_dict())
    before = answer(net, weights, x)
    # without the further names of tied tensors, which the weights do not have
    shuffled = {g: (replace(g, locations=places_in(weights, g)), _shuffle(g)) for g in groups}
    # all groups at once, as is nearly always right; only if that goes wrong, one by one
    if same_answers(before, answer(net, move_units(weights, dict(shuffled.values())), x)):
        return []
    with in_double():
        before = answer(net, weights, x)
        return [
            group
            for group, (own, order) in shuffled.items()
            if not same_answers(before, answer(net, move_units(weights, {own: order}), x))
        ]


def _shuffle(group: Group) -> Tensor:
    """A random order within the group's sections that leaves no unit where it was."""
    section_size = group.size // group.sections
    draw = stream(0, "trace", group.name)
    parts = []
    for start in range(0, group.size, section_size):
        order = torch.randperm(section_size, generator=draw)
        moved = torch.empty_like(order)
        moved[order] = order.roll(1)  # along one cycle, so that every unit moves
        parts.append(start + moved)
    return torch.cat(parts)


def answer(net: nn.Module, weights: dict[str, Tensor], x: Tensor) -> Tensor:
    """What a network answers with these weights, or the first of several answers."""
    out = torch.func.functional_call(net, weights, (x,))
    first: Tensor = out[0] if isinstance(out, tuple | list) else out
    return first


def same_answers(a: Tensor, b: Tensor) -> bool:
    """Whether two answers are one up to rounding."""
    return bool((a - b).abs().max() <= _TOLERANCE * a.abs().max().clamp(min=1e-30))


def in_double() -> AbstractContextManager[object]:
    """Where answers are compared to the last digits: nothing is rounded to single precision on the way."""
    return _InDouble()  # type: ignore[no-untyped-call]


class _InDouble(TorchDispatchMode):
    """Double precision all the way, also through norms that compute in single precision whatever they are given."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if func is torch.ops.aten._to_copy.default and named.get("dtype") is torch.float32:
            named = {**named, "dtype": torch.float64}
        return func(*args, **named)


@torch.no_grad()
def removal_flaw(spec: Spec, shape: Sequence[int], group: Group) -> str | None:
    """What goes wrong when one unit of each section of a group is removed; None if it is as if they were not read.

    A norm over all units of an input sees that some are gone, so that behind one only the answer's shape is compared.

    Example:
        >>> from fedfuse.nets.channels import channel_groups
        >>> (hidden,) = channel_groups(net := Spec("mlp", {"inputs": 4, "hidden": [3], "classes": 2}), (4,))
        >>> removal_flaw(net, (4,), hidden) is None
        True
    """
    with seeded(0, "trace"):
        net = without_noise(spec.build())
        randomize(net)
        x = drawn_inputs(spec, tuple(shape))
    weights = dict(net.state_dict())
    room = group.size // group.sections
    kept = [u for u in range(group.size) if (u + 1) % room] if room > 1 else list(range(group.size))
    gone = [u for u in range(group.size) if u not in set(kept)]
    small, rest = keep_channels(spec, weights, {group: kept})
    want = answer(net, drop_tied_names(spec, _without_readers(weights, group, gone)), x)
    try:
        smaller = without_noise(small.build())
        found = answer(smaller, drop_tied_names(small, rest), x)
    except (RuntimeError, ValueError, IndexError) as why:
        return f"the network then fails ({error_text(why)})"
    if found.shape != want.shape:
        return f"it then answers {tuple(found.shape)} numbers for {len(x)} inputs instead of {tuple(want.shape)}"
    across = any(_normalizes_units(net, place.tensor) for place in group.makers)
    return (
        None if across or same_answers(want, found) else "what is left then answers otherwise than if nobody read them"
    )


def _without_readers(weights: dict[str, Tensor], group: Group, gone: Sequence[int]) -> dict[str, Tensor]:
    """The weights with zeros wherever one of these units is read."""
    deaf = dict(weights)
    for place in group.readers:
        t = deaf[place.tensor].clone()
        if place.blocks > 1:
            share = group.size // place.blocks
            for unit in gone:
                t.chunk(place.blocks)[unit // share][:, unit % share] = 0
        else:
            positions = [place.offset + u * place.per + k for u in gone for k in range(place.per)]
            t.index_fill_(place.axis, torch.tensor(positions, dtype=torch.long), 0)
        deaf[place.tensor] = t
    return deaf


def _normalizes_units(net: nn.Module, tensor: str) -> bool:
    part = net.get_submodule(tensor.rpartition(".")[0])
    return isinstance(part, nn.LayerNorm) or (isinstance(part, nn.GroupNorm) and part.num_groups < part.num_channels)

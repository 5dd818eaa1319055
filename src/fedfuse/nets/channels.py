"""Channels: the axes of a network that must be permuted, removed or grown together.

A hidden unit lives in several tensors: a row of the weight that makes it, its bias, its norm's statistics, a column
of every weight that reads it. A `Group` lists those locations for all units of one kind; moving them together leaves
the network's function as it was (permutation), or removes or adds whole units.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor, nn

from fedfuse.core.messages import Form
from fedfuse.core.params import Layout, Params
from fedfuse.core.posterior import Diag, Geometry, Kron, Posterior
from fedfuse.core.spec import Spec
from fedfuse.errors import ConfigError
from fedfuse.linalg.factor import Factor, LowRank, as_stack, dense
from fedfuse.nets.kronecker import Block, blocks_in

if TYPE_CHECKING:
    from fedfuse.nets.trace import Trace


Order: TypeAlias = Tensor | Sequence[int]

EMPTY = -1  # stands in an order for a unit that is empty


@dataclass(frozen=True, slots=True)
class Location:
    """Where the units of a group stand in one tensor.

    Unit u stands on `axis` at offset + u·per … offset + (u + 1)·per − 1: `per` is the number of pixels behind a
    flatten, `offset` what comes before in a concatenation.

    Attributes:
        tensor: a name of the state dict.
        axis: which axis.
        per: adjacent positions of one unit.
        offset: position of the first unit.
        blocks: for what a grouped convolution reads, the number of its groups: its rows fall into as many equal
            blocks, and the axis of each holds that block's share of the units only.
        reads: whether the tensor reads the units; else it makes them or belongs to them.
    """

    tensor: str
    axis: int
    per: int = 1
    offset: int = 0
    blocks: int = 1
    reads: bool = False

    def rows(self, params: Params, size: int) -> Tensor:
        """Everything this tensor knows of each unit, one row per unit.

        Example:
            >>> Location("w", axis=1, per=2).rows({"w": torch.arange(8.0).view(2, 4)}, size=2)
            tensor([[0., 4., 1., 5.],
                    [2., 6., 3., 7.]])
        """
        t = params[self.tensor]
        if self.blocks > 1:
            return t.view(self.blocks, -1, *t.shape[1:]).transpose(1, 2).reshape(size, -1)
        return t.narrow(self.axis, self.offset, size * self.per).movedim(self.axis, 0).reshape(size, -1)


@dataclass(frozen=True, slots=True)
class Group:
    """Hidden units of one kind and every location they have.

    Attributes:
        name: the layer that makes them.
        size: how many there are.
        locations: where they stand.
        sections: into how many equal, adjacent parts they fall that cannot trade units (a grouped convolution and a
            GroupNorm have walls); one for all others.
    """

    name: str
    size: int
    locations: tuple[Location, ...]
    sections: int = 1

    @property
    def makers(self) -> tuple[Location, ...]:
        """What makes a unit, and what belongs to it alone: weights' rows, biases, norms."""
        return tuple(p for p in self.locations if not p.reads)

    @property
    def readers(self) -> tuple[Location, ...]:
        """What reads a unit: columns of the weights behind it."""
        return tuple(p for p in self.locations if p.reads)


def channel_groups(network: Spec | nn.Module, shape: Sequence[int]) -> tuple[Group, ...]:
    """The groups of axes of a network that move together; its classes and its inputs are in none of them.

    They are found by following an input through the network, and proved by permuting every group. A module with an
    attribute `channel_groups` is taken at its word, and held to it. They are kept for each spec. What stands in no
    group, because an operation tells its units apart, `units_left_out` names.

    Args:
        network: the network.
        shape: the shape of one input.

    Raises:
        ConfigError: if the network cannot be followed.

    Example:
        >>> [(g.name, g.size) for g in channel_groups(Spec("lenet"), (1, 28, 28))]
        [('conv1', 6), ('conv2', 16), ('fc1', 120), ('fc2', 84)]
        >>> channel_groups(Spec("lenet"), (1, 28, 28))[1].readers
        (Location(tensor='fc1.weight', axis=1, per=16, offset=0, blocks=1, reads=True),)
    """
    return _cached_trace(network if isinstance(network, Spec) else Spec.of(network), tuple(shape)).groups


def units_left_out(network: Spec | nn.Module, shape: Sequence[int]) -> tuple[str, ...]:
    """The weights that make hidden units which no group can move, each with the reason: "enter.weight (cumsum)"."""
    return _cached_trace(network if isinstance(network, Spec) else Spec.of(network), tuple(shape)).left_out


@lru_cache(maxsize=64)
def _cached_trace(spec: Spec, shape: tuple[int, ...]) -> Trace:
    from fedfuse.nets.trace import trace  # the tracer knows groups

    return trace(spec, shape)


def permute_group(params: Params, group: Group, order: Order) -> dict[str, Tensor]:
    """The weights with a group's units in another order: unit i is what unit order[i] was.

    Example:
        >>> group = Group("fc1", 2, (Location("fc1.weight", 0), Location("fc2.weight", 1, reads=True)))
        >>> net = {"fc1.weight": torch.tensor([[1.0], [2.0]]), "fc2.weight": torch.tensor([[3.0, 4.0]])}
        >>> permute_group(net, group, [1, 0])["fc2.weight"]
        tensor([[4., 3.]])
    """
    units = _units(group, order)
    if sorted(units.tolist()) != list(range(group.size)):
        raise ConfigError(f"group {group.name!r}: an order must hold each of {group.size} units once")
    return move_units(params, {group: units})


def keep_units(params: Params, group: Group, units: Order) -> dict[str, Tensor]:
    """The weights with only these units of a group, in this order; the others are removed from every tensor.

    Example:
        >>> group = Group("fc1", 2, (Location("fc1.weight", 0), Location("fc2.weight", 1, reads=True)))
        >>> net = {"fc1.weight": torch.tensor([[1.0], [2.0]]), "fc2.weight": torch.tensor([[3.0, 4.0]])}
        >>> keep_units(net, group, [1])["fc2.weight"]
        tensor([[4.]])
    """
    chosen = _units(group, units)
    if not len(chosen) or len(set(chosen.tolist())) < len(chosen) or int(chosen.min()) < 0:
        raise ConfigError(f"group {group.name!r}: what is kept must be at least one unit, and none twice")
    return move_units(params, {group: chosen})


def move_units(params: Params, moves: Mapping[Group, Order]) -> dict[str, Tensor]:
    """The weights with units wherever they are wanted: permuted, removed and grown in one go.

    Per group, new unit i is what unit order[i] was, or empty where order[i] is −1. An empty unit is zero, with
    variance one in a norm's statistics, and the smallest log-variance of the tensor. All groups are moved at
    once, since a unit removed before a concatenation shifts the units after it.

    Example:
        >>> group = Group("fc1", 2, (Location("fc1.weight", 0), Location("fc2.weight", 1, reads=True)))
        >>> net = {"fc1.weight": torch.tensor([[1.0], [2.0]]), "fc2.weight": torch.tensor([[3.0, 4.0]])}
        >>> move_units(net, {group: [1, -1, 0]})["fc2.weight"]
        tensor([[4., 0., 3.]])
    """
    orders = {group: _units(group, order) for group, order in moves.items()}
    result = dict(params)
    for (tensor, axis), here in by_axis(orders):
        if tensor not in params:
            raise ConfigError(f"group {here[0][0].name!r} stands in {tensor!r}, which the weights do not have")
        result[tensor] = _on_axis(result[tensor], tensor, axis, here, orders)
    return result


def move_posterior_units(posterior: Posterior, moves: Mapping[Group, Order], layout: Layout) -> Posterior:
    """A posterior with its units permuted or removed: mean, variances and Kronecker factors alike.

    A factor A knows what a layer reads, patch by patch and with the bias last, B what it makes: both are moved as the
    columns and the rows of [W | b] are, and A ⊗ B stays the precision of the moved weights. Removing units conditions
    a Kronecker geometry on their absence.
    """
    mean = move_units(posterior.mean, moves)
    return replace(
        posterior, mean=mean, geometry=move_geometry_units(posterior.geometry, posterior.mean, moves, layout)
    )


def keep_channels(spec: Spec, params: Params, keep: Mapping[Group, Order]) -> tuple[Spec, dict[str, Tensor]]:
    """The network with only these units of each group, and the spec that builds it.

    Example:
        >>> spec = Spec("mlp", {"inputs": 4, "hidden": [3], "classes": 2})
        >>> (group,) = channel_groups(spec, (4,))
        >>> small, weights = keep_channels(spec, spec.build().state_dict(), {group: [0, 2]})
        >>> small.kept, small.build()
        ({'fc1': (0, 2)}, Sequential(
          (flatten): Flatten(start_dim=1, end_dim=-1)
          (fc1): Linear(in_features=4, out_features=2, bias=True)
          (fc1_relu): ReLU()
          (classifier): Linear(in_features=2, out_features=2, bias=True)
        ))
    """
    weights = move_units(params, keep)
    orders = {group: _units(group, units) for group, units in keep.items()}
    remain: dict[str, tuple[int, ...]] = {}
    for (tensor, axis), here in by_axis(orders):
        if spec.layout.roles.get(tensor) == "weight" and not here[0][1].reads:
            layer = layer_name(tensor)
            before = spec.kept.get(layer, tuple(range(params[tensor].shape[axis])))
            remain[layer] = tuple(before[i] for i in _index(params[tensor].shape[axis], here, orders).tolist())
    return spec.with_shapes_of(weights, remain), weights


def layer_name(tensor: str) -> str:
    """The name under which a spec remembers the channels of a weight: its module's, or its own.

    Example:
        >>> layer_name("conv1.weight"), layer_name("kernel")
        ('conv1', 'kernel')
    """
    path, _, leaf = tensor.rpartition(".")
    return path if path and leaf == "weight" else tensor


def _units(group: Group, order: Order) -> Tensor:
    """The order as a tensor, if every unit stays in its section."""
    units = torch.as_tensor(order, dtype=torch.int64, device="cpu")
    if units.ndim != 1 or bool(((units < EMPTY) | (units >= group.size)).any()):
        raise ConfigError(f"group {group.name!r} has units 0 to {group.size - 1}; the order names others")
    if group.sections > 1:
        section_size = group.size // group.sections
        section = torch.arange(group.sections).repeat_interleave(max(1, len(units) // group.sections))
        if len(units) % group.sections or bool(((units != EMPTY) & (units // section_size != section)).any()):
            raise ConfigError(
                f"group {group.name!r} falls into {group.sections} sections of {section_size} units, between which "
                "units cannot trade places; "
                "give each section as many units of its own"
            )
    return units


AxisUnits: TypeAlias = list[tuple[Group, Location]]


def by_axis(groups: Iterable[Group]) -> Iterator[tuple[tuple[str, int], AxisUnits]]:
    """The locations of some groups on each axis of each tensor, from the front."""
    every = [(group, location) for group in groups for location in group.locations]
    every.sort(key=lambda at: (at[1].tensor, at[1].axis, at[1].offset))
    for key, here in groupby(every, key=lambda at: (at[1].tensor, at[1].axis)):
        yield key, list(here)


def _on_axis(t: Tensor, name: str, axis: int, here: AxisUnits, orders: Mapping[Group, Tensor]) -> Tensor:
    """One tensor, its units rearranged on one axis."""
    group, location = here[0]
    if location.blocks > 1:
        return _in_blocks(t, location.blocks, orders[group], group.size)
    index = _index(t.shape[axis], here, orders).to(t.device)
    moved = t.index_select(axis, index.clamp(min=0))
    return moved if bool((index >= 0).all()) else moved.index_fill_(axis, (index < 0).nonzero()[:, 0], _blank(name, t))


def _index(length: int, here: AxisUnits, orders: Mapping[Group, Tensor]) -> Tensor:
    """For every new position on an axis the old one, or −1."""
    parts, done = [], 0
    for group, location in here:
        parts.append(torch.arange(done, location.offset))
        units = orders[group][:, None]
        positions = location.offset + units * location.per + torch.arange(location.per)
        parts.append(torch.where(units == EMPTY, EMPTY, positions).flatten())
        done = location.offset + group.size * location.per
    if done > length:
        group, location = here[-1]
        raise ConfigError(
            f"group {group.name!r} stands at {done} positions of {location.tensor!r} on axis {location.axis}, "
            f"which has {length}; the weights are of another network"
        )
    return torch.cat([*parts, torch.arange(done, length)])


def _in_blocks(t: Tensor, blocks: int, units: Tensor, size: int) -> Tensor:
    """The weight of a grouped convolution, what each of its groups reads rearranged."""
    share = size // blocks
    local = torch.where(units == EMPTY, EMPTY, units % share).view(blocks, -1).to(t.device)
    parts = []
    for block, index in zip(t.chunk(blocks), local, strict=True):
        parts.append(block.index_select(1, index.clamp(min=0)).index_fill_(1, (index < 0).nonzero()[:, 0], 0))
    return torch.cat(parts)


def _blank(name: str, t: Tensor) -> float:
    """What an empty unit has in this tensor."""
    leaf = name.rpartition(".")[2]
    if leaf.endswith("log_variance"):
        return float(t.min())
    return 1.0 if leaf == "running_var" else 0.0


def move_geometry_units(geometry: Geometry, mean: Params, moves: Mapping[Group, Order], layout: Layout) -> Geometry:
    """A posterior's geometry with its units permuted or removed, around a mean that has not moved yet."""
    orders = {group: _units(group, order) for group, order in moves.items()}
    if not isinstance(geometry, Diag | Kron):
        return geometry
    if any(bool((units == EMPTY).any()) for units in orders.values()):
        raise ConfigError("a geometry cannot grow: nobody knows how sharply an empty unit is believed")
    if isinstance(geometry, Kron):
        blocks = {block.name: block for block in blocks_in(layout)}
        return Kron(_MovedFactors(geometry.factors, mean, blocks, orders, dict(by_axis(orders))))
    known = {replace(g, locations=places_in(geometry.variance, g)): order for g, order in orders.items()}
    return Diag(move_units(geometry.variance, known))


def places_in(params: Params, group: Group) -> tuple[Location, ...]:
    """A group's locations in these tensors."""
    return tuple(place for place in group.locations if place.tensor in params)


@dataclass(frozen=True, slots=True, eq=False)
class _MovedFactors(Mapping[str, tuple[Factor, Factor]]):
    """Kronecker factors whose rows and columns are rearranged whenever they are read, and not kept."""

    factors: Mapping[str, tuple[Factor, Factor]]
    mean: Params
    blocks: Mapping[str, Block]
    orders: Mapping[Group, Tensor]
    by_axis: Mapping[tuple[str, int], AxisUnits]

    def __getitem__(self, name: str) -> tuple[Factor, Factor]:
        A, B = (as_stack(factor) for factor in self.factors[name])
        places = self._places(self.blocks[name])
        inn, out = self.blocks[name].sizes({n: Form.of(t) for n, t in self.mean.items()})
        # an entry's place is (group · out + row) · inn + column; a matrix's first row and column tell all of its
        groups, rows, columns = places[:, 0, 0] // (out * inn), places[:, :, 0] // inn % out, places[:, 0] % inn
        return _permute_square(A[groups], columns), _permute_square(B[groups], rows)

    def _places(self, block: Block) -> Tensor:
        """Where every entry of the moved matrices [W | b] stood before."""
        # A factor's rows and columns have no location of their own. So a network is made whose weights are the places
        # of its weights, in float64, which is exact up to 2⁵³; its units are moved, and the places are read off.
        like = {n: self.mean[n].double() for n in block.tensors}
        before = block.matrices(like)
        places = block.split(torch.arange(before.numel(), dtype=torch.float64).view_as(before), like)
        for (tensor, axis), here in self.by_axis.items():
            if tensor in places:
                places[tensor] = _on_axis(places[tensor], tensor, axis, here, self.orders)
        depthwise = block.groups > 1 and before.shape[1] == 1  # one matrix per channel, and whole matrices go
        groups = len(places[block.weight]) if depthwise else block.groups
        return replace(block, groups=groups).matrices(places).long()

    def __iter__(self) -> Iterator[str]:
        return iter(self.factors)

    def __len__(self) -> int:
        return len(self.factors)


def _permute_square(matrices: Factor, index: Tensor) -> Factor:
    """A stack of square matrices with rows and columns in another order; one of one matrix is that matrix."""
    if isinstance(matrices, LowRank):
        return _unstack(matrices.reorder(index.to(matrices.rest.device)))
    whole = dense(matrices)  # another order breaks blocks up
    index = index.to(whole.device)
    return _unstack(whole.gather(1, _wide(index, whole.shape[2])).gather(2, _wide(index, index.shape[1]).mT))


def _wide(index: Tensor, width: int) -> Tensor:
    return index[..., None].expand(*index.shape, width)


def _unstack(factor: Factor) -> Factor:
    return factor[0] if len(factor) == 1 else factor


Channels: TypeAlias = Mapping[str, Sequence[int]]  # by layer, which of its original channels there are


def carry_over(params: Params, before: Channels, spec: Spec, shape: tuple[int, ...]) -> dict[str, Tensor] | None:
    """Tensors in the shapes of a network's own, such as momenta, with only the channels the network still has.

    Args:
        params: by the network's names; there need not be all.
        before: the channels they have, of the layers that were pruned by then.
        spec: the network as it is now.
        shape: the shape of one input, by which the network is followed.

    Returns:
        The tensors in the network's present shapes; None where its spec does not say how they came about.

    Example:
        >>> import torch
        >>> whole = Spec("mlp", {"inputs": 4, "hidden": [3], "classes": 2})
        >>> (group,) = channel_groups(whole, (4,))
        >>> small, _ = keep_channels(whole, whole.build().state_dict(), {group: [0, 2]})
        >>> carry_over({"fc1.bias": torch.tensor([5.0, 6.0, 7.0])}, {}, small, (4,))
        {'fc1.bias': tensor([5., 7.])}
    """
    whole = replace(spec, surgery={}, kept={})
    try:
        then = whole
        if before:
            pruned = _moves(channel_groups(whole, shape), {}, before)
            then = keep_channels(whole, whole.skeleton().state_dict(), pruned)[0]
        moves = _moves(channel_groups(then, shape), before, spec.kept)
        here = {replace(group, locations=places_in(params, group)): units for group, units in moves.items()}
        moved = move_units(params, here)
    except (ConfigError, RuntimeError, IndexError):  # channels that are not those of this network
        return None
    wanted = spec.skeleton().state_dict()
    return moved if all(n in wanted and t.shape == wanted[n].shape for n, t in moved.items()) else None


def _moves(groups: Sequence[Group], before: Channels, after: Channels) -> dict[Group, list[int]]:
    """Of each group whose layers were pruned, the units that stay."""
    moves: dict[Group, list[int]] = {}
    for group in groups:
        for place in group.makers:
            layer = layer_name(place.tensor)
            if layer in after:
                moves[group] = _units_that_stay(group, place, before.get(layer), after[layer])
    return moves


def _units_that_stay(group: Group, place: Location, have: Sequence[int] | None, stay: Sequence[int]) -> list[int]:
    """The units of which a layer has all channels still."""
    if have is not None and not set(stay) <= set(have):
        raise ConfigError(f"layer {layer_name(place.tensor)!r} has channels now that it had not before")
    positions = range(place.offset, place.offset + group.size * place.per)
    channels = [i if have is None else have[i] for i in positions]
    return [u for u in range(group.size) if set(stay).issuperset(channels[u * place.per : (u + 1) * place.per])]

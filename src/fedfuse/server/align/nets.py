"""Networks to be aligned: their hidden units, and how units are reordered or blended.

A matching finds `Moves` for a `Net`, and `move_update` carries them out on a client's update.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from fedfuse.core.inputs import shape_read
from fedfuse.core.messages import ClientUpdate
from fedfuse.core.params import Params
from fedfuse.core.posterior import Flat, Posterior
from fedfuse.core.spec import Spec
from fedfuse.errors import ConfigError
from fedfuse.nets.channels import (
    AxisUnits,
    Group,
    Location,
    by_axis,
    channel_groups,
    move_geometry_units,
    move_units,
    units_left_out,
)
from fedfuse.wire.codec import LazyParams, forms_of


@dataclass(frozen=True, slots=True, eq=False)
class Coupling:
    """Units of which each new one is a blend of old ones.

    Attributes:
        make: new × old, rows sum to one: of which old units a new one is made.
        read: new × old: what read old unit j reads new unit i with this share of its weight.
    """

    make: Tensor
    read: Tensor


Move: TypeAlias = Tensor | Coupling
Moves: TypeAlias = Mapping[str, Move]  # by the name of the group; a tensor is an order of units


@dataclass(frozen=True, slots=True, eq=False)
class Net:
    """One network to be aligned.

    Attributes:
        client: whose it is, for sentences.
        spec: how to run it.
        groups: its hidden units.
        params: its weights.
        left_out: weights whose units stand in no group, with the reason of each.
    """

    client: str
    spec: Spec
    groups: tuple[Group, ...]
    params: Params
    left_out: tuple[str, ...] = ()

    @classmethod
    def of(cls, update: ClientUpdate, shape: Sequence[int]) -> Net:
        """The network of an update."""
        own = shape_read(update.spec, tuple(shape))
        weights = frozenset(update.spec.layout.with_role("weight"))
        # places of a buffer that only its mean reads could trade too, but no weight tells one from another
        groups = tuple(
            group
            for group in channel_groups(update.spec, own)
            if any(place.tensor in weights for place in group.locations)
        )
        return cls(update.client, update.spec, groups, update.posterior.mean, units_left_out(update.spec, own))

    @property
    def widths(self) -> tuple[int, ...]:
        """How many units each group has."""
        return tuple(group.size for group in self.groups)

    def matched_tensors(self) -> dict[str, Tensor]:
        """The tensors that tell units apart, in float32: weights, biases and norms that stand in some group."""
        matched = set(self.spec.layout.with_role("weight", "bias", "norm"))
        names = {place.tensor for group in self.groups for place in group.locations} & matched
        return {name: self.params[name].float() for name in self.params if name in names}


def check_alike(nets: Sequence[Net], any_width: bool) -> None:
    """Refuse networks whose units have no counterparts.

    Raises:
        ConfigError: naming the first client whose network is another one.
    """
    first = nets[0]
    for net in nets[1:]:
        if [g.name for g in net.groups] != [g.name for g in first.groups]:
            raise ConfigError(
                f"{net.client} has {len(net.groups)} kinds of hidden units ({_names(net)}) and {first.client} has "
                f"{len(first.groups)} ({_names(first)}); only networks of one depth can be aligned"
            )
        if any_width:
            continue
        for mine, theirs in zip(net.groups, first.groups, strict=True):
            if mine.size != theirs.size:
                raise ConfigError(
                    f"{net.client} has {mine.size} units in {mine.name!r} and {first.client} has {theirs.size}; "
                    "align unequal widths by transport"
                )


def _names(net: Net) -> str:
    return ", ".join(group.name for group in net.groups[:6]) + (", …" if len(net.groups) > 6 else "")


def diagonal_blocks(matrix: Tensor, sections: int) -> list[Tensor]:
    """What units of one section have to do with units of the same: only these may trade places.

    Example:
        >>> [block.tolist() for block in diagonal_blocks(torch.arange(8.0).view(4, 2), 2)]
        [[[0.0], [2.0]], [[5.0], [7.0]]]
    """
    new, old = (size // sections for size in matrix.shape)
    return [matrix[k * new : (k + 1) * new, k * old : (k + 1) * old] for k in range(sections)]


def move_update(update: ClientUpdate, groups: Sequence[Group], moves: Moves, spec: Spec) -> ClientUpdate:
    """The update with its units at their new places, as an update of the network `spec`.

    Orders carry mean, variances, Kronecker factors and evidence about single weights along; blends carry the mean only,
    and evidence about weights they have blended is left out.
    """
    posterior = update.posterior
    here = {g: moves[g.name] for g in groups if g.name in moves}
    orders = {g: m for g, m in here.items() if isinstance(m, Tensor)}
    if len(orders) == len(here):
        notes = _reorder_notes(update.notes, posterior.mean, orders)
        if all(order.equal(torch.arange(group.size)) for group, order in orders.items()):
            return replace(update, spec=spec, notes=notes)
        geometry = move_geometry_units(posterior.geometry, posterior.mean, orders, update.spec.layout)
        mean = LazyParams(forms_of(posterior.mean), _FetchReordered(posterior.mean, orders))
        return replace(update, posterior=Posterior(mean, geometry), spec=spec, notes=notes)
    if not isinstance(posterior.geometry, Flat):
        raise ConfigError(
            f"{update.client}: units that are blended carry no {type(posterior.geometry).__name__} geometry; "
            "align by exact transport between equal widths, or fuse by a plain mean"
        )
    moved_names = {place.tensor for group in here for place in group.locations}
    if tied := [same for same in update.spec.layout.tied if moved_names & set(same)]:
        raise ConfigError(
            f"{update.client}: {' and '.join(tied[0])} are one tensor, whose units can be moved but not blended; "
            "align by weights or activations"
        )
    blended = blend_units(dict(posterior.mean), groups, moves, frozenset(update.spec.layout.with_role("log_variance")))
    about = _weights_meant(update.notes, posterior.mean)
    notes = {n: t for n, t in update.notes.items() if about.get(n) not in moved_names}
    return replace(update, posterior=Posterior(blended), spec=spec, notes=notes)


def _reorder_notes(notes: Params, mean: Params, orders: Mapping[Group, Tensor]) -> Params:
    """The evidence, with every entry about single weights ("kind/tensor", of the tensor's shape) reordered too."""
    if not notes:
        return notes
    moves = _moves_by_tensor(orders)
    about = {name: tensor for name, tensor in _weights_meant(notes, mean).items() if tensor in moves}
    return {**notes, **{name: _reorder_all(notes[name], moves[tensor]) for name, tensor in about.items()}}


def _weights_meant(notes: Params, mean: Params) -> dict[str, str]:
    """The notes with an entry for every single weight of a tensor, and that tensor's name."""
    forms = forms_of(mean)
    about = {name: name.partition("/")[2] for name in notes}
    return {n: of for n, of in about.items() if of in forms and tuple(notes[n].shape) == forms[of].shape}


PlaceOrder: TypeAlias = tuple[Location, Tensor]


def _moves_by_tensor(orders: Mapping[Group, Tensor]) -> dict[str, list[PlaceOrder]]:
    moves: dict[str, list[PlaceOrder]] = {}
    for group, order in orders.items():
        for place in group.locations:
            moves.setdefault(place.tensor, []).append((place, order))
    return moves


def _reorder_all(t: Tensor, moves: Sequence[PlaceOrder]) -> Tensor:
    for place, order in moves:
        t = reorder_tensor(t, place, order)
    return t


class _FetchReordered:
    """Fetches pieces of reordered tensors; caches the last tensor, since its pieces are fetched one after the other."""

    __slots__ = ("last", "moves", "params")

    def __init__(self, params: Params, orders: Mapping[Group, Tensor]) -> None:
        self.params, self.moves = params, _moves_by_tensor(orders)
        self.last: tuple[str, Tensor] = ("", torch.empty(0))

    def __call__(self, name: str, begin: int, end: int) -> Tensor:
        """Elements [begin, end) of one tensor, laid flat."""
        last_name, flat = self.last
        if last_name != name:
            flat = _reorder_all(self.params[name], self.moves.get(name, ())).reshape(-1)
            self.last = (name, flat)
        return flat[begin:end]


def reorder_tensor(t: Tensor, place: Location, order: Tensor) -> Tensor:
    """One tensor with the units of one place in another order.

    Example:
        >>> reorder_tensor(torch.arange(4.0).view(1, 4), Location("w", 1, per=2), torch.tensor([1, 0]))
        tensor([[2., 3., 0., 1.]])
    """
    if place.blocks > 1 or len(order) * place.per != t.shape[place.axis]:
        group = Group(place.tensor, len(order), (place,), place.blocks)
        return move_units({place.tensor: t}, {group: order})[place.tensor]
    index = order if place.per == 1 else (order[:, None] * place.per + torch.arange(place.per)).flatten()
    return t.index_select(place.axis, index)


def blend_units(
    params: Params, groups: Sequence[Group], moves: Moves, log_variances: frozenset[str] = frozenset()
) -> dict[str, Tensor]:
    """The weights with every moved unit a blend of old ones.

    With blends M (make) and R (read) of a layer's outputs and inputs, W becomes M W Rᵀ (Singh and Jaggi 2020,
    eq. 4). Log-variances are those of independent weights blended so: squares of the blends act on variances.
    """
    result = dict(params)
    for (name, axis), here in by_axis([g for g in groups if g.name in moves]):
        if name not in result:
            continue
        t, is_log_variance = result[name], name in log_variances
        wide = t.exp().float() if is_log_variance else t.float()
        shares = {g.name: _square_shares(moves[g.name]) if is_log_variance else moves[g.name] for g, _ in here}
        blend = _blend_axis(wide, axis, here, shares)
        result[name] = (blend.log() if is_log_variance else blend).to(t.dtype)
    return result


def _square_shares(move: Move) -> Move:
    return move if isinstance(move, Tensor) else Coupling(move.make.square(), move.read.square())


def _blend_axis(t: Tensor, axis: int, here: AxisUnits, moves: Moves) -> Tensor:
    """One axis of a tensor, unit by unit blended; what stands between the groups stays."""
    parts, done = [], 0
    for group, place in here:
        if place.blocks > 1:
            return _blend_blocks(t, place.blocks, moves[group.name])
        parts.append(t.narrow(axis, done, place.offset - done))
        done = place.offset + group.size * place.per
        units = t.narrow(axis, place.offset, done - place.offset).movedim(axis, 0)
        move, old = moves[group.name], units.reshape(group.size, -1)
        rows = old[move] if isinstance(move, Tensor) else (move.read if place.reads else move.make).to(old) @ old
        parts.append(rows.reshape(-1, *units.shape[1:]).movedim(0, axis))
    return torch.cat([*parts, t.narrow(axis, done, t.shape[axis] - done)], axis)


def _blend_blocks(t: Tensor, blocks: int, move: Move) -> Tensor:
    """What the groups of a convolution read, each within its own units."""
    matrix = torch.eye(len(move))[move] if isinstance(move, Tensor) else move.read
    pairs = zip(diagonal_blocks(matrix, blocks), t.chunk(blocks), strict=True)
    return torch.cat([torch.einsum("ij,oj...->oi...", share.to(t), chunk) for share, chunk in pairs])

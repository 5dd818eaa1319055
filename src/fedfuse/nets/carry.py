"""Tensors remembered of a network, brought to the channels that a pruning has left of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from torch import Tensor

from fedfuse.core.params import Params
from fedfuse.core.spec import Spec
from fedfuse.errors import ConfigError
from fedfuse.nets.channels import Group, Location, channel_groups, keep_channels, layer_name, move_units

Channels: TypeAlias = Mapping[str, Sequence[int]]  # by layer, which of its original channels there are


def carry_over(params: Params, before: Channels, spec: Spec, shape: tuple[int, ...]) -> dict[str, Tensor] | None:
    """Tensors that stand beside a network's own, with only the channels the network still has.

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
        then = _with_channels(whole, before, shape)
        moves = _moves(channel_groups(then, shape), before, spec.kept)
        here = {replace(g, locations=tuple(p for p in g.locations if p.tensor in params)): u for g, u in moves.items()}
        moved = move_units(params, here)
    except (ConfigError, RuntimeError, IndexError):  # channels that are not those of this network
        return None
    wanted = spec.skeleton().state_dict()
    return moved if all(n in wanted and t.shape == wanted[n].shape for n, t in moved.items()) else None


def _with_channels(whole: Spec, kept: Channels, shape: tuple[int, ...]) -> Spec:
    """The network with only these channels."""
    if not kept:
        return whole
    moves = _moves(channel_groups(whole, shape), {}, kept)
    return keep_channels(whole, whole.skeleton().state_dict(), moves)[0]


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

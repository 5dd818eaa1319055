"""Whether a network computes what it should when units are gone: tried before anybody trains."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fedfuse.core.rng import seeded
from fedfuse.core.spec import Spec, drop_tied_names
from fedfuse.errors import error_text
from fedfuse.nets.channels import Group, keep_channels
from fedfuse.nets.trace import answer, drawn_inputs, randomize, same_answers, without_noise


@torch.no_grad()
def removal_flaw(spec: Spec, shape: Sequence[int], group: Group) -> str | None:
    """What goes wrong when one unit of each section of a group is removed; None if it is as if nobody read them.

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

"""Whose turn it is when a network is fitted layer by layer, from the bottom up and one exchange each."""

from __future__ import annotations

from fedfuse.core.params import Params
from fedfuse.core.spec import Spec
from fedfuse.nets.blocks import Block, mixing_blocks
from fedfuse.nets.head import linear_layer

TURN = "turn"  # the kind of server memory that says how many layers are done


def block_in_turn(spec: Spec, memory: Params, head: str = "") -> Block | None:
    """The layer that is fitted next, in the order in which the network names its layers; None for the head.

    Args:
        spec: the network.
        memory: what the server publishes.
        head: the linear layer that comes last, by name; by default the last linear one.

    Example:
        >>> import torch
        >>> net = Spec("mlp", {"inputs": 4, "hidden": [3], "classes": 2})
        >>> block_in_turn(net, {}).name, block_in_turn(net, {f"{TURN}/done": torch.tensor(1)})
        ('fc1', None)
    """
    below = _below(spec, head)
    done = turns_done(memory)
    return below[done] if done < len(below) else None


def turns_done(memory: Params) -> int:
    """How many layers are done."""
    return int(memory[f"{TURN}/done"]) if f"{TURN}/done" in memory else 0


def count_turns(network: Spec, layer: str = "") -> int:
    """How many exchanges it takes: one for every layer that mixes what it reads, the head last.

    Example:
        >>> count_turns(Spec("lenet"))
        5
    """
    return len(_below(network, layer)) + 1


def _below(spec: Spec, head: str) -> list[Block]:
    last = linear_layer(spec.layout, head).weight
    return [block for block in mixing_blocks(spec) if block.weight != last]

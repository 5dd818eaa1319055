"""What training a network costs, counted from the network and not by a clock."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple

from torch import Tensor, nn

from fedfuse.core.inputs import run_once
from fedfuse.core.messages import Brief, ClientUpdate
from fedfuse.core.params import Params
from fedfuse.core.settings import LocalSettings
from fedfuse.core.spec import Spec
from fedfuse.core.state import part
from fedfuse.errors import ConfigError

_TRAINING = 3  # passes: forward, the gradient of what goes in, the gradient of the weights
MASK = "mask"  # the kind of memory that says which weights a network has


class LayerCost(NamedTuple):
    """What one input costs a linear layer or a convolution."""

    weights: int
    positions: int  # how often each weight is used: once, or once per pixel of what a convolution gives

    @property
    def products(self) -> int:
        """Multiplications."""
        return self.weights * self.positions


@lru_cache(maxsize=64)
def layer_costs(spec: Spec, shape: tuple[int, ...]) -> Mapping[str, LayerCost]:
    """What one input of this shape costs each linear layer and convolution, found by running the network once.

    Example:
        >>> layer_costs(Spec("lenet"), (1, 28, 28))["conv2"]
        LayerCost(weights=2400, positions=64)
    """
    module, found = spec.skeleton(), dict[str, LayerCost]()
    paths = {part: path for path, part in module.named_modules()}

    def count(layer: nn.Module, _: object, out: Tensor) -> None:
        weight = layer.weight
        if isinstance(weight, Tensor):
            found[paths[layer]] = LayerCost(weight.numel(), out.numel() // len(weight))

    kinds = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    hooks = [m.register_forward_hook(count) for m in paths if isinstance(m, kinds)]
    try:
        run_once(spec, shape)
    finally:
        for hook in hooks:
            hook.remove()
    return MappingProxyType(found)


def training_flops(spec: Spec, shape: tuple[int, ...]) -> int:
    """FLOPs to train on one input once: three passes of two operations per multiplication.

    Linear layers and convolutions are counted, as is usual; what norms and activations do is small beside them.

    Example:
        >>> training_flops(Spec("mlp", {"inputs": 4, "hidden": [3], "classes": 2}), (4,))
        108
    """
    return 2 * _TRAINING * sum(cost.products for cost in layer_costs(spec, shape).values())


def cohort_flops(updates: Iterable[ClientUpdate], settings: LocalSettings, shape: tuple[int, ...] | None) -> int | None:
    """FLOPs of a round's local training; a client has seen each of its rows once per epoch, unless it was stopped.

    A weight that a mask holds at zero is multiplied like any other, so masks save none. Nobody knows (None) where
    nobody knows what an input looks like, or a network reads none of that shape.
    """
    if shape is None:
        return None
    total = 0
    for u in updates:
        seen = min(settings.epochs * u.num_examples, u.steps * settings.batch_size)
        try:
            total += int(seen) * training_flops(u.spec, shape)
        except ConfigError:
            return None
    return total


class Spared(NamedTuple):
    """Bytes that sparse messages would not carry."""

    up: int
    down: int


def spared(brief: Brief) -> Spared:
    """What a sparse encoding of masked weights saves on one client, beside the dense messages of the simulation.

    Down go the weights a mask leaves, and the mask itself as one bit per weight where the dense brief has a byte; up
    come the weights it leaves, for both sides know the mask. Without masks nothing is saved.

    Example:
        >>> import torch
        >>> brief = Brief(0, Spec("mlp"), {"w": torch.zeros(16)}, {"mask/w": torch.arange(16) < 4})
        >>> spared(brief)
        Spared(up=48, down=62)
    """
    masks = {name: m for name, m in part(brief.memory, MASK).items() if name in brief.params}
    up = sum(int((~m.bool()).sum()) * brief.params[name].element_size() for name, m in masks.items())
    bits = sum(m.nbytes - math.ceil(m.numel() / 8) for m in masks.values())
    return Spared(up, up + bits)


def density(params: Params, memory: Params) -> float:
    """Which share of a network's weights its masks leave; 1 without masks.

    Example:
        >>> import torch
        >>> density({"w": torch.zeros(4), "b": torch.zeros(1)}, {"mask/w": torch.tensor([1, 0, 0, 0]).bool()})
        0.4
    """
    masks = part(memory, MASK)
    gone = sum(int((~m.bool()).sum()) for m in masks.values())
    return 1 - gone / sum(t.numel() for t in params.values())

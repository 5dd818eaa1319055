"""The layers of a network that have Kronecker factors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from torch import Tensor

from fedfuse.core.messages import Form
from fedfuse.core.params import Layer, Params
from fedfuse.core.spec import Spec

Factors = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Block:
    """A layer that has Kronecker factors.

    Attributes:
        layer: the layer.
        groups: into how many independent layers a grouped convolution falls; each has factors of its own, and they
            are stacked.
    """

    layer: Layer
    groups: int = 1

    def matrices(self, params: Params) -> Tensor:
        """[W | b] of every group, (groups × out × in)."""
        matrix = self.layer.matrix(params)
        return matrix.view(self.groups, -1, matrix.shape[1])

    def sizes(self, forms: Mapping[str, Form]) -> tuple[int, int]:
        """How many rows A and B have, per group."""
        out, *rest = forms[self.layer.weight].shape
        return math.prod(rest) + (self.layer.bias is not None), out // self.groups


@lru_cache(maxsize=16)
def blocks_of(spec: Spec) -> tuple[Block, ...]:
    """The layers of a network that have Kronecker factors: linear and convolution layers whose weights are their own.

    A tied weight belongs to several layers, and a frozen one is nobody's belief: those layers have none.

    Example:
        >>> [b.layer.name for b in blocks_of(Spec("mlp", {"inputs": 4, "hidden": [3], "classes": 2}))]
        ['fc1', 'classifier']
    """
    own = frozenset(spec.layout.trainable).difference(*spec.layout.tied)
    plain = (layer for layer in spec.layout.layers if layer.kind != "other")
    free = (layer for layer in plain if own >= {layer.weight, layer.bias or layer.weight})
    return tuple(Block(layer, layer.groups) for layer in free)

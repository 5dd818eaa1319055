"""The parts of a network that have Kronecker factors, each as a matrix [W | b] or several."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from fedfuse.core.factor import Factor
from fedfuse.core.messages import Form
from fedfuse.core.params import Layer, Layout, Params
from fedfuse.core.spec import Spec

Factors: TypeAlias = tuple[Factor, Factor]
Kind: TypeAlias = Literal["linear", "conv", "transposed", "turned", "embedding", "attention", "norm"]
Which: TypeAlias = Literal["all", "plain"]


@dataclass(frozen=True, slots=True)
class Block:
    """A part of a network that has Kronecker factors, as `groups` matrices [W | b] of one size (out × in).

    A linear layer and a convolution are what they are, a grouped convolution one matrix per group, and the packed
    projections of an attention three. A transposed convolution is the convolution with its kernel turned around that
    gives the same outputs from inputs set apart by its stride. An embedding reads one token at a time, so its input
    factor is diagonal; a norm's weight or bias is one row whose entries do not know each other.

    Attributes:
        name: what its factors are called: the layer's name, or the tensor's.
        kind: how its tensors become matrices.
        weight: the weight's name.
        bias: the bias's name, if it has one.
        groups: how many matrices; each has factors of its own, and they are stacked.
    """

    name: str
    kind: Kind
    weight: str
    bias: str | None = None
    groups: int = 1

    @property
    def tensors(self) -> tuple[str, ...]:
        """The names of its weight and bias."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    @property
    def has_diagonal_inputs(self) -> bool:
        """Whether A is diagonal, whatever the rows are."""
        return self.kind in ("embedding", "norm")

    def matrices(self, params: Params) -> Tensor:
        """[W | b] of every group, (groups × out × in)."""
        weight = self._as_rows(params[self.weight])
        if self.bias is None:
            return weight
        return torch.cat([weight, params[self.bias].view(self.groups, -1, 1)], -1)

    def split(self, matrices: Tensor, like: Params) -> dict[str, Tensor]:
        """The inverse of `matrices`, with the shapes and dtypes of `like`."""
        weight = like[self.weight]
        if self.bias is None:
            return {self.weight: self._from_rows(matrices, weight)}
        bias = matrices[..., -1].reshape(like[self.bias].shape).to(like[self.bias].dtype)
        return {self.weight: self._from_rows(matrices[..., :-1], weight), self.bias: bias}

    def sizes(self, forms: Mapping[str, Form]) -> tuple[int, int]:
        """How many rows A and B have, per group."""
        shape = forms[self.weight].shape
        if self.kind == "norm":
            return math.prod(shape), 1
        if self.kind == "embedding":
            return shape[0], shape[1]
        if self.kind == "turned":
            return shape[0] + (self.bias is not None), shape[1]
        if self.kind == "transposed":
            return shape[0] // self.groups * math.prod(shape[2:]) + (self.bias is not None), shape[1]
        return math.prod(shape[1:]) + (self.bias is not None), shape[0] // self.groups

    def _as_rows(self, weight: Tensor) -> Tensor:
        if self.kind == "norm":
            return weight.reshape(1, 1, -1)
        if self.kind in ("embedding", "turned"):
            return weight.mT[None]
        if self.kind == "transposed":
            return self._turn_kernel(weight.unflatten(0, (self.groups, -1))).transpose(1, 2).flatten(2)
        return weight.flatten(1).view(self.groups, -1, math.prod(weight.shape[1:]))

    def _from_rows(self, matrices: Tensor, like: Tensor) -> Tensor:
        if self.kind in ("embedding", "turned"):
            matrices = matrices[0].mT
        elif self.kind == "transposed":
            inputs, out, *kernel = like.shape
            apart = matrices.reshape(self.groups, out, inputs // self.groups, *kernel)
            matrices = self._turn_kernel(apart.transpose(1, 2))
        return matrices.reshape(like.shape).to(like.dtype)

    @staticmethod
    def _turn_kernel(weight: Tensor) -> Tensor:
        return weight.flip(tuple(range(3, weight.ndim)))


@lru_cache(maxsize=16)
def blocks_of(spec: Spec, which: Which = "all") -> tuple[Block, ...]:
    """The parts of a network that have Kronecker factors: those whose weights are their own.

    A tied weight belongs to several layers, and a frozen one is nobody's belief: those have none.

    Args:
        spec: the network.
        which: "all", or "plain": linear layers and convolutions alone.

    Example:
        >>> [b.name for b in blocks_of(Spec("mlp", {"inputs": 4, "hidden": [3], "classes": 2}))]
        ['fc1', 'classifier']
    """
    return blocks_in(spec.layout, which)


def mixing_blocks(spec: Spec, which: Which = "all") -> tuple[Block, ...]:
    """The parts of a network that mix what they read: all that have factors but norms."""
    return tuple(block for block in blocks_of(spec, which) if block.kind != "norm")


def blocks_in(layout: Layout, which: Which = "all") -> tuple[Block, ...]:
    """The same, read off a layout."""
    own = frozenset(layout.trainable).difference(*layout.tied)
    wanted = (b for b in _every_block(layout) if which == "all" or b.kind in ("linear", "conv"))
    return tuple(block for block in wanted if own.issuperset(block.tensors))


def _every_block(layout: Layout) -> Iterator[Block]:
    for layer in layout.layers:
        if layer.kind != "other":
            yield _block(layer, layout)
    for name in layout.with_role("norm"):
        yield Block(name, "norm", name)


def _block(layer: Layer, layout: Layout) -> Block:
    if layer.is_plain:
        return Block(layer.name, layer.kind, layer.weight, layer.bias, layer.groups)  # type: ignore[arg-type]
    bias = layer.weight.removesuffix("weight") + "bias"  # up.weight and up.bias, attn.in_proj_weight and …_bias
    has_bias = layer.kind != "embedding" and layout.roles.get(bias) == "bias"
    groups = 3 if layer.kind == "attention" else layer.groups
    return Block(layer.name, layer.kind, layer.weight, bias if has_bias else None, groups)  # type: ignore[arg-type]

"""Networks that run together: fully connected ones as one wide network, and what running any network costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedfuse.core.hooks import forward_hooks
from fedfuse.core.inputs import run_once
from fedfuse.core.params import Params
from fedfuse.core.spec import Spec

_POINTWISE = (nn.ReLU, nn.LeakyReLU, nn.ELU, nn.SELU, nn.GELU, nn.SiLU, nn.Softplus, nn.Tanh, nn.Sigmoid, nn.Identity)
_LIT = 0.9  # with fewer columns than this share in use, leaving the dark ones out pays for looking


@dataclass(frozen=True, slots=True)
class Program:
    """A fully connected network as a list of steps: the name of a linear layer, or a pointwise function.

    Attributes:
        steps: in order of execution.
        flattens: whether it reads inputs of any shape, or rows of features only.
    """

    steps: tuple[str | nn.Module, ...]
    flattens: bool

    @classmethod
    def of(cls, spec: Spec) -> Program | None:
        """The program of a plain chain of linear layers and pointwise functions; None for any other network."""
        steps: list[str | nn.Module] = []
        flattens = False
        for name, part in _chain(spec.skeleton()):
            if type(part) is nn.Linear:
                steps.append(name)
            elif isinstance(part, _POINTWISE):
                steps.append(part)
            elif isinstance(part, nn.Flatten) and part.start_dim == 1 and not steps:
                flattens = True
            elif not isinstance(part, nn.Dropout):  # which does nothing in evaluation
                return None
        return cls(tuple(steps), flattens) if steps and isinstance(steps[0], str) else None


class _Layer(NamedTuple):
    weight: Tensor  # members × out × in
    bias: Tensor | None  # members × out × 1


@dataclass(frozen=True, slots=True)
class Stack:
    """Members of one fully connected architecture as one wide network.

    AMS's Algorithm 1: the first layers stand on top of each other, W⁰ = [W¹⁰; W²⁰; …], so that all members read the
    inputs in one product; every later layer is block-diagonal, kept as its blocks, so that no member sees another.
    """

    program: Program
    layers: tuple[_Layer | nn.Module, ...]

    @classmethod
    def of(cls, spec: Spec, members: Sequence[Params]) -> Stack | None:
        """The members stacked, or None if theirs is no fully connected network."""
        program = Program.of(spec)
        if program is None:
            return None
        return cls(program, tuple(_stack_layer(members, s) if isinstance(s, str) else s for s in program.steps))

    @property
    def floats(self) -> int:
        """How many numbers per input are alive at a time: the inputs' own, or all members' at two layers."""
        weights = [layer.weight for layer in self.layers if isinstance(layer, _Layer)]
        widths = [0, *(w.shape[0] * w.shape[1] for w in weights)]
        return max(weights[0].shape[2] + widths[1], *(a + b for a, b in pairwise(widths)))

    def fits(self, x: Tensor) -> bool:
        """Whether these inputs can be read in one product."""
        return x.ndim == 2 or self.program.flattens

    def first(self, x: Tensor) -> Tensor:
        """The first layers' outputs, before any activation (members, width, n)."""
        layer = self.layers[0]
        assert isinstance(layer, _Layer)
        weight, rows = layer.weight.flatten(0, 1), x.flatten(1).to(layer.weight.dtype)
        if not x.requires_grad:  # a pixel that is dark in every input adds nothing, but its gradient would
            lit = rows.abs().amax(0).nonzero()[:, 0] if len(rows) else rows.new_zeros(0, dtype=torch.int64)
            if len(lit) < _LIT * rows.shape[1]:
                weight, rows = weight.index_select(1, lit), rows.index_select(1, lit)
        wide = weight @ rows.T if layer.bias is None else torch.addmm(layer.bias.flatten(0, 1), weight, rows.T)
        return wide.view(*layer.weight.shape[:2], len(x))

    def __call__(self, x: Tensor) -> Tensor:
        """Every member's logits (members, n, classes)."""
        h = self.first(x)
        for step in self.layers[1:]:
            if isinstance(step, nn.ReLU):
                h = h.relu_()  # the product before it is ours alone
            elif isinstance(step, nn.Module):
                h = step(h)
            else:
                h = step.weight @ h if step.bias is None else torch.baddbmm(step.bias, step.weight, h)
        return h.transpose(1, 2)


class Cost(NamedTuple):
    """What one input costs a network."""

    products: int  # multiplications in linear layers and convolutions
    floats: int  # the largest input and output of one layer together: what is alive at a time
    outputs: int  # logits


@lru_cache(maxsize=64)
def cost_of(spec: Spec, shape: tuple[int, ...]) -> Cost:
    """What one input of this shape costs a network, found by running it once.

    Example:
        >>> cost_of(Spec("mlp", {"inputs": 4, "hidden": [3], "classes": 2}), (4,))
        Cost(products=18, floats=8, outputs=2)
    """
    products, floats = list[int](), [0]

    def watch(part: nn.Module, args: tuple[object, ...], out: object) -> None:
        floats.append(sum(_floats_taken(t) for t in (*args, out) if isinstance(t, Tensor)))
        if isinstance(part, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d) and isinstance(out, Tensor):
            products.append(out.numel() * part.weight[0].numel())

    with forward_hooks((m, watch) for m in spec.skeleton().modules() if not any(m.children())):
        outputs = run_once(spec, shape).shape[-1]
    return Cost(sum(products), max(floats), outputs)


def _floats_taken(t: Tensor) -> int:
    """How many numbers a tensor takes; libraries keep the channels of images in blocks of sixteen."""
    return t.numel() if t.ndim != 4 else math.ceil(t.shape[1] / 16) * 16 * t.shape[2] * t.shape[3]


def _chain(module: nn.Module, path: str = "") -> list[tuple[str, nn.Module]]:
    """The parts of nested `nn.Sequential`s in order of execution; any other module is one part."""
    if type(module) is not nn.Sequential:
        return [(path, module)]
    parts = ((f"{path}.{name}" if path else name, part) for name, part in module.named_children())
    return [step for name, part in parts for step in _chain(part, name)]


def _stack_layer(members: Sequence[Params], layer: str) -> _Layer:
    dot = f"{layer}." if layer else ""
    weight = torch.stack([m[f"{dot}weight"] for m in members])
    if f"{dot}bias" not in members[0]:
        return _Layer(weight, None)
    return _Layer(weight, torch.stack([m[f"{dot}bias"] for m in members])[..., None])

"""Running networks in other ways than one after another and whole: up to one layer, or several side by side.

Rules that choose the members of a mixture before they have run (`Route`) stand here too, since they name that layer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedfuse.core.inputs import as_read, run_once
from fedfuse.core.params import Layer, Params
from fedfuse.core.spec import Spec, drop_tied_names
from fedfuse.core.torch_utils import forward_hooks
from fedfuse.errors import ConfigError, suggest

Count: TypeAlias = int | Literal["all"]
LayerChoice: TypeAlias = int | str


@runtime_checkable
class Route(Protocol):
    """A rule that chooses the members before they run: those not chosen stop early and answer zeros."""

    def choose(self, confidence: Tensor) -> Tensor:
        """The members' confidence (k, n) to who runs on which input, true or false (k, n)."""
        ...


@dataclass(frozen=True, slots=True)
class AtLayer:
    """AMS decided at a layer: only the members in whom it responds most strongly run to the end.

    A member's confidence is the largest output of the layer, before the activation; the k largest are chosen, ties to
    the lowest client, and their logits are added. At a network's last layer this is AMS itself.

    Attributes:
        k: how many members run to the end, or "all".
        layer: "first"; a number, counting layers with weights from 1; or a layer's name.

    Example:
        >>> AtLayer().choose(torch.tensor([[1.0, 5.0], [2.0, 5.0]]))
        tensor([[False,  True],
                [ True, False]])
    """

    k: Count = 1
    layer: LayerChoice = "first"

    def __post_init__(self) -> None:
        check_count("AMS", self.k)
        number = isinstance(self.layer, int) and not isinstance(self.layer, bool) and self.layer >= 1
        if not number and not (isinstance(self.layer, str) and self.layer):
            raise ConfigError(
                f"AMS: layer is {str(self.layer)[:40]!r}, expected 'first', a number from 1 on or a layer's name"
            )

    def choose(self, confidence: Tensor) -> Tensor:
        """The k most confident members of each input."""
        return largest(confidence, self.k)

    def __call__(self, weights: Tensor, logits: Tensor) -> Tensor:  # noqa: ARG002 - members not chosen are zero
        """The sum of the chosen members' logits."""
        return logits.sum(0)


@dataclass(frozen=True, slots=True)
class Nearest:
    """AMS by distance: the members to whose own rows an input's features are nearest answer, by the sum of logits.

    The confidence is −d_j(x), the Mahalanobis distance of `FeatureRegion` in what member j's last layer reads, whose
    moments its client has sent. The k nearest are chosen, ties to the lowest client.

    Example:
        >>> Nearest().choose(torch.tensor([[-1.0, -5.0], [-2.0, -0.5]]))
        tensor([[ True, False],
                [False,  True]])
    """

    k: Count = 1

    def __post_init__(self) -> None:
        check_count("AMS", self.k)

    def choose(self, confidence: Tensor) -> Tensor:
        """The k nearest members of each input."""
        return largest(confidence, self.k)

    def __call__(self, weights: Tensor, logits: Tensor) -> Tensor:  # noqa: ARG002 - members not chosen are zero
        """The sum of the chosen members' logits."""
        return logits.sum(0)


def largest(confidence: Tensor, count: Count) -> Tensor:
    """Which members have the `count` largest confidences, per input; of equals the first (k, n).

    Example:
        >>> largest(torch.tensor([[1.0], [1.0], [0.0]]), 1)[:, 0].tolist()
        [True, False, False]
    """
    if count == "all" or count >= len(confidence):
        return torch.ones_like(confidence, dtype=torch.bool)
    best = confidence.sort(stable=True, dim=0, descending=True).indices[:count]
    return torch.zeros_like(confidence, dtype=torch.bool).scatter_(0, best, True)


def check_count(who: str, count: object) -> None:
    """Refuse a number of members that is none."""
    if count != "all" and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
        raise ConfigError(f"{who} takes {str(count)[:40]!r} members, expected a whole number from 1 on, or 'all'")


def find_layer(spec: Spec, which: LayerChoice) -> Layer:
    """A layer with weights: the "first", the one of this number, counting from 1, or of this name.

    Example:
        >>> find_layer(Spec("lenet"), 2).name, find_layer(Spec("lenet"), "fc1").name
        ('conv2', 'fc1')
    """
    layers = spec.layout.layers
    if not layers:
        raise ConfigError(f"model {spec.factory!r} has no layer with weights, so none can be chosen by its layers")
    if isinstance(which, int) or which == "first":
        number = 1 if which == "first" else int(which)
        if number > len(layers):
            raise ConfigError(
                f"model {spec.factory!r} has {len(layers)} layers with weights, and members were to be chosen at layer "
                f"{number}; choose a smaller number"
            )
        return layers[number - 1]
    named = {layer.name: layer for layer in layers}
    if which not in named:
        raise ConfigError(
            f"model {spec.factory!r} has no layer {which!r}{suggest(which, named)} it has {', '.join(named)}"
        )
    return named[which]


def layer_output(spec: Spec, params: Params, x: Tensor, which: LayerChoice = "first") -> Tensor:
    """What a layer gives, before any activation.

    Example:
        >>> import torch
        >>> spec = Spec("mlp", {"inputs": 4, "hidden": [3], "classes": 2})
        >>> tuple(layer_output(spec, spec.build().state_dict(), torch.ones(5, 4)).shape)
        (5, 3)
    """
    layer = find_layer(spec, which)

    def stop(_: nn.Module, __: object, out: Any) -> None:
        raise _Seen(out[0] if isinstance(out, tuple) else out)

    return _run_until(spec, params, x, layer, [(_module_of(spec, layer), stop)])


def layer_input(spec: Spec, params: Params, x: Tensor, layer: Layer) -> Tensor:
    """What a layer reads, one vector per row.

    Example:
        >>> import torch
        >>> spec = Spec("mlp", {"inputs": 4, "hidden": [3], "classes": 2})
        >>> tuple(layer_input(spec, spec.build().state_dict(), torch.ones(5, 4), spec.layout.layers[-1]).shape)
        (5, 3)
    """

    def stop(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        raise _Seen(args[0] if args else kwargs["input"])

    return _run_until(spec, params, x, layer, [(_module_of(spec, layer), stop)], before=True).flatten(1)


class _Seen(Exception):
    """Carries what was looked for out of a forward pass that need not go on."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.value = value


def _module_of(spec: Spec, layer: Layer) -> nn.Module:
    return spec.skeleton().get_submodule(layer.weight.rpartition(".")[0])


def _run_until(spec: Spec, params: Params, x: Tensor, layer: Layer, hooks: list[Any], before: bool = False) -> Tensor:
    """Run the network until a hook has what it looked for."""
    try:
        with forward_hooks(hooks, before=before, with_kwargs=before):
            functional_call(spec.skeleton(), drop_tied_names(spec, params), (spec.cast(as_read(spec, x)),))
    except _Seen as seen:
        return seen.value
    raise ConfigError(
        f"model {spec.factory!r} never runs its layer {layer.name!r} as a module, so members cannot be chosen by it"
    )


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


def _chain(module: nn.Module, path: str = "") -> list[tuple[str, nn.Module]]:
    """The parts of nested `nn.Sequential`s in order of execution; any other module is one part."""
    if type(module) is not nn.Sequential:
        return [(path, module)]
    parts = ((f"{path}.{name}" if path else name, part) for name, part in module.named_children())
    return [step for name, part in parts for step in _chain(part, name)]


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


def _stack_layer(members: Sequence[Params], layer: str) -> _Layer:
    dot = f"{layer}." if layer else ""
    weight = torch.stack([m[f"{dot}weight"] for m in members])
    if f"{dot}bias" not in members[0]:
        return _Layer(weight, None)
    return _Layer(weight, torch.stack([m[f"{dot}bias"] for m in members])[..., None])


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

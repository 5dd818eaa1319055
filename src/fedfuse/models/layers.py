"""What the model factories share: checked options, named stacks of layers, and initial values."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from numbers import Integral
from typing import NoReturn, TypeAlias

import torch
from torch import nn

from fedfuse.errors import ConfigError

Named: TypeAlias = tuple[str, nn.Module]
Rule: TypeAlias = Callable[[nn.Module], None]


def reject(who: str, option: str, value: object, expected: str) -> NoReturn:
    """Raise the one sentence that says which option of which model is wrong."""
    raise ConfigError(
        f"model {who}: {option} is {reprlib.repr(value)}, expected {expected}; correct the model's options"
    )


def whole(who: str, option: str, value: object, least: int = 1) -> int:
    """The option as an int, if it is a whole number and large enough."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        reject(who, option, value, f"a whole number of at least {least}")
    return int(value)


def wholes(who: str, option: str, value: object, least: int = 0) -> tuple[int, ...]:
    """The option as a tuple of widths, at least `least` of them."""
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) < least:
        reject(who, option, value, f"a list of at least {least} widths")
    return tuple(whole(who, f"{option}[{i}]", width) for i, width in enumerate(value))


def scale_widths(who: str, widths: object, full: tuple[int, ...]) -> tuple[int, ...]:
    """The published widths times a number, or the list of widths given in their place.

    Example:
        >>> scale_widths("vgg11", 0.25, (64, 128)), scale_widths("vgg11", [8, 9], (64, 128))
        ((16, 32), (8, 9))
    """
    expected = f"a multiplier above 0 and up to 1024, or {len(full)} widths"
    if isinstance(widths, int | float) and not isinstance(widths, bool):
        if not 0 < widths <= 1024:
            reject(who, "widths", widths, expected)
        return tuple(max(1, round(width * widths)) for width in full)
    if not isinstance(widths, Sequence) or len(widths) != len(full):
        reject(who, "widths", widths, expected)
    return wholes(who, "widths", widths)


def share(who: str, option: str, value: object) -> float:
    """The option as a float from 0 up to, but not, 1."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        reject(who, option, value, "a number from 0 up to, but not, 1")
    return float(value)


def flag(who: str, option: str, value: object) -> bool:
    """The option as a bool; the word "no" is refused, not taken for true."""
    if not isinstance(value, bool):
        reject(who, option, value, "true or false")
    return value


def one_of(who: str, option: str, value: object, choices: Sequence[str]) -> str:
    """The option, if it is one of the words it may be."""
    if not isinstance(value, str) or value not in choices:
        reject(who, option, value, f"one of {', '.join(choices)}")
    return value


def least_size(pooled: Sequence[bool], kernel: int, padding: int) -> int:
    """The smallest image side of which these convolutions and poolings leave at least one pixel."""
    side = 1
    for pool in reversed(pooled):
        side = (2 * side if pool else side) + kernel - 1 - 2 * padding
    return side


def side_after(size: int, pooled: Sequence[bool], kernel: int, padding: int) -> int:
    """The image side that leaves these convolutions and poolings."""
    for pool in pooled:
        size = (size + 2 * padding - kernel + 1) // (2 if pool else 1)
    return size


def stack(*layers: Named) -> nn.Sequential:
    """Layers that run one after another, each under its own name."""
    net = nn.Sequential()
    for name, layer in layers:
        net.add_module(name, layer)
    return net


def convolutions(
    widths: Sequence[int],
    pooled: Sequence[bool],
    *,
    kernel: int = 3,
    padding: int = 1,
    norm: bool = False,
    bias: bool = True,
) -> Iterator[Named]:
    """Convolutions from `widths[0]` channels onwards, each with its norm, 2×2 max-pooling and ReLU.

    Pooling comes before the ReLU: the maximum commutes with any increasing function, so values and
    gradients are those of the usual order, at a quarter of the ReLU's work.
    """
    for i, ((inputs, outputs), pool) in enumerate(zip(pairwise(widths), pooled, strict=True), 1):
        yield f"conv{i}", nn.Conv2d(inputs, outputs, kernel, padding=padding, bias=bias)
        if norm:
            yield f"conv{i}_norm", nn.BatchNorm2d(outputs)
        if pool:
            yield f"conv{i}_pool", nn.MaxPool2d(2)
        yield f"conv{i}_relu", nn.ReLU()


ACTIVATIONS: Mapping[str, type[nn.Module]] = {"relu": nn.ReLU, "leaky_relu": nn.LeakyReLU, "tanh": nn.Tanh}


def linear_layers(
    widths: Sequence[int],
    classes: int,
    *,
    dropout: float = 0.0,
    bias: bool = True,
    activation: type[nn.Module] = nn.ReLU,
    output_bias: bool = True,
) -> Iterator[Named]:
    """Fully connected layers with an activation from `widths[0]` features onwards, and last the classifier."""
    yield "flatten", nn.Flatten()
    for i, (inputs, outputs) in enumerate(pairwise(widths), 1):
        yield f"fc{i}", nn.Linear(inputs, outputs, bias=bias)
        yield f"fc{i}_{'relu' if activation is nn.ReLU else 'activation'}", activation()
        if dropout:
            yield f"fc{i}_drop", nn.Dropout(dropout)
    yield "classifier", nn.Linear(widths[-1], classes, bias=bias and output_bias)


def initialize(net: nn.Module, rule: Rule) -> nn.Module:
    """Give a net that was built on the meta device its memory, and each layer its initial values once.

    Layers built where they will live draw PyTorch's own initial values first, only to have them replaced.
    """
    device = torch.get_default_device()
    if device.type == "meta":
        return net
    net.to_empty(device=device)
    for module in net.modules():
        rule(module)
    return net


@torch.no_grad()
def draw_normal(layer: nn.Conv2d | nn.Linear, std: float, bias: float = 0.0) -> None:
    """Draw the weights from N(0, std²) and set every bias to one value."""
    layer.weight.normal_(0.0, std)
    if layer.bias is not None:
        layer.bias.fill_(bias)


def draw_he(conv: nn.Conv2d) -> None:
    """He's rule for the backward pass: N(0, 2 / (k·k·out)) weights, zero biases."""
    draw_normal(conv, math.sqrt(2.0 / (math.prod(conv.kernel_size) * conv.out_channels)))


def default_init(module: nn.Module) -> None:
    """PyTorch's own initial values."""
    if isinstance(module, nn.Conv2d | nn.Linear | nn.BatchNorm2d):
        module.reset_parameters()


def he_convolutions(module: nn.Module) -> None:
    """He's rule for convolutions, PyTorch's own values for the rest."""
    draw_he(module) if isinstance(module, nn.Conv2d) else default_init(module)


def add_projection(model: nn.Module, hidden: int | None = None, out: int = 256) -> nn.Module:
    """Put a two-layer projection between a model's representation and its classifier.

    The last linear layer d → classes becomes d → hidden, ReLU, hidden → out, out → classes (Li et al.,
    "Model-Contrastive Federated Learning", 2021, section 3.2), so what the new classifier reads is the
    projection. The model is changed in place; a model that is itself one linear layer is replaced.

    Args:
        model: any module whose last registered `nn.Linear` is its classifier.
        hidden: units of the projection's inner layer; d when not given.
        out: length of the projection.

    Returns:
        The model with the head; its new layers have biases if the old classifier had one.

    Example:
        >>> add_projection(nn.Sequential(nn.Flatten(), nn.Linear(84, 10)))[-1].logits
        Linear(in_features=256, out_features=10, bias=True)
    """
    name, last = _last_linear(model)
    hidden = last.in_features if hidden is None else whole("add_projection", "hidden", hidden)
    out = whole("add_projection", "out", out)
    head = _head((last.in_features, hidden, out, last.out_features), last).train(last.training)
    if not name:
        return head
    model.set_submodule(name, head)
    return model


def with_head(model: nn.Module, head: int) -> nn.Module:
    """The model with a projection of length `head`, or as it is when `head` is 0."""
    return add_projection(model, out=head) if head else model


def _last_linear(model: nn.Module) -> tuple[str, nn.Linear]:
    linears = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    if not linears:
        raise ConfigError(
            f"add_projection: {type(model).__name__} has no linear layer, expected one as its classifier; "
            "give the model a torch.nn.Linear at its end"
        )
    return linears[-1]


def _head(widths: tuple[int, int, int, int], like: nn.Linear) -> nn.Sequential:
    """The three linear layers, where the old classifier lived."""
    inner, projection, logits = (
        nn.Linear(inputs, outputs, like.bias is not None, like.weight.device, like.weight.dtype)
        for inputs, outputs in pairwise(widths)
    )
    return stack(("inner", inner), ("inner_relu", nn.ReLU()), ("projection", projection), ("logits", logits))

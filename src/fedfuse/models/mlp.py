"""Fully connected networks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from fedfuse.models.layers import (
    ACTIVATIONS,
    Rule,
    default_init,
    draw_normal,
    initialize,
    linear_layers,
    one_of,
    reject,
    stack,
    whole,
    wholes,
    with_head,
)


def mlp(
    inputs: int = 784,
    hidden: Sequence[int] = (100,),
    classes: int = 10,
    init: str = "default",
    head: int = 0,
    activation: str = "relu",
    output_bias: bool = True,
) -> nn.Module:
    """A fully connected network with an activation between its layers.

    Args:
        inputs: features of one example; images are flattened, whatever their shape.
        hidden: units of each hidden layer; none gives softmax regression.
        classes: how many classes it tells apart, or how many outputs it has for another task.
        init: "default" for PyTorch's initial values, "pfnm" for those of PFNM's networks
            (Yurochkin et al., 2019): weights from N(0, 0.1²), biases 0.1.
        head: length of a projection before the classifier, 0 for none.
        activation: "relu", "leaky_relu" or "tanh".
        output_bias: whether the classifier has a bias.

    Example:
        >>> mlp(inputs=64, hidden=(32,)).fc1
        Linear(in_features=64, out_features=32, bias=True)
    """
    widths = (whole("mlp", "inputs", inputs), *wholes("mlp", "hidden", hidden))
    classes, head = whole("mlp", "classes", classes), whole("mlp", "head", head, 0)
    rule = _RULES[one_of("mlp", "init", init, tuple(_RULES))]
    with torch.device("meta"):
        if (make := ACTIVATIONS.get(activation)) is None:
            reject("mlp", "activation", activation, f"one of {', '.join(ACTIVATIONS)}")
        if not isinstance(output_bias, bool):
            reject("mlp", "output_bias", output_bias, "true or false")
        layers = linear_layers(widths, classes, activation=make, output_bias=output_bias)
        net = with_head(stack(*layers), head)
    return initialize(net, rule)


def _pfnm(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        draw_normal(module, 0.1, bias=0.1)


_RULES: Mapping[str, Rule] = {"default": default_init, "pfnm": _pfnm}

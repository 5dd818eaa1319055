"""Fully connected networks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from fedfuse.models.heads import with_head
from fedfuse.models.layers import (
    Rule,
    default_init,
    draw_normal,
    initialize,
    linear_layers,
    one_of,
    stack,
    whole,
    wholes,
)


def mlp(
    inputs: int = 784,
    hidden: Sequence[int] = (100,),
    classes: int = 10,
    init: str = "default",
    head: int = 0,
) -> nn.Module:
    """A fully connected network with ReLU between its layers.

    Args:
        inputs: features of one example; images are flattened, whatever their shape.
        hidden: units of each hidden layer; none gives softmax regression.
        classes: how many classes it tells apart.
        init: "default" for PyTorch's initial values, "pfnm" for those of PFNM's networks
            (Yurochkin et al., 2019): weights from N(0, 0.1²), biases 0.1.
        head: length of a projection before the classifier, 0 for none.

    Example:
        >>> mlp(inputs=64, hidden=(32,)).fc1
        Linear(in_features=64, out_features=32, bias=True)
    """
    widths = (whole("mlp", "inputs", inputs), *wholes("mlp", "hidden", hidden))
    classes, head = whole("mlp", "classes", classes, 2), whole("mlp", "head", head, 0)
    rule = _RULES[one_of("mlp", "init", init, tuple(_RULES))]
    with torch.device("meta"):
        net = with_head(stack(*linear_layers(widths, classes)), head)
    return initialize(net, rule)


def _pfnm(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        draw_normal(module, 0.1, bias=0.1)


_RULES: Mapping[str, Rule] = {"default": default_init, "pfnm": _pfnm}

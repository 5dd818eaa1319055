"""Ask networks that differ in some of their weights: all in one pass where that is possible and faster."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap


def answer_each(net: nn.Module, weights: Mapping[str, Tensor], x: Tensor, together: bool = True) -> Tensor:
    """The outputs of networks that differ in some weights, networks × what the network gives.

    Args:
        net: the network.
        weights: for some of its parameters, one value per network, stacked.
        x: what all are asked.
        together: whether to try one pass for all. Convolutions with kernels of their own for every network are slower
            so, and a network may do what cannot be done for many at once, such as read a number off a tensor.

    Example:
        >>> answer_each(nn.Linear(1, 1, bias=False), {"weight": torch.tensor([[[2.0]], [[3.0]]])}, torch.ones(1, 1))
        tensor([[[2.]],
        <BLANKLINE>
                [[3.]]])
    """
    weights = _with_tied(net, weights)
    ask = partial(functional_call, net, args=(x,), tie_weights=False)  # torch leaves what it ties in shared modules
    if together:
        with contextlib.suppress(RuntimeError):
            answers: Tensor = vmap(ask)(weights)
            return answers
    count = len(next(iter(weights.values())))
    return torch.stack([ask({name: stacked[place] for name, stacked in weights.items()}) for place in range(count)])


def _with_tied(net: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights under every other name too that one of their parameters has in another module."""
    places = [  # each module once, so that a shared one keeps its first name
        (f"{path}.{leaf}" if path else leaf, id(parameter))
        for path, part in net.named_modules()
        for leaf, parameter in part._parameters.items()
    ]
    known = {place: name for name, place in places if name in weights}
    return {name: weights[known[place]] for name, place in places if place in known}

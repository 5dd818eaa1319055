"""The last linear layer of a network as one matrix in float64, and Newton sums as the tensors that travel."""

from __future__ import annotations

import torch
from torch import Tensor

from fedfuse.core.params import Params
from fedfuse.core.spec import Spec
from fedfuse.linalg.psd import pack, unpack
from fedfuse.nets.glm import NewtonSums
from fedfuse.nets.head import linear_layer

WEIGHTS = "newton/weights"
"""Under which name a server keeps and publishes the layer in float64, whatever the network's own precision."""


def layer_matrix(spec: Spec, params: Params, memory: Params) -> Tensor:
    """[W | b] in float64: what the server published, or else the network's own.

    Example:
        >>> spec = Spec("mlp", {"inputs": 2, "hidden": [], "classes": 3})
        >>> layer_matrix(spec, spec.build().state_dict(), {}).shape
        torch.Size([3, 3])
    """
    if WEIGHTS in memory:
        return memory[WEIGHTS].clone()
    layer = linear_layer(spec.layout)
    weight = params[layer.weight].double()
    return weight if layer.bias is None else torch.cat([weight, params[layer.bias].double()[:, None]], 1)


def with_layer(spec: Spec, params: Params, matrix: Tensor) -> dict[str, Tensor]:
    """The parameters with another last layer, in their own precision."""
    layer = linear_layer(spec.layout)
    kept = {name: tensor.clone() for name, tensor in params.items()}
    weight = matrix if layer.bias is None else matrix[:, :-1]
    kept[layer.weight] = weight.to(kept[layer.weight]).clone(memory_format=torch.contiguous_format)
    if layer.bias is not None:
        kept[layer.bias] = matrix[:, -1].to(kept[layer.bias]).clone(memory_format=torch.contiguous_format)
    return kept


def sum_notes(sums: NewtonSums, count: int) -> dict[str, Tensor]:
    """Sums as notes, and over how many rows they were taken."""
    return {
        "newton/count": torch.tensor(count, dtype=torch.float64),
        "newton/loss": sums.loss.double(),
        "newton/gradient": sums.gradient,
        "newton/hessian": pack(sums.hessian),
    }


def hessian_in(notes: Params) -> Tensor:
    """The Hessian that notes hold."""
    return unpack(notes["newton/hessian"], notes["newton/gradient"].numel())


def sums_in(notes: Params) -> NewtonSums:
    """The sums that notes hold."""
    return NewtonSums(notes["newton/loss"], notes["newton/gradient"], hessian_in(notes))

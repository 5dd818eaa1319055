"""What the hidden units of a network give before their activation, and how their means and deviations are set."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedfuse.core.inputs import as_read
from fedfuse.core.params import Layer, Params
from fedfuse.core.spec import Spec, drop_tied_names
from fedfuse.core.torch_utils import forward_hooks
from fedfuse.errors import ConfigError
from fedfuse.nets.cost import layer_costs

UNIT_TURN = "unit_turn"  # the kind of server memory that says which layers are still to be rescaled

_BATCH = 500


class UnitStatistics(NamedTuple):
    """Mean and standard deviation of every unit of a layer, before its activation."""

    mean: Tensor
    std: Tensor


def rescalable_layers(spec: Spec) -> list[Layer]:
    """The hidden layers whose units can be rescaled, in the order in which the network names them.

    They have a bias and weights of their own and no norm behind them; the last layer's outputs are not hidden.

    Example:
        >>> [layer.name for layer in rescalable_layers(Spec("lenet"))]
        ['conv1', 'conv2', 'fc1', 'fc2']
    """
    plain = [layer for layer in spec.layout.layers if layer.is_plain]
    tied = {name for same in spec.layout.tied for name in same}
    return [
        layer
        for layer in plain[:-1]
        if layer.bias is not None
        and not layer.followers
        and not layer.log_variances
        and not {layer.weight, layer.bias} & tied
    ]


def repairable_layers(spec: Spec, shape: tuple[int, ...]) -> tuple[list[Layer], list[str]]:
    """The same in the order in which they run on inputs of a shape, and names of those that cannot be rescaled.

    Example:
        >>> layers, others = repairable_layers(Spec("lenet"), (1, 28, 28))
        >>> [layer.name for layer in layers], others
        (['conv1', 'conv2', 'fc1', 'fc2'], [])
    """
    known = {layer.weight.rpartition(".")[0]: layer for layer in spec.layout.layers if layer.is_plain}
    hidden = [known[path] for path in list(layer_costs(spec, shape))[:-1] if path in known]
    plain, free = [layer for layer in hidden if not layer.followers], rescalable_layers(spec)
    return [layer for layer in plain if layer in free], [layer.name for layer in plain if layer not in free]


@torch.no_grad()
def unit_statistics(spec: Spec, params: Params, layers: Sequence[Layer], x: Tensor) -> dict[str, UnitStatistics]:
    """By layer, what its units give on some inputs, over inputs and positions, in one pass.

    Example:
        >>> spec = Spec("mlp", {"inputs": 4, "hidden": [3], "classes": 2})
        >>> found = unit_statistics(spec, spec.build().state_dict(), rescalable_layers(spec), torch.ones(5, 4))
        >>> found["fc1"].std
        tensor([0., 0., 0.], dtype=torch.float64)
    """
    net, seen = spec.skeleton(), dict[str, list[_Part]]()
    modules = [(layer, net.get_submodule(layer.weight.rpartition(".")[0])) for layer in layers]
    for part in x.split(_BATCH):
        with forward_hooks((module, partial(_note_units, seen, layer)) for layer, module in modules):
            functional_call(net, drop_tied_names(spec, params), (spec.cast(as_read(spec, part)),))
    if silent := [layer.name for layer in layers if layer.name not in seen]:
        raise ConfigError(
            f"model {spec.factory!r} never runs its layer {silent[0]!r} as a module, so its units cannot be measured"
        )
    return {name: _join(parts) for name, parts in seen.items()}


class _Part(NamedTuple):
    """Some values of every unit: how many, their mean, and their variance."""

    size: int
    mean: Tensor
    variance: Tensor


def _note_units(seen: dict[str, list[_Part]], layer: Layer, _: nn.Module, __: object, out: Tensor) -> None:
    """Units × everything else; a convolution's units stand behind the rows, a linear layer's at the end."""
    units = out.double().movedim(1 if layer.kind == "conv" else -1, 0).flatten(1)
    variance, mean = torch.var_mean(units, 1, correction=0)
    seen.setdefault(layer.name, []).append(_Part(units.shape[1], mean, variance))


def _join(parts: Sequence[_Part]) -> UnitStatistics:
    """The variance of all is the mean of the parts' variances and the variance of their means."""
    counts = torch.tensor([p.size for p in parts], dtype=torch.float64)
    means, variances = torch.stack([p.mean for p in parts]), torch.stack([p.variance for p in parts])
    shares = (counts / counts.sum()).to(means)
    mean = shares @ means
    return UnitStatistics(mean, (shares @ (variances + (means - mean).square())).sqrt())


def mean_statistics(parents: Iterable[UnitStatistics], shares: Tensor) -> UnitStatistics:
    """Σ_k w_k μ_k and Σ_k w_k σ_k.

    Example:
        >>> parts = [UnitStatistics(torch.tensor([0.0]), torch.tensor([s])) for s in (1.0, 3.0)]
        >>> mean_statistics(parts, torch.tensor([0.5, 0.5])).std
        tensor([2.])
    """
    means, stds = zip(*parents, strict=True)
    return UnitStatistics(
        *(torch.einsum("k,ku->u", shares.to(stack), stack) for stack in map(torch.stack, (means, stds)))
    )


def rescale_units(layer: Layer, params: Params, now: UnitStatistics, goal: UnitStatistics) -> dict[str, Tensor]:
    """The layer's weight and bias after which `now` is `goal`; a unit that never varies is only shifted."""
    assert layer.bias is not None  # `rescalable_layers` leaves the others out
    weight, bias = params[layer.weight], params[layer.bias]
    varies = now.std > torch.finfo(weight.dtype).eps * (1 + now.mean.abs())
    ratio = torch.where(varies, goal.std / now.std.clamp(min=torch.finfo(torch.float64).tiny), 1.0)
    shape = (-1,) + (1,) * (weight.ndim - 1)
    return {
        layer.weight: (weight.double() * ratio.view(shape)).to(weight.dtype),
        layer.bias: (ratio * (bias.double() - now.mean) + goal.mean).to(bias.dtype),
    }


def layers_in_turn(spec: Spec, memory: Params) -> list[Layer]:
    """The layers that are still to be rescaled, the next one first, as the server's memory says.

    Example:
        >>> lenet = Spec("lenet")
        >>> [layer.name for layer in layers_in_turn(lenet, turn_memory(lenet, rescalable_layers(lenet)[2:]))]
        ['fc1', 'fc2']
    """
    places = memory.get(f"{UNIT_TURN}/layers")
    return [] if places is None else [spec.layout.layers[place] for place in places.tolist()]


def turn_memory(spec: Spec, layers: Sequence[Layer]) -> dict[str, Tensor]:
    """What the server remembers and tells of the layers that are still to be rescaled: their places in the layout."""
    places = [spec.layout.layers.index(layer) for layer in layers]
    return {f"{UNIT_TURN}/layers": torch.tensor(places, dtype=torch.long)}

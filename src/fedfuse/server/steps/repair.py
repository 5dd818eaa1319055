"""Activation statistics of a merged network brought back to its parents': REPAIR, for networks without BatchNorm."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from fedfuse.core.messages import Cohort
from fedfuse.core.params import Layer, Params
from fedfuse.core.seams import ServerPart
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench, ServerState
from fedfuse.nets.cost import layer_costs
from fedfuse.nets.partial import layer_output
from fedfuse.server.steps.distillation_inputs import server_inputs

_BATCH = 500


class UnitStatistics(NamedTuple):
    """Mean and standard deviation of every unit of a layer, before its activation."""

    mean: Tensor
    std: Tensor


@dataclass(frozen=True, slots=True)
class Repair(ServerPart):
    """Rescale every hidden unit so that its mean and deviation are the parents' (Jordan et al., "REPAIR", ICLR 2023).

    A mean of networks has units of smaller variance than its parents, the more so the less they are alike, and layer
    after layer it fades. With μ_k and σ_k the statistics of a unit before its activation in parent k, μ and σ those in
    the merged network, and w_k the parents' shares, the unit's weights become (σ*/σ) W and its bias
    (σ*/σ)(b − μ) + μ*, where μ* = Σ_k w_k μ_k and σ* = Σ_k w_k σ_k. Layers go in the order in which they run, each seen
    behind those already repaired. A layer with a norm behind it is left alone (see `RestateNorms`), as are the outputs
    and layers without a bias, which are named.

    Attributes:
        uniform: whether parents count alike, or by their examples; as the merge did.
        count: at most so many of the server's rows are looked at.
    """

    uniform: bool = False
    count: int = 2000
    needs: ClassVar[frozenset[str]] = frozenset({"server_rows", "network"})

    def __call__(self, state: ServerState, cohort: Cohort, bench: Bench) -> ServerState:
        """Layer by layer, on the server's rows."""
        bench.need_rows("estimating activation statistics")
        found = server_inputs(bench, self.count, "repair", state.round)
        assert found is not None  # there are rows
        x, single = found[0], state.single
        layers, others = repairable_layers(single.spec, tuple(x.shape[1:]))
        params = dict(single.posterior.mean)
        parents = [(update.spec, update.posterior.mean) for update in cohort]
        shares = torch.full_like(cohort.weights, 1 / len(cohort)) if self.uniform else cohort.weights
        for layer in layers:
            goal = mean_statistics([unit_statistics(*parent, layer, x) for parent in parents], shares)
            params |= rescale_units(layer, params, unit_statistics(single.spec, params, layer, x), goal)
        facts = {"repaired": [layer.name for layer in layers], "not_repaired": others}
        return state.fused(params, single.posterior.geometry, single.spec).noting(repair=facts)


def repairable_layers(spec: Spec, shape: tuple[int, ...]) -> tuple[list[Layer], list[str]]:
    """The hidden layers whose units can be rescaled, in the order in which they run, and names of those that cannot.

    Example:
        >>> layers, others = repairable_layers(Spec("lenet"), (1, 28, 28))
        >>> [layer.name for layer in layers], others
        (['conv1', 'conv2', 'fc1', 'fc2'], [])
    """
    known = {layer.weight.rpartition(".")[0]: layer for layer in spec.layout.layers if layer.is_plain}
    hidden = [known[path] for path in list(layer_costs(spec, shape))[:-1] if path in known]
    plain = [layer for layer in hidden if not layer.followers]
    tied = {name for same in spec.layout.tied for name in same}
    free = [layer for layer in plain if layer.bias is not None and not {layer.weight, layer.bias} & tied]
    return free, [layer.name for layer in plain if layer not in free]


@torch.no_grad()
def unit_statistics(spec: Spec, params: Params, layer: Layer, x: Tensor) -> UnitStatistics:
    """What a layer's units give on some inputs, over inputs and positions."""
    parts = [_by_unit(layer_output(spec, params, part, layer.name), layer) for part in x.split(_BATCH)]
    std, mean = torch.std_mean(torch.cat(parts, 1), 1, correction=0)
    return UnitStatistics(mean, std)


def _by_unit(out: Tensor, layer: Layer) -> Tensor:
    """Units × everything else; a convolution's units stand behind the rows, a linear layer's at the end."""
    return out.double().movedim(1 if layer.kind == "conv" else -1, 0).flatten(1)


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
    assert layer.bias is not None  # `repairable_layers` names the others
    weight, bias = params[layer.weight], params[layer.bias]
    varies = now.std > torch.finfo(weight.dtype).eps * (1 + now.mean.abs())
    ratio = torch.where(varies, goal.std / now.std.clamp(min=torch.finfo(torch.float64).tiny), 1.0)
    shape = (-1,) + (1,) * (weight.ndim - 1)
    return {
        layer.weight: (weight.double() * ratio.view(shape)).to(weight.dtype),
        layer.bias: (ratio * (bias.double() - now.mean) + goal.mean).to(bias.dtype),
    }

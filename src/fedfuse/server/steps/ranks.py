"""HRank: a filter is worth what its feature maps' ranks are."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fedfuse.core.hooks import forward_hooks
from fedfuse.core.model import Single
from fedfuse.core.params import Layer
from fedfuse.core.precision import in_full

_BATCH = 100


def map_ranks(maps: Tensor, tolerance: float | None = None) -> Tensor:
    """The rank of every feature map (…, height, width): how many singular values exceed the tolerance.

    The tolerance is relative to the largest singular value; by default it is that of `numpy.linalg.matrix_rank`,
    max(height, width) times the dtype's rounding.

    Example:
        >>> map_ranks(torch.stack([torch.eye(3), torch.ones(3, 3), torch.zeros(3, 3)]))
        tensor([3, 1, 0])
    """
    relative = max(maps.shape[-2:]) * torch.finfo(maps.dtype).eps if tolerance is None else tolerance
    values: Tensor = torch.linalg.svdvals(maps)
    return (values > relative * values[..., :1]).sum(-1)


def feature_ranks(model: Single, x: Tensor, layers: Iterable[str], tolerance: float | None = None) -> dict[str, Tensor]:
    """Mean rank of each channel's feature maps over some inputs, as a share of the largest rank they could have.

    A layer's maps are taken after its norm and a ReLU, before any pooling: before the ReLU nearly every map has full
    rank and says nothing. A unit of a linear layer has maps of one pixel: its rank is how often it is lit.

    Args:
        model: the network.
        x: inputs.
        layers: names of linear or convolution layers.
        tolerance: see `map_ranks`.

    Example:
        >>> from fedfuse.core.spec import Spec
        >>> spec = Spec("lenet")
        >>> ranks = feature_ranks(Single.of(spec.build(), spec), torch.rand(2, 1, 28, 28), ["conv1"])
        >>> tuple(ranks["conv1"].shape), bool((ranks["conv1"] <= 1).all())
        ((6,), True)
    """
    known = {layer.name: layer for layer in model.spec.layout.layers}
    rank_sums = {name: _RankSum(tolerance) for name in layers}
    module = model.spec.skeleton()
    hooks = ((module.get_submodule(_output_module(known[name])), rank_sum) for name, rank_sum in rank_sums.items())
    with forward_hooks(hooks), torch.no_grad():
        for part in x.split(_BATCH):
            model.logits(part)
    return {name: rank_sum.mean() for name, rank_sum in rank_sums.items()}


def _output_module(layer: Layer) -> str:
    """The module whose output is a layer's maps: its norm, or itself."""
    return layer.followers[0].rpartition(".")[0] if layer.followers else layer.weight.rpartition(".")[0]


@dataclass(slots=True)
class _RankSum:
    """A forward hook that adds up the ranks of a module's outputs."""

    tolerance: float | None
    _sum: list[Tensor] = field(default_factory=list)
    _count: int = 0

    def __call__(self, _: nn.Module, __: object, out: Tensor) -> None:
        maps = in_full(out.detach()).relu()
        maps = maps[..., None, None] if maps.ndim == 2 else maps.flatten(3) if maps.ndim > 3 else maps[:, :, None]
        self._sum.append(map_ranks(maps, self.tolerance).double().sum(0) / min(maps.shape[-2:]))
        self._count += len(out)

    def mean(self) -> Tensor:
        """Mean over all inputs so far."""
        return torch.stack(self._sum).sum(0) / self._count

"""Posterior: what a client believes, a location and how sharply it believes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from fedfuse.core.params import Layer, Layout, Params
from fedfuse.linalg.factor import Factor, dense


@dataclass(frozen=True, slots=True)
class Flat:
    """No curvature: every direction weighs the same."""


@dataclass(frozen=True, slots=True)
class Diag:
    """Independent coordinates, one variance each; a tensor without a variance is a point mass."""

    variance: Params


@dataclass(frozen=True, slots=True)
class Kron:
    """Per layer, precision = B ⊗ A on the rows of [W | b]: A is in × in, B is out × out."""

    factors: Mapping[str, tuple[Factor, Factor]]


Geometry: TypeAlias = Flat | Diag | Kron


@dataclass(frozen=True, slots=True)
class Posterior:
    """A Gaussian over weights: mean and geometry.

    Example:
        >>> mean = {"weight": torch.zeros(1, 2)}
        >>> Posterior(mean, Diag({"weight": torch.tensor([[1.0, 4.0]])})).dense()[1].diagonal().tolist()
        [1.0, 0.25]
    """

    mean: Params
    geometry: Geometry = field(default_factory=Flat)

    def dense(self, layout: Layout | None = None) -> tuple[Tensor, Tensor]:
        """Mean and precision as one vector and one matrix in float64; for tests, memory is quadratic.

        Coordinates are ordered layer by layer, row-major over [W | b], then every other tensor.
        """
        layout = layout or Layout.guess(self.mean)
        blocks = [(layer.name, layer.matrix(self.mean), _layer_precision(self, layer)) for layer in layout.layers]
        seen = {n for layer in layout.layers for n in (layer.weight, layer.bias)} | set(
            layout.with_role("log_variance")
        )
        rest = [n for n in self.mean if n not in seen and self.mean[n].is_floating_point()]
        mean = torch.cat([m.double().flatten() for _, m, _ in blocks] + [self.mean[n].double().flatten() for n in rest])
        precision = torch.block_diag(*[p for _, _, p in blocks], *[_precision(self, n) for n in rest])
        return mean, precision


def _precision(posterior: Posterior, name: str) -> Tensor:
    if isinstance(posterior.geometry, Diag) and name in posterior.geometry.variance:
        return posterior.geometry.variance[name].double().flatten().reciprocal().diag()
    return torch.eye(posterior.mean[name].numel(), dtype=torch.float64)


def _layer_precision(posterior: Posterior, layer: Layer) -> Tensor:
    match posterior.geometry:
        case Kron(factors) if layer.name in factors:
            a, b = (dense(factor).double() for factor in factors[layer.name])
            return torch.kron(a, b) if layer.kind == "embedding" else torch.kron(b, a)  # its weight is Mᵀ
        case Diag(variance):
            ones = {n: torch.ones_like(posterior.mean[n]) for n in (layer.weight, layer.bias) if n is not None}
            return layer.matrix({**ones, **dict(variance)}).double().flatten().reciprocal().diag()
        case _:
            return torch.eye(layer.matrix(posterior.mean).numel(), dtype=torch.float64)

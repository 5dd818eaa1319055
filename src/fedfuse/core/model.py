"""Models: one network, a mixture of networks, or several that stay apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

from fedfuse.core.combine import Combine
from fedfuse.core.posterior import Posterior
from fedfuse.core.spec import Spec


@dataclass(frozen=True, slots=True)
class Single:
    """One network with one posterior over its weights."""

    spec: Spec
    posterior: Posterior

    @classmethod
    def of(cls, module: nn.Module, spec: Spec) -> Single:
        """The weights a module has now."""
        return cls(spec, Posterior({n: t.detach().clone() for n, t in module.state_dict().items()}))

    def logits(self, x: Tensor) -> Tensor:
        """The network's output at the posterior's mean."""
        return self.spec.forward(self.posterior.mean, x)


@dataclass(frozen=True, slots=True)
class Mixture:
    """Several networks that answer together."""

    members: tuple[Single, ...]
    weights: Tensor
    combine: Combine

    def logits(self, x: Tensor) -> Tensor:
        """The combined answer."""
        return self.combine(self.weights, torch.stack([m.logits(x) for m in self.members]))


@dataclass(frozen=True, slots=True)
class Apart:
    """Networks that were never fused: each is judged alone, and their scores are averaged."""

    members: tuple[Single, ...]


Model: TypeAlias = Single | Mixture | Apart


def networks(model: Model) -> tuple[Single, ...]:
    """The networks a model is made of."""
    return (model,) if isinstance(model, Single) else model.members

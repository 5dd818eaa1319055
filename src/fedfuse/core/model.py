"""Models: one network, a mixture of networks, or several that stay apart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor, nn

from fedfuse.core.inputs import as_read, convolves_images
from fedfuse.core.posterior import Posterior
from fedfuse.core.spec import Spec

# a model and inputs → an answer whose second axis is the inputs'; the first is that of a Bayesian network's draws
AskModel: TypeAlias = Callable[[Any, Tensor], Tensor]


class Model(Protocol):
    """What a server would deploy: one network, several that answer together, or several that stay apart."""

    @property
    def members(self) -> tuple[Single, ...]:
        """The networks it is made of."""
        ...


@runtime_checkable
class Answering(Model, Protocol):
    """A model that has one answer: a network, or a mixture."""

    def logits(self, x: Tensor) -> Tensor:
        """Its answer to some inputs."""
        ...

    def to(self, device: str) -> Answering:
        """The same model with its weights elsewhere."""
        ...


@dataclass(frozen=True, slots=True)
class Single:
    """One network with one posterior over its weights."""

    spec: Spec
    posterior: Posterior

    @property
    def members(self) -> tuple[Single, ...]:
        """Itself."""
        return (self,)

    @classmethod
    def of(cls, module: nn.Module, spec: Spec) -> Single:
        """The weights a module has now."""
        return cls(spec, Posterior({n: t.detach().clone() for n, t in module.state_dict().items()}))

    def logits(self, x: Tensor) -> Tensor:
        """The network's output at the posterior's mean."""
        x, mean = as_read(self.spec, x), self.posterior.mean
        if self.spec.is_ours and self.spec.prototype is None and convolves_images(self.spec, tuple(x.shape[1:])):
            # with a pixel's channels side by side convolutions and pooling are more than twice as fast
            # (a copy says so in its strides, where one channel may be read either way)
            mean = {n: t.clone(memory_format=torch.channels_last) if t.ndim == 4 else t for n, t in mean.items()}
        return self.spec.forward(mean, x)

    def to(self, device: str) -> Single:
        """The same network with its weights elsewhere."""
        mean = {n: t.to(device) for n, t in self.posterior.mean.items()}
        return replace(self, posterior=replace(self.posterior, mean=mean))


@dataclass(frozen=True, slots=True)
class Apart:
    """Networks that were never fused: each is judged alone, and their scores are averaged."""

    members: tuple[Single, ...]


def outputs(model: Single) -> int | None:
    """How many logits a network gives, read off its last linear layer; None if it has none.

    Example:
        >>> spec = Spec("mlp", {"inputs": 4, "classes": 3})
        >>> outputs(Single.of(spec.build(), spec))
        3
    """
    linear = [layer.weight for layer in model.spec.layout.layers if layer.kind == "linear"]
    return len(model.posterior.mean[linear[-1]]) if linear else None


@torch.no_grad()
def ask_in_batches(ask: AskModel, model: object, x: Tensor, batch: int) -> Tensor:
    """What `ask(model, part)` gives for every batch of inputs, joined, in float64.

    Example:
        >>> ask_in_batches(lambda scale, x: (scale * x)[None], 2.0, torch.ones(3, 1), batch=2).shape
        torch.Size([1, 3, 1])
    """
    return torch.cat([ask(model, part).double().cpu() for part in x.split(batch)], 1)

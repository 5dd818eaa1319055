"""How a mixture's members answer together; each rule is data, so a mixture can be saved and loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from fedfuse.errors import ConfigError


class Combine(Protocol):
    """How a mixture turns its members' logits into one answer."""

    def __call__(self, weights: Tensor, logits: Tensor) -> Tensor:
        """Weights (k,) and member logits (k, n, classes) to logits (n, classes)."""
        ...


@dataclass(frozen=True, slots=True)
class MeanProbability:
    """The weighted mean of softmax outputs: log Σ_k w_k softmax(z_k).

    Example:
        >>> z = torch.tensor([[[2.0, 0.0]], [[0.0, 2.0]]])
        >>> MeanProbability()(torch.tensor([0.5, 0.5]), z).exp()
        tensor([[0.5000, 0.5000]])
    """

    def __call__(self, weights: Tensor, logits: Tensor) -> Tensor:
        """Mean in log space, so that a vanishing probability does not become −∞."""
        log_weights = weights.to(logits).log()[:, None, None]
        return torch.logsumexp(logits.log_softmax(-1) + log_weights, 0)


COMBINES: dict[str, type] = {"MeanProbability": MeanProbability}


def combine_named(name: str, options: Mapping[str, Any]) -> Combine:
    """A rule by its class name, from a closed table: a file cannot name anything else."""
    if name not in COMBINES:
        raise ConfigError(f"there is no way to combine called {str(name)[:40]!r}; known are {', '.join(COMBINES)}")
    made: Combine = COMBINES[name](**options)
    return made

"""What holds weights during training: pulls with closed gradients, and projections after each step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from torch import Tensor

from fedfuse.core.messages import Brief
from fedfuse.core.seams import Objective, TaskLoss
from fedfuse.core.state import Local
from fedfuse.nets.cost import MASK


@dataclass(frozen=True, slots=True)
class Pull:
    """What is added to the loss.

    Attributes:
        mu: of μ/2 ‖w − w₀‖², w₀ being the weights the round began with.
        linear: c of ⟨c, w⟩, by parameter.
        kl: κ of κ KL(q ‖ prior).
        priors: mean and log-variance of the prior, by the name of the Gaussians' means.
    """

    mu: float = 0.0
    linear: Mapping[str, Tensor] = field(default_factory=dict)
    kl: float = 0.0
    priors: Mapping[str, tuple[Tensor | float, Tensor | float]] = field(default_factory=dict)


@runtime_checkable
class HasPull(Protocol):
    """An objective that may be nothing but the task's loss with pulls, and says which."""

    def pull(self, local: Local) -> Pull | None:
        """Its pulls in this round; None where it has other terms."""
        ...


def pull_of(objective: Objective, local: Local) -> Pull | None:
    """The pulls of an objective that is the task's loss with pulls; None for any other.

    A subclass that says nothing of its own pulls is another objective, whatever it inherits.

    Example:
        >>> pull_of(TaskLoss(), local=None).mu
        0.0
    """
    if type(objective) is TaskLoss:
        return Pull()
    says = isinstance(objective, HasPull) and "pull" in vars(type(objective))
    return objective.pull(local) if says else None  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class Masked:
    """Weights that the server's mask leaves out stay zero; without a mask they are free.

    Example:
        >>> import torch
        >>> brief = Brief(0, None, {}, {"mask/w": torch.tensor([True, False])})
        >>> Masked()("w", torch.ones(2), brief), Masked()("b", torch.ones(2), brief)
        (tensor([1., 0.]), tensor([1., 1.]))
    """

    def __call__(self, name: str, value: Tensor, brief: Brief) -> Tensor:
        """The value, zero where the mask is."""
        mask = brief.memory.get(f"{MASK}/{name}")
        return value if mask is None else value * mask.to(value)

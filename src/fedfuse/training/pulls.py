"""Objectives that are the task's loss with pulls: their gradients are closed and need no autograd.

The pulls are μ/2 ‖w − w₀‖², ⟨c, w⟩, and κ KL(q ‖ prior) of Gaussian weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from torch import Tensor

from fedfuse.core.seams import Objective, TaskLoss
from fedfuse.core.state import Local


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

"""Optimizer steps in place on lists of tensors: what `torch.optim` computes, without its start-up and overhead.

Agreement with `torch.optim.SGD` and `torch.optim.Adam` is tested step by step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from fedfuse.core.settings import LocalSettings, Optimizer

Tensors = list[Tensor]


class Stepper(Protocol):
    """Moves parameters along gradients; remembers what its rule remembers, for one round."""

    def __call__(self, params: Tensors, grads: Tensors, lr: float) -> None:
        """One step in place; the gradients may be overwritten."""
        ...


@dataclass(slots=True)
class SGD:
    """v ← ρ v + g + λ w;  w ← w − η v."""

    momentum: float
    weight_decay: float
    _velocity: Tensors = field(default_factory=list)

    def __call__(self, params: Tensors, grads: Tensors, lr: float) -> None:
        """One step in place."""
        if self.weight_decay:
            torch._foreach_add_(grads, params, alpha=self.weight_decay)
        if self.momentum:
            if self._velocity:
                torch._foreach_mul_(self._velocity, self.momentum)
                torch._foreach_add_(self._velocity, grads)
            else:
                self._velocity = [g.clone() for g in grads]
            grads = self._velocity
        torch._foreach_add_(params, grads, alpha=-lr)


@dataclass(slots=True)
class Adam:
    """Adam with L2 weight decay, and AMSGrad, which keeps the largest second moment seen."""

    betas: tuple[float, float]
    weight_decay: float
    amsgrad: bool
    eps: float = Optimizer.eps
    _step: int = 0
    _first: Tensors = field(default_factory=list)
    _second: Tensors = field(default_factory=list)
    _largest: Tensors = field(default_factory=list)

    def __call__(self, params: Tensors, grads: Tensors, lr: float) -> None:
        """One step in place."""
        if self.weight_decay:
            torch._foreach_add_(grads, params, alpha=self.weight_decay)
        if not self._first:
            self._first = [torch.zeros_like(p) for p in params]
            self._second = [torch.zeros_like(p) for p in params]
            self._largest = [torch.zeros_like(p) for p in params]
        self._step += 1
        b1, b2 = self.betas
        torch._foreach_lerp_(self._first, grads, 1 - b1)
        torch._foreach_mul_(self._second, b2)
        torch._foreach_addcmul_(self._second, grads, grads, 1 - b2)
        second = self._second
        if self.amsgrad:
            torch._foreach_maximum_(self._largest, self._second)
            second = self._largest
        root = torch._foreach_sqrt(second)
        torch._foreach_div_(root, (1 - b2**self._step) ** 0.5)
        torch._foreach_add_(root, self.eps)
        torch._foreach_addcdiv_(params, self._first, root, -lr / (1 - b1**self._step))


def log_variance_step(log_variances: Tensors, grads: Tensors, rate: float, rows: float) -> None:
    """Natural-gradient step of log-variances ρ = log σ², in place: ρ ← ρ − η · 2n ∂L/∂ρ, at most 1 up or down.

    A Gaussian's Fisher information about ρ is ½, so 2n ∂L/∂ρ is the natural gradient of the objective n L, n being the
    number of rows that KL is divided by: the client's own, or those of all clients. With L = mean loss + KL/n it is
    σ² (n h + 1/s²) − 1, h being the loss's curvature: it has no scale of its own, and vanishes at the posterior's
    variance. Plain SGD sees it divided by 2n, and stands still. Momentum, weight decay and L1 are for weights: they
    would pull variances to one, whatever the data say.

    Example:
        >>> rho = torch.tensor([-6.0])
        >>> log_variance_step([rho], [torch.tensor([-1e-4])], rate=0.1, rows=5000)  # the prior alone: up by the rate
        >>> rho
        tensor([-5.9000])
    """
    torch._foreach_mul_(grads, -2.0 * rows * rate)
    torch._foreach_clamp_min_(grads, -1.0)
    torch._foreach_clamp_max_(grads, 1.0)
    torch._foreach_add_(log_variances, grads)


def stepper(optimizer: Optimizer) -> Stepper:
    """A fresh optimizer: buffers do not survive a round."""
    if optimizer.name == "sgd":
        return SGD(optimizer.momentum, optimizer.weight_decay)
    return Adam(optimizer.betas, optimizer.weight_decay, optimizer.name == "amsgrad")


def shape_gradients(params: Tensors, grads: Tensors, settings: LocalSettings) -> None:
    """L1's subgradient l1·sign(w), then clipping to the global norm, in place."""
    if settings.l1:
        torch._foreach_add_(grads, torch._foreach_sign(params), alpha=settings.l1)
    if settings.clip is not None:
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
        if norm > settings.clip:
            torch._foreach_mul_(grads, float(settings.clip / norm))

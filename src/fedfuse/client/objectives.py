"""Local losses that several methods share: each adds its term to a base objective, so terms compose."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from fedfuse.core.params import Params
from fedfuse.core.seams import TRAINING_PASSES, Batch, Effort, Objective, TaskLoss, passes_of
from fedfuse.core.state import Local, representation, with_kind
from fedfuse.core.torch_utils import in_full
from fedfuse.training.pulls import Pull, pull_of


@dataclass(frozen=True, slots=True)
class Proximal:
    """FedProx's pull towards the global model: base + μ/2 ‖w − w_global‖²."""

    mu: float
    base: Objective = field(default_factory=TaskLoss)

    def __call__(self, local: Local, batch: Batch) -> Tensor:
        """The base loss and the quadratic term."""
        loss = self.base(local, batch)
        if self.mu == 0:
            return loss
        away = torch._foreach_sub(list(local.live.values()), list(local.anchor.values()))
        return loss + self.mu / 2 * torch.stack([(d * d).sum() for d in map(in_full, away)]).sum()

    def pull(self, local: Local) -> Pull | None:
        """The base's pulls and the quadratic term."""
        base = pull_of(self.base, local)
        return None if base is None else replace(base, mu=base.mu + self.mu)


@dataclass(frozen=True, slots=True)
class Contrastive:
    """MOON's term: be near the global model's representation, far from one's own last one.

    base + μ · mean −log( e^{cos(z, z_global)/T} / (e^{cos(z, z_global)/T} + e^{cos(z, z_last)/T}) ),
    where z is the input of the last linear layer (the projection, for a network with a head). In a client's first
    round there is no last model and the term is exactly zero.
    """

    mu: float
    temperature: float = 0.5
    base: Objective = field(default_factory=TaskLoss)

    def __call__(self, local: Local, batch: Batch) -> Tensor:
        """The base loss and the contrastive term."""
        last = local.once("last", lambda at_work: at_work.recall("last"))
        if not last or self.mu == 0:
            return self.base(local, batch)
        x, y = batch
        if isinstance(self.base, TaskLoss):  # one forward pass serves both terms
            logits, z = representation(local.module, x)
            loss = local.task.loss(logits, y)
        else:
            loss, z = self.base(local, batch), representation(local.module, x)[1]
        with torch.no_grad():
            near = representation(local.frozen("global", local.brief.params), x)[1]
            far = representation(local.frozen("last", last), x)[1]
        similar = torch.stack([F.cosine_similarity(z, near), F.cosine_similarity(z, far)], 1)
        first = torch.zeros(len(y), dtype=torch.int64, device=y.device)
        return loss + self.mu * F.cross_entropy(similar / self.temperature, first)

    def passes(self, effort: Effort) -> float:
        """The base's, and from the second round on a pass through the global and the last network each."""
        base = passes_of(self.base, effort)
        if self.mu == 0 or effort.round == 0:
            return base
        return base + 2 + (0 if isinstance(self.base, TaskLoss) else TRAINING_PASSES)

    def pull(self, local: Local) -> Pull | None:
        """The base's in a first round, where its own term is zero."""
        return None if self.mu and local.recall("last") else pull_of(self.base, local)


@dataclass(frozen=True, slots=True)
class KeepModel:
    """What `Contrastive` reads in the client's next round: the model of this one, which is not sent."""

    def __call__(self, local: Local, notes: Params) -> Params:  # noqa: ARG002 - the seam's signature
        """The trained weights and buffers."""
        return with_kind("last", {n: t.detach() for n, t in local.module.state_dict().items()})

"""Local losses: each adds its term to a base objective, so terms compose."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from fedfuse.core.seams import TRAINING_PASSES, Batch, Effort, Objective, TaskLoss, passes_of
from fedfuse.core.state import Local, entries_of, representation
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
class Controlled:
    """SCAFFOLD's correction as a linear term of the loss: base + ⟨c − c_k, w⟩.

    Its gradient is c − c_k, so the training loop needs no special case. Both control variates start at zero.
    """

    base: Objective = field(default_factory=TaskLoss)

    def __call__(self, local: Local, batch: Batch) -> Tensor:
        """The base loss and the linear term; nothing is added while both variates are zero."""
        loss = self.base(local, batch)
        pull = local.once("control", _control_gap)
        return loss + sum((pull[n] * in_full(w)).sum() for n, w in local.live.items() if n in pull)

    def pull(self, local: Local) -> Pull | None:
        """The base's pulls and the linear term."""
        base, gap = pull_of(self.base, local), local.once("control", _control_gap)
        return None if base is None else replace(base, linear={n: base.linear.get(n, 0) + gap[n] for n in gap})


def _control_gap(local: Local) -> dict[str, Tensor]:
    theirs, mine = entries_of(local.brief.memory, "control"), local.recall("control")
    names = theirs.keys() | mine.keys()
    zero = torch.zeros(())
    gaps = {n: in_full(theirs.get(n, zero)) - in_full(mine.get(n, zero)) for n in local.live if n in names}
    return {n: gap.to(local.settings.device) for n, gap in gaps.items()}


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

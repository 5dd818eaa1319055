"""What clients keep for their next round: their control variate, their last model, their factors."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedfuse.core.params import Params
from fedfuse.core.state import Local, entries_of, with_kind
from fedfuse.core.torch_utils import in_full


@dataclass(frozen=True, slots=True)
class KeepControl:
    """SCAFFOLD: the client's own control variate, moved by the change it sends, c_k ← c_k + Δc_k."""

    def __call__(self, local: Local, notes: Params) -> Params:
        """The variate of every trained weight."""
        mine, moved = local.recall("control"), entries_of(notes, "control")
        zero = torch.zeros(())
        sums = {n: (in_full(mine.get(n, zero)) + in_full(t)).to(t.dtype) for n, t in moved.items()}
        return with_kind("control", {**mine, **sums})


@dataclass(frozen=True, slots=True)
class KeepModel:
    """MOON: this round's model, for the next."""

    def __call__(self, local: Local, notes: Params) -> Params:  # noqa: ARG002 - the seam's signature
        """The trained weights and buffers."""
        return with_kind("last", {n: t.detach() for n, t in local.module.state_dict().items()})


@dataclass(frozen=True, slots=True)
class KeepFactors:
    """FedLPA over several rounds: the Kronecker factors the client sent, for `PosteriorPull`."""

    def __call__(self, local: Local, notes: Params) -> Params:  # noqa: ARG002 - the seam's signature
        """The factors as they were sent, without what the client chose beside them."""
        return with_kind("kron", {n: t for n, t in entries_of(notes, "kron").items() if "/" in n})

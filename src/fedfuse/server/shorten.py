"""A client's move made shorter, without a copy of it."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fedfuse.core.messages import ClientUpdate
from fedfuse.core.params import Params
from fedfuse.wire.codec import LazyParams, forms_of


def shorten_move(update: ClientUpdate, start: Params, factor: float) -> ClientUpdate:
    """The update at w₀ + factor (w_k − w₀); weights are rescaled as they are read, counters stay as they are."""
    mean = update.posterior.mean

    def fetch(name: str, begin: int, end: int) -> Tensor:
        theirs, ours = (p[name].reshape(-1)[begin:end] for p in (mean, start))
        return torch.lerp(ours, theirs, factor) if theirs.is_floating_point() else theirs

    return replace(update, posterior=replace(update.posterior, mean=LazyParams(forms_of(mean), fetch)))

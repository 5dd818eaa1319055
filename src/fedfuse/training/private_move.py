"""A client's move that hides it: shortened, and with its share of the noise, before it leaves."""

from __future__ import annotations

import math
import secrets

import torch
from torch import Tensor

from fedfuse.core.messages import Brief
from fedfuse.core.params import Params, squared_distance
from fedfuse.core.settings import MoveNoise


def disturb_move(trained: Params, brief: Brief, how: MoveNoise, seeded: torch.Generator) -> dict[str, Tensor]:
    """Trained weights whose move from the brief's is no longer than C and has noise N(0, (zC)²/K) in every number.

    Counters stay as they are, and variances of running statistics are kept from falling below zero.

    Args:
        trained: the weights.
        brief: what the client began with.
        how: C, z and K.
        seeded: where noise comes from if it is to be reproducible.
    """
    length = math.sqrt(squared_distance(trained, brief.params))
    share = min(1.0, how.clip / length) if length else 1.0
    draw = seeded if how.reproducible else torch.Generator().manual_seed(secrets.randbits(63))
    roles, moved = brief.spec.layout.roles, dict[str, Tensor]()
    for name, tensor in trained.items():
        moved[name] = tensor
        if tensor.is_floating_point():
            start = brief.params[name].to(tensor.device).double()
            noise = torch.randn(tensor.shape, generator=draw, dtype=torch.float64).to(tensor.device) * how.sigma
            moved[name] = (start + share * (tensor.double() - start) + noise).to(tensor.dtype)
        if roles.get(name) == "statistic" and name.endswith("running_var"):
            moved[name] = moved[name].clamp(min=0)
    return moved

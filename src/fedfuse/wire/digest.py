"""Short names for sets of weights."""

from __future__ import annotations

import hashlib

from fedfuse.core.params import Params
from fedfuse.wire.codec import encode


def fingerprint(params: Params) -> str:
    """A short name for a set of weights, equal for equal weights.

    Example:
        >>> import torch
        >>> fingerprint({"w": torch.zeros(2)}) == fingerprint({"w": torch.zeros(2)})
        True
    """
    digest = hashlib.sha256()
    for name in sorted(params):
        digest.update(f"{name}{tuple(params[name].shape)}".encode())
        digest.update(encode({"": params[name]}, {}))
    return digest.hexdigest()[:16]

"""Named random streams: every draw says what it is for, and nothing touches the global generator."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def seed_for(seed: int, *purpose: str | int) -> int:
    """A 63-bit seed that depends on the run's seed and on every word of the purpose.

    Example:
        >>> seed_for(0, "round", 1, "client-03") == seed_for(0, "round", 1, "client-03")
        True
        >>> seed_for(0, "round", 1) == seed_for(0, "round", 11)
        False
    """
    text = "\x1f".join([str(seed)] + [f"{type(p).__name__}:{p}" for p in purpose])  # types too: 1 is not "1"
    return (
        int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1
    )  # signed 64-bit seeds are not negative


def stream(seed: int, *purpose: str | int) -> torch.Generator:
    """A generator of its own for one purpose, e.g. ``stream(seed, round, client, "batches")``.

    Example:
        >>> a, b = stream(0, "start"), stream(0, "start")
        >>> bool(torch.rand(3, generator=a).equal(torch.rand(3, generator=b)))
        True
    """
    return torch.Generator().manual_seed(seed_for(seed, *purpose))


@contextmanager
def seeded(seed: int, *purpose: str | int) -> Iterator[None]:
    """Give code that can only draw from the global generator (dropout, initializers) a stream of its own."""
    state = torch.random.get_rng_state()
    torch.default_generator.manual_seed(seed_for(seed, *purpose))
    try:
        yield
    finally:
        torch.random.set_rng_state(state)

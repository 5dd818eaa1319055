"""The published partitions, bit for bit: the loops of NIID-Bench, shared by PFNM, FedMA, MOON and FedLPA.

They use NumPy's legacy generator and, for the classes of a client, Python's own; both are private here.
"""

from __future__ import annotations

import random

import numpy as np

from fedfuse.data.rows import Array
from fedfuse.errors import ConfigError

ATTEMPTS = 2000


def dirichlet(labels: Array, clients: int, alpha: float, min_rows: int, seed: int) -> tuple[list[Array], int]:
    """Rows per client, and how many attempts were thrown away.

    For each class in order: shuffle its rows, draw one Dirichlet, set the share of every client that holds
    at least N / clients rows to zero, normalise, cut at floor(cumulative share · class size). All of it again
    until the smallest client has `min_rows`; the generator runs on.

    Where the draw underflows, or every client with room drew zero, the shares are not numbers; the published
    code then gives the whole class to the last client, and so does this.
    """
    state = np.random.RandomState(seed)
    members = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    for attempt in range(ATTEMPTS):
        held: list[Array] = [np.empty(0, dtype=np.int64)] * clients
        for rows in members:
            shuffled = _shuffled(state, rows)
            parts = np.split(shuffled, _cuts(state, len(rows), held, alpha, len(labels)))
            held = [np.concatenate(pair) for pair in zip(held, parts, strict=True)]
        if min(map(len, held)) >= min_rows:
            return [_shuffled(state, rows) for rows in held], attempt
    raise ConfigError(
        f"partition: the published loop found no split with {min_rows} rows for each of {clients} clients in "
        f"{ATTEMPTS} attempts at alpha {alpha:g}; leave compat out, or raise alpha"
    )


def _cuts(state: np.random.RandomState, size: int, held: list[Array], alpha: float, total: int) -> Array:
    """Where a class of this size is cut between clients."""
    with np.errstate(invalid="ignore", divide="ignore"):
        share = state.dirichlet(np.repeat(alpha, len(held)))
        share = share * [len(own) < total / len(held) for own in held]
        share = share / share.sum()
    if not np.isfinite(share).all():
        return np.zeros(len(held) - 1, dtype=np.int64)
    return (np.cumsum(share) * size).astype(np.int64)[:-1]


def classes(labels: Array, clients: int, per_client: int, seed: int) -> list[Array]:
    """Rows per client when client i owns class i mod K and others drawn by rejection with `randint`."""
    state, chance = np.random.RandomState(seed), random.Random(seed)
    present = np.unique(labels)
    owned = [_drawn(chance, client % len(present), per_client, len(present)) for client in range(clients)]
    held: list[Array] = [np.empty(0, dtype=np.int64)] * clients
    for label, value in enumerate(present):
        rows = _shuffled(state, np.flatnonzero(labels == value))
        owners = [client for client in range(clients) if label in owned[client]]
        for owner, part in zip(owners, np.array_split(rows, max(1, len(owners))), strict=False):
            held[owner] = np.concatenate((held[owner], part))
    return held


def _drawn(chance: random.Random, first: int, count: int, total: int) -> set[int]:
    """A client's classes; at most `total`, which the caller has checked."""
    owned = {first}
    while len(owned) < count:
        owned.add(chance.randint(0, total - 1))
    return owned


def _shuffled(state: np.random.RandomState, rows: Array) -> Array:
    rows = rows.copy()
    state.shuffle(rows)
    return rows

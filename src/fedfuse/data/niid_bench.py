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
    at least N / clients rows to zero, normalize, cut at floor(cumulative share · class size). All of it again
    until the smallest client has `min_rows`; the generator runs on.

    Where the draw underflows, or every client with room drew zero, the shares are not numbers; the published
    code then gives the whole class to the last client, and so does this.
    """
    state = np.random.RandomState(seed)
    members = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    for attempt in range(ATTEMPTS):
        client_rows: list[Array] = [np.empty(0, dtype=np.int64)] * clients
        for rows in members:
            shuffled = _shuffle_copy(state, rows)
            parts = np.split(shuffled, _cuts(state, len(rows), client_rows, alpha, len(labels)))
            client_rows = [np.concatenate(pair) for pair in zip(client_rows, parts, strict=True)]
        if min(map(len, client_rows)) >= min_rows:
            return [_shuffle_copy(state, rows) for rows in client_rows], attempt
    raise ConfigError(
        f"partition: the published loop found no split with {min_rows} rows for each of {clients} clients in "
        f"{ATTEMPTS} attempts at alpha {alpha:g}; leave compat out, or raise alpha"
    )


def _cuts(state: np.random.RandomState, size: int, client_rows: list[Array], alpha: float, total: int) -> Array:
    """Where a class of this size is cut between clients."""
    with np.errstate(invalid="ignore", divide="ignore"):
        share = state.dirichlet(np.repeat(alpha, len(client_rows)))
        share = share * [len(own) < total / len(client_rows) for own in client_rows]
        share = share / share.sum()
    if not np.isfinite(share).all():
        return np.zeros(len(client_rows) - 1, dtype=np.int64)
    return (np.cumsum(share) * size).astype(np.int64)[:-1]


def classes(labels: Array, clients: int, per_client: int, seed: int) -> list[Array]:
    """Rows per client when client i owns class i mod K and others drawn by rejection with `randint`."""
    state, rng = np.random.RandomState(seed), random.Random(seed)
    present = np.unique(labels)
    owned = [_draw_classes(rng, client % len(present), per_client, len(present)) for client in range(clients)]
    client_rows: list[Array] = [np.empty(0, dtype=np.int64)] * clients
    for label, value in enumerate(present):
        rows = _shuffle_copy(state, np.flatnonzero(labels == value))
        owners = [client for client in range(clients) if label in owned[client]]
        for owner, part in zip(owners, np.array_split(rows, max(1, len(owners))), strict=False):
            client_rows[owner] = np.concatenate((client_rows[owner], part))
    return client_rows


def _draw_classes(rng: random.Random, first: int, count: int, total: int) -> set[int]:
    """A client's classes; at most `total`, which the caller has checked."""
    owned = {first}
    while len(owned) < count:
        owned.add(rng.randint(0, total - 1))
    return owned


def _shuffle_copy(state: np.random.RandomState, rows: Array) -> Array:
    rows = rows.copy()
    state.shuffle(rows)
    return rows

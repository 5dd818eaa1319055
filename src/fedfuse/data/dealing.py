"""Assigns rows to clients by a scheme; `deal` sees only labels, the number of clients and the seed.

Positions count within the labels given. Everything random comes from the seed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial, singledispatch

import numpy as np

from fedfuse.data import niid_bench
from fedfuse.data.rows import Array
from fedfuse.data.schemes import Classes, Dirichlet, Iid, Labels, Quantity, Shards, Shares
from fedfuse.errors import ConfigError


@dataclass(frozen=True, slots=True, eq=False)
class Deal:
    """The row positions of each client, and facts about how they were drawn (retries, rows moved)."""

    rows: list[Array]
    facts: dict[str, object] = field(default_factory=dict)


@singledispatch
def deal(scheme: object, labels: Array, clients: int, seed: int) -> Deal:  # noqa: ARG001
    """Assign every row position to a client; the implementation is chosen by the scheme's type.

    Example:
        >>> [len(rows) for rows in deal(Iid(), np.zeros(7), 2, seed=0).rows]
        [4, 3]
    """
    raise ConfigError(f"partition: {scheme!r} is no scheme, expected one of fedfuse.data.Scheme; use Iid()")


@deal.register
def _(scheme: Iid, labels: Array, clients: int, seed: int) -> Deal:  # noqa: ARG001
    order = np.random.default_rng(seed).permutation(len(labels))
    return Deal([np.sort(part) for part in np.array_split(order, clients)])


@deal.register
def _(scheme: Shares, labels: Array, clients: int, seed: int) -> Deal:
    if clients != len(scheme.shares):
        raise ConfigError(
            f"partition: there are {len(scheme.shares)} shares for {clients} clients, expected one share per "
            "client; change one of the two"
        )
    order = np.random.default_rng(seed).permutation(len(labels))
    cuts = np.rint(np.cumsum(scheme.shares) * len(labels)).astype(np.int64)
    return Deal([np.sort(part) for part in np.split(order, cuts)[:-1]])


@deal.register
def _(scheme: Dirichlet, labels: Array, clients: int, seed: int) -> Deal:
    if scheme.compat:
        rows, retries = niid_bench.dirichlet(labels, clients, scheme.alpha, scheme.min_rows, seed)
        return Deal(rows, {"retries": retries, "min_rows": scheme.min_rows, "rows_moved": 0})
    rng = np.random.default_rng(seed)
    _, sizes = np.unique(labels, return_counts=True)
    draw = partial(_dirichlet_counts, rng, sizes, clients, scheme.alpha, scheme.balance)
    counts, facts = _draw_with_minimum(rng, draw, scheme.min_rows, scheme.retries)
    return Deal(_assign_rows(rng, labels, counts), facts)


@deal.register
def _(scheme: Quantity, labels: Array, clients: int, seed: int) -> Deal:
    rng = np.random.default_rng(seed)
    draw = partial(_quantity_counts, rng, len(labels), clients, scheme)
    counts, facts = _draw_with_minimum(rng, draw, scheme.min_rows, scheme.retries)
    return Deal(_assign_rows(rng, np.zeros(len(labels), dtype=np.int64), counts), facts)


@deal.register
def _(scheme: Classes, labels: Array, clients: int, seed: int) -> Deal:
    total = _class_count(labels, scheme.per_client, "per_client")
    if scheme.compat:
        return Deal(niid_bench.classes(labels, clients, scheme.per_client, seed))
    rng = np.random.default_rng(seed)
    owned = np.zeros((clients, total), dtype=bool)
    for client, own in enumerate(owned):
        own[client % total] = True
        own[rng.permutation(np.flatnonzero(~own))[: scheme.per_client - 1]] = True
    return Deal(_split_among_owners(rng, labels, owned))


@deal.register
def _(scheme: Labels, labels: Array, clients: int, seed: int) -> Deal:
    total = _class_count(labels, scheme.high, "high")
    rng = np.random.default_rng(seed)
    owned = np.zeros((clients, total), dtype=bool)
    for own in owned:
        own[rng.permutation(total)[: rng.integers(scheme.low, scheme.high + 1)]] = True
    if scheme.share == "split":
        return Deal(_split_among_owners(rng, labels, owned))
    index = np.unique(labels, return_inverse=True)[1]
    return Deal([np.flatnonzero(own[index]) for own in owned])


@deal.register
def _(scheme: Shards, labels: Array, clients: int, seed: int) -> Deal:
    count = clients * scheme.per_client
    if count > len(labels):
        raise ConfigError(
            f"partition: {clients} clients with {scheme.per_client} shards each make {count} shards of "
            f"{len(labels)} rows, expected at least one row in a shard; lower clients or per_client"
        )
    rng = np.random.default_rng(seed)
    mixed = rng.permutation(len(labels))
    shards = np.array_split(mixed[np.argsort(labels[mixed], kind="stable")], count)
    dealt = rng.permutation(count).reshape(clients, scheme.per_client)
    return Deal([np.sort(np.concatenate([shards[one] for one in own])) for own in dealt])


def _class_count(labels: Array, asked: int, field_name: str) -> int:
    """How many classes there are, which must be at least what a client is to own."""
    total = len(np.unique(labels))
    if asked > total:
        raise ConfigError(
            f"partition: {field_name} is {asked}, but there are {total} classes; lower it to at most {total}"
        )
    return total


def dirichlet_shares(rng: np.random.Generator, alpha: float, allowed: Array) -> Array:
    """One draw of Dirichlet(alpha, ..., alpha), conditioned on zero where not `allowed`.

    A Gamma(alpha) variable is Gamma(alpha + 1) · U^(1/alpha), so its logarithm times alpha is
    alpha · log Gamma(alpha + 1) − Exp(1). Normalizing these logarithms cannot underflow to all zeros,
    however small alpha is, and the allowed client with the largest draw always has a share.

    Example:
        >>> dirichlet_shares(np.random.default_rng(0), 5e-4, np.array([False, True, True])).sum()
        np.float64(1.0)
    """
    scaled = alpha * np.log(rng.standard_gamma(alpha + 1, len(allowed)))
    scaled -= rng.standard_exponential(len(allowed))
    scaled[~allowed] = -np.inf
    with np.errstate(over="ignore"):  # A gap too wide for a float is a share of zero.
        weights = np.exp((scaled - scaled.max()) / alpha)
    return np.asarray(weights / weights.sum())


def _counts_from_shares(shares: Array, size: int) -> Array:
    """Whole numbers that sum to `size`, cut at the rounded cumulative shares.

    The published loop takes the floor, which hands the last client a row of nearly every class.
    """
    edges = np.concatenate(([0], np.rint(np.cumsum(shares)[:-1] * size), [size]))
    return np.diff(np.minimum(edges, size)).astype(np.int64)


def _dirichlet_counts(rng: np.random.Generator, sizes: Array, clients: int, alpha: float, balance: bool) -> Array:
    """One attempt: rows per client and class."""
    counts = np.zeros((clients, len(sizes)), dtype=np.int64)
    row_counts, fair = np.zeros(clients, dtype=np.int64), sizes.sum() / clients
    for column, size in enumerate(sizes):
        # Somebody always has room: were all at their fair number, no rows would be left.
        room = row_counts < fair if balance else np.ones(clients, dtype=bool)
        counts[:, column] = _counts_from_shares(dirichlet_shares(rng, alpha, room), size)
        row_counts += counts[:, column]
    return counts


def _quantity_counts(rng: np.random.Generator, rows: int, clients: int, scheme: Quantity) -> Array:
    """One attempt: rows per client, in a single column."""
    if scheme.alpha is not None:
        shares = dirichlet_shares(rng, scheme.alpha, np.ones(clients, dtype=bool))
    else:
        logs = (scheme.sigma or 0.0) * rng.standard_normal(clients)
        shares = np.exp(logs - logs.max())
        shares /= shares.sum()
    return _counts_from_shares(shares, rows)[:, None]


def _draw_with_minimum(
    rng: np.random.Generator, draw: Callable[[], Array], min_rows: int, retries: int
) -> tuple[Array, dict[str, object]]:
    """Counts (clients × classes) that leave nobody with fewer than `min_rows`.

    Draws until that holds. After `retries` failed attempts, rows are moved from the largest clients of the attempt
    that came nearest. Where there are not enough rows for everybody, the minimum is lowered.
    """
    best = draw()
    minimum = min(min_rows, int(best.sum()) // len(best))
    attempts = 0
    while (missing := _missing_rows(best, minimum)) and attempts < retries:
        attempts += 1
        best = min(best, draw(), key=partial(_missing_rows, minimum=minimum))
    facts: dict[str, object] = {
        "retries": attempts,
        "min_rows": minimum,
        "smallest_drawn": int(best.sum(1).min()),
        "rows_moved": missing,
    }
    return (_move_rows_to_minimum(rng, best, minimum) if missing else best), facts


def _missing_rows(counts: Array, minimum: int) -> int:
    """How many rows are missing in all until every client has the minimum."""
    return int(np.maximum(minimum - counts.sum(1), 0).sum())


def _move_rows_to_minimum(rng: np.random.Generator, counts: Array, minimum: int) -> Array:
    """Move random rows from the largest client to the smallest until every client has the minimum."""
    counts = counts.copy()
    row_counts = counts.sum(1)
    while (need := minimum - row_counts.min()) > 0:
        smallest, largest = int(row_counts.argmin()), int(row_counts.argmax())
        moved = rng.multivariate_hypergeometric(counts[largest], min(need, row_counts[largest] - minimum))
        counts[largest] -= moved
        counts[smallest] += moved
        row_counts[largest] -= moved.sum()
        row_counts[smallest] += moved.sum()
    return counts


def _split_among_owners(rng: np.random.Generator, labels: Array, owned: Array) -> list[Array]:
    """Each class cut equally among the clients that own it; classes without owner go to nobody."""
    _, sizes = np.unique(labels, return_counts=True)
    counts = np.zeros(owned.shape, dtype=np.int64)
    for column, size in enumerate(sizes):
        owners = np.flatnonzero(owned[:, column])
        if len(owners):
            counts[owners, column] = [len(part) for part in np.array_split(np.arange(size), len(owners))]
    return _assign_rows(rng, labels, counts)


def _assign_rows(rng: np.random.Generator, labels: Array, counts: Array) -> list[Array]:
    """Positions per client, drawn at random so that client c gets counts[c, k] of the k-th class."""
    clients = len(counts)
    owner = np.full(len(labels), clients)
    for column, label in enumerate(np.unique(labels)):
        rows = rng.permutation(np.flatnonzero(labels == label))[: counts[:, column].sum()]
        owner[rows] = np.repeat(np.arange(clients), counts[:, column])
    order = np.argsort(owner, kind="stable")
    return np.split(order, np.searchsorted(owner[order], np.arange(1, clients + 1)))[:clients]

"""Which training row belongs to which client, to the server, or to neither.

`partition` takes the server's rows, lets `deal` share out the rest by a scheme (`schemes`), and keeps rows for
validation. Every scheme decides first how many rows of each class a client gets, then which: `_assign_rows`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, singledispatch

import numpy as np
import torch
from torch import Tensor

from fedfuse.core.messages import client_order
from fedfuse.data.rows import Array
from fedfuse.data.schemes import (
    Classes,
    Dirichlet,
    Iid,
    Labels,
    Natural,
    Quantity,
    Scheme,
    ServerRowsConfig,
    Shards,
    Shares,
)
from fedfuse.errors import ConfigError

# One stream per purpose: asking for server rows or validation rows must not change which client gets what.
SERVER, VALIDATION = 1, 2
_ATTEMPTS = 2000  # of the published loop, which has no end of its own


@dataclass(frozen=True, slots=True, eq=False)
class Partition:
    """Who holds which training rows.

    Attributes:
        clients: client id → positions it trains on; ids sort in the order of their numbers.
        server: positions the server holds.
        held_out: positions that go neither to a client nor to the server.
        validation: client id → positions of its own that it keeps out of training.
        facts: how it came about: scheme, retries, rows moved, sizes, classes that no client holds.
    """

    clients: Mapping[str, Tensor]
    server: Tensor
    held_out: Tensor
    validation: Mapping[str, Tensor] = field(default_factory=dict)
    facts: Mapping[str, object] = field(default_factory=dict)

    def counts(self, labels: Tensor, classes: int) -> Tensor:
        """Training rows per client and class, (clients, classes)."""
        return torch.stack([torch.bincount(labels[rows], minlength=classes) for rows in self.clients.values()])


def partition(
    labels: Tensor,
    scheme: Scheme,
    clients: int,
    seed: int,
    *,
    server_fraction: float = 0.0,
    server_rows: ServerRowsConfig | None = None,
    validation_fraction: float = 0.0,
    owners: Sequence[str] = (),
) -> Partition:
    """Split training rows among clients.

    The server's rows are taken first, the rest is assigned by the scheme, then each client keeps rows of its
    own for validation. No row is given twice, except by `Labels(share="copy")`, whose clients overlap;
    there a row that one client keeps for validation is no other client's training row.

    Args:
        labels: the training labels.
        scheme: how to share; see `fedfuse.data.schemes`.
        clients: how many clients.
        seed: the same seed gives the same partition.
        server_fraction: share of the training rows that the server holds, drawn at random.
        server_rows: instead, how many rows of which classes the server holds.
        validation_fraction: share of each client's rows that it keeps out of training, at least one row
            of a client that has two.
        owners: who holds each row by nature, for the scheme of that name; `clients` is then not asked.

    Example:
        >>> from fedfuse.data.schemes import Classes
        >>> labels = torch.tensor([0, 1, 2] * 10)
        >>> partition(labels, Classes(per_client=1), clients=3, seed=0).counts(labels, 3)
        tensor([[10,  0,  0],
                [ 0, 10,  0],
                [ 0,  0, 10]])
    """
    if labels.ndim != 1 or labels.dtype != torch.int64 or (len(labels) and int(labels.min()) < 0):
        raise ConfigError(
            f"partition: labels are {labels.dtype} of shape {tuple(labels.shape)}, expected one int64 from 0 on "
            "for each row; convert them"
        )
    if not 0 <= seed < 2**32:
        raise ConfigError(f"partition: the seed is {seed}, expected a whole number from 0 to 2**32 - 1")
    for name, value in (("server_fraction", server_fraction), ("validation_fraction", validation_fraction)):
        if not 0 <= value < 1:
            raise ConfigError(f"{name} is {value}, expected a number from 0 to below 1; it is a share of the rows")
    if server_fraction and server_rows:
        raise ConfigError("server_fraction and server_rows are both given, expected one; drop the other")
    if server_fraction:
        server_rows = ServerRowsConfig(fraction=server_fraction)
    y = labels.cpu().numpy()
    server, pool = _take_server_rows(y, server_rows, seed)
    if isinstance(scheme, Natural):
        if len(owners) != len(y):
            raise ConfigError(
                "partition: kind 'natural' leaves rows where they came from and this source does not say where that "
                "is; use heart-disease, a table with the option `client`, or another kind"
            )
        ids = sorted({owners[row] for row in pool}, key=client_order)
        dealt = Deal([np.array([row for row in pool if owners[row] == name], dtype=np.int64) for name in ids])
        rows = dealt.rows
    else:
        if not 1 <= clients <= len(pool):
            raise ConfigError(
                f"partition: {clients} clients are to share {len(pool)} rows, expected at least one client and no "
                "more clients than rows; change the number of clients"
            )
        dealt, ids = deal(scheme, y[pool], clients, seed), client_ids(clients)
        rows = [pool[positions] for positions in dealt.rows]
        if empty := [name for name, own in zip(ids, rows, strict=True) if not len(own)]:
            raise ConfigError(
                f"partition: {', '.join(empty[:5])}{' and others' if len(empty) > 5 else ''} would hold no rows "
                f"under the scheme {scheme.kind!r}, expected at least one each; use fewer clients or more rows"
            )
    validation = _validation(y, rows, scheme, validation_fraction, seed)
    train = [own[~np.isin(own, kept)] for own, kept in zip(rows, validation, strict=True)]
    held_out = np.setdiff1d(np.arange(len(y)), np.concatenate((server, *rows)))
    covered, sizes = np.unique(y[np.concatenate(train)]), [len(own) for own in train]
    kept_out = zip(ids, validation, strict=True) if validation_fraction else ()
    return Partition(
        clients={name: torch.from_numpy(own) for name, own in zip(ids, train, strict=True)},
        server=torch.from_numpy(server),
        held_out=torch.from_numpy(held_out),
        validation={name: torch.from_numpy(own) for name, own in kept_out},
        facts={
            "kind": scheme.kind,
            "scheme": scheme.model_dump(exclude_none=True),
            "seed": seed,
            **dealt.facts,
            "smallest_client": min(sizes),
            "largest_client": max(sizes),
            "server_rows": len(server),
            "held_out_rows": len(held_out),
            "classes_held": len(covered),
            "classes_missing": np.setdiff1d(np.unique(y), covered).tolist(),
        },
    )


def client_ids(clients: int) -> list[str]:
    """Names whose sorted order is the order of their numbers.

    Example:
        >>> client_ids(2), client_ids(101)[-1]
        (['client-00', 'client-01'], 'client-100')
    """
    width = max(2, len(str(clients - 1)))
    return [f"client-{number:0{width}d}" for number in range(clients)]


def _take_server_rows(labels: Array, asked: ServerRowsConfig | None, seed: int) -> tuple[Array, Array]:
    """The server's rows, and those left for clients."""
    every = np.arange(len(labels))
    if asked is None:
        return every[:0], every
    if asked.reserve is not None and asked.reserve >= len(labels):
        raise ConfigError(
            f"server_rows.reserve is {asked.reserve} of {len(labels)} training rows, expected fewer; lower it"
        )
    rng = np.random.default_rng([seed, SERVER])
    first = len(labels) - asked.reserve if asked.reserve else 0
    candidates = every[first:]
    chosen = _choose_classes(labels[candidates], asked.classes, rng)
    candidates = candidates[np.isin(labels[candidates], chosen)]
    want = asked.row_count(len(labels))
    if not 1 <= want <= len(candidates):
        raise ConfigError(
            f"the server is to hold {want} rows, but its classes have {len(candidates)} to draw from, expected "
            "between 1 and that; change count or fraction, or name more classes"
        )
    server = np.sort(rng.permutation(candidates)[:want])
    return server, every[:first] if asked.reserve else np.setdiff1d(every, server)


def _choose_classes(labels: Array, classes: int | tuple[int, ...] | None, rng: np.random.Generator) -> Array:
    """The classes the server draws from."""
    present = np.unique(labels)
    if classes is None:
        return present
    if isinstance(classes, tuple):
        if unknown := sorted(set(classes) - set(present.tolist())):
            raise ConfigError(f"server_rows names class {unknown[0]}, of which there are no rows; remove it")
        return np.array(classes)
    if classes > len(present):
        raise ConfigError(f"server_rows asks for {classes} classes, but there are {len(present)}; ask for at most that")
    return rng.permutation(present)[:classes]


def _validation(labels: Array, rows: list[Array], scheme: Scheme, fraction: float, seed: int) -> list[Array]:
    """Per client, the rows it keeps out of training."""
    rng = np.random.default_rng([seed, VALIDATION])
    if not fraction:
        return [own[:0] for own in rows]
    if isinstance(scheme, Labels) and scheme.share == "copy":
        return _shared_validation(labels, rows, fraction, rng)
    kept = [min(max(1, round(fraction * len(own))), len(own) - 1) for own in rows]
    return [np.sort(rng.permutation(own)[:count]) for own, count in zip(rows, kept, strict=True)]


def _shared_validation(labels: Array, rows: list[Array], fraction: float, rng: np.random.Generator) -> list[Array]:
    """For clients that hold copies of whole classes: the same rows of a class for all who hold it."""
    kept = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        kept[members[: min(round(fraction * len(members)), len(members) - 1)]] = True
    return [own[kept[own]] for own in rows]


@dataclass(frozen=True, slots=True, eq=False)
class Deal:
    """The row positions of each client, and facts about how they were drawn (retries, rows moved)."""

    rows: list[Array]
    facts: dict[str, object] = field(default_factory=dict)


@singledispatch
def deal(scheme: object, labels: Array, clients: int, seed: int) -> Deal:  # noqa: ARG001 (registered ones use them)
    """Assign every row position to a client; the implementation is chosen by the scheme's type.

    Example:
        >>> [len(rows) for rows in deal(Iid(), np.zeros(7), 2, seed=0).rows]
        [4, 3]
    """
    raise ConfigError(f"partition: {scheme!r} is no scheme, expected one of fedfuse.data.Scheme; use Iid()")


@deal.register
def _(_scheme: Iid, labels: Array, clients: int, seed: int) -> Deal:
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


@deal.register
def _(scheme: Classes, labels: Array, clients: int, seed: int) -> Deal:
    total = _class_count(labels, scheme.per_client, "per_client")
    if scheme.compat:
        return Deal(published_classes(labels, clients, scheme.per_client, seed))
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


def _class_count(labels: Array, asked: int, field_name: str) -> int:
    """How many classes there are, which must be at least what a client is to own."""
    total = len(np.unique(labels))
    if asked > total:
        raise ConfigError(
            f"partition: {field_name} is {asked}, but there are {total} classes; lower it to at most {total}"
        )
    return total


def _split_among_owners(rng: np.random.Generator, labels: Array, owned: Array) -> list[Array]:
    """Each class cut equally among the clients that own it; classes without an owner are held out."""
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


@deal.register
def _(scheme: Dirichlet, labels: Array, clients: int, seed: int) -> Deal:
    if scheme.compat:
        rows, retries = published_dirichlet(labels, clients, scheme.alpha, scheme.min_rows, seed)
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


def _dirichlet_counts(rng: np.random.Generator, sizes: Array, clients: int, alpha: float, balance: bool) -> Array:
    """One attempt: rows per client and class."""
    counts = np.zeros((clients, len(sizes)), dtype=np.int64)
    row_counts, fair = np.zeros(clients, dtype=np.int64), sizes.sum() / clients
    for column, size in enumerate(sizes):
        # Some client always has room: were all at their fair number, no rows would be left.
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


def _draw_with_minimum(
    rng: np.random.Generator, draw: Callable[[], Array], min_rows: int, retries: int
) -> tuple[Array, dict[str, object]]:
    """Counts (clients × classes) that leave no client with fewer than `min_rows`.

    Draws until that holds. After `retries` failed attempts, rows are moved from the largest clients of the attempt
    that came nearest. Where there are not enough rows for all, the minimum is lowered.
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


# The loops of NIID-Bench as published, bit for bit: the legacy generators, the floor of cumulative shares and the
# order of draws are part of the result, so nothing here is shared with the schemes above.


def published_dirichlet(labels: Array, clients: int, alpha: float, min_rows: int, seed: int) -> tuple[list[Array], int]:
    """Rows per client, and how many attempts were thrown away.

    For each class in order: shuffle its rows, draw one Dirichlet, set the share of every client that holds
    at least N / clients rows to zero, normalize, cut at floor(cumulative share · class size). All of it again
    until the smallest client has `min_rows`; the generator runs on.

    Where the draw underflows, or every client with room drew zero, the shares are not numbers; the published
    code then gives the whole class to the last client, and so does this.
    """
    state = np.random.RandomState(seed)
    members = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    for attempt in range(_ATTEMPTS):
        client_rows: list[Array] = [np.empty(0, dtype=np.int64)] * clients
        for rows in members:
            shuffled = _shuffle_copy(state, rows)
            parts = np.split(shuffled, _cuts(state, len(rows), client_rows, alpha, len(labels)))
            client_rows = [np.concatenate(pair) for pair in zip(client_rows, parts, strict=True)]
        if min(map(len, client_rows)) >= min_rows:
            return [_shuffle_copy(state, rows) for rows in client_rows], attempt
    raise ConfigError(
        f"partition: the published loop found no split with {min_rows} rows for each of {clients} clients in "
        f"{_ATTEMPTS} attempts at alpha {alpha:g}; leave compat out, or raise alpha"
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


def published_classes(labels: Array, clients: int, per_client: int, seed: int) -> list[Array]:
    """Rows per client when client i owns class i mod K and others drawn by rejection with `randint`."""
    state, rng = np.random.RandomState(seed), random.Random(seed)
    present = np.unique(labels)
    owned = [{client % len(present)} for client in range(clients)]
    for own in owned:
        while len(own) < per_client:  # at most the number of classes, which the caller has checked
            own.add(rng.randint(0, len(present) - 1))
    client_rows: list[Array] = [np.empty(0, dtype=np.int64)] * clients
    for label, value in enumerate(present):
        rows = _shuffle_copy(state, np.flatnonzero(labels == value))
        owners = [client for client in range(clients) if label in owned[client]]
        for owner, part in zip(owners, np.array_split(rows, max(1, len(owners))), strict=False):
            client_rows[owner] = np.concatenate((client_rows[owner], part))
    return client_rows


def _shuffle_copy(state: np.random.RandomState, rows: Array) -> Array:
    rows = rows.copy()
    state.shuffle(rows)
    return rows

"""Which training row belongs to which client, to the server, or to nobody."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from fedfuse.core.messages import client_order
from fedfuse.data.dealing import Deal, deal
from fedfuse.data.rows import Array
from fedfuse.data.schemes import Labels, Natural, Scheme, ServerRowsConfig
from fedfuse.errors import ConfigError

# One stream per purpose: asking for server rows or validation rows must not change who gets what.
SERVER, VALIDATION = 1, 2


@dataclass(frozen=True, slots=True, eq=False)
class Partition:
    """Who holds which training rows.

    Attributes:
        clients: client id → positions it trains on; ids sort in the order of their numbers.
        server: positions the server holds.
        held_out: positions nobody holds.
        validation: client id → positions of its own that it keeps out of training.
        facts: how it came about: scheme, retries, rows moved, classes nobody holds, sizes.
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
    label_array = _labels_as_array(labels)
    if not 0 <= seed < 2**32:
        raise ConfigError(f"partition: the seed is {seed}, expected a whole number from 0 to 2**32 - 1")
    _check_fraction("server_fraction", server_fraction)
    _check_fraction("validation_fraction", validation_fraction)
    server, pool = _take_server_rows(label_array, _server_rows_config(server_fraction, server_rows), seed)
    if isinstance(scheme, Natural):
        return _natural(label_array, scheme, owners, server, pool, validation_fraction, seed)
    if not 1 <= clients <= len(pool):
        raise ConfigError(
            f"partition: {clients} clients are to share {len(pool)} rows, expected at least one client and no "
            "more clients than rows; change the number of clients"
        )
    dealt = deal(scheme, label_array[pool], clients, seed)
    ids = client_ids(clients)
    rows = [pool[positions] for positions in dealt.rows]
    _refuse_empty(ids, rows, scheme)
    return _with_validation(label_array, ids, rows, scheme, dealt, server, validation_fraction, seed)


def _natural(
    labels: Array, scheme: Natural, owners: Sequence[str], server: Array, pool: Array, fraction: float, seed: int
) -> Partition:
    """Every row with its owner."""
    if len(owners) != len(labels):
        raise ConfigError(
            "partition: kind 'natural' leaves rows where they came from and this source does not say where that is; "
            "use heart-disease, a table with the option `client`, or another kind"
        )
    ids = sorted({owners[row] for row in pool}, key=client_order)
    rows = [np.array([row for row in pool if owners[row] == name], dtype=np.int64) for name in ids]
    return _with_validation(labels, ids, rows, scheme, Deal(rows), server, fraction, seed)


def _with_validation(
    label_array: Array,
    ids: list[str],
    rows: list[Array],
    scheme: Scheme,
    dealt: Deal,
    server: Array,
    validation_fraction: float,
    seed: int,
) -> Partition:
    """The partition in which clients keep some of their rows out of training."""
    validation = _validation(label_array, rows, scheme, validation_fraction, seed)
    train = [own[~np.isin(own, kept)] for own, kept in zip(rows, validation, strict=True)]
    held_out = np.setdiff1d(np.arange(len(label_array)), np.concatenate((server, *rows)))
    return Partition(
        clients=_tensors_by_client(ids, train),
        server=torch.from_numpy(server),
        held_out=torch.from_numpy(held_out),
        validation=_tensors_by_client(ids, validation) if validation_fraction else {},
        facts=_facts(scheme, seed, dealt, label_array, train, server, held_out),
    )


def _tensors_by_client(ids: list[str], rows: list[Array]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(own) for name, own in zip(ids, rows, strict=True)}


def client_ids(clients: int) -> list[str]:
    """Names whose sorted order is the order of their numbers.

    Example:
        >>> client_ids(2), client_ids(101)[-1]
        (['client-00', 'client-01'], 'client-100')
    """
    width = max(2, len(str(clients - 1)))
    return [f"client-{number:0{width}d}" for number in range(clients)]


def _labels_as_array(labels: Tensor) -> Array:
    if labels.ndim != 1 or labels.dtype != torch.int64 or (len(labels) and int(labels.min()) < 0):
        raise ConfigError(
            f"partition: labels are {labels.dtype} of shape {tuple(labels.shape)}, expected one int64 from 0 on "
            "for each row; convert them"
        )
    return labels.cpu().numpy()


def _check_fraction(name: str, value: float) -> None:
    if not 0 <= value < 1:
        raise ConfigError(f"{name} is {value}, expected a number from 0 to below 1; it is a share of the rows")


def _server_rows_config(fraction: float, rows: ServerRowsConfig | None) -> ServerRowsConfig | None:
    if fraction and rows:
        raise ConfigError("server_fraction and server_rows are both given, expected one; drop the other")
    return ServerRowsConfig(fraction=fraction) if fraction else rows


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


def _refuse_empty(ids: list[str], rows: list[Array], scheme: Scheme) -> None:
    if empty := [name for name, own in zip(ids, rows, strict=True) if not len(own)]:
        raise ConfigError(
            f"partition: {', '.join(empty[:5])}{' and others' if len(empty) > 5 else ''} would hold no rows "
            f"under the scheme {scheme.kind!r}, expected at least one each; use fewer clients or more rows"
        )


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


def _facts(
    scheme: Scheme, seed: int, dealt: Deal, labels: Array, train: list[Array], server: Array, held_out: Array
) -> dict[str, object]:
    """What a report should say about a partition."""
    covered = np.unique(labels[np.concatenate(train)])
    sizes = [len(own) for own in train]
    return {
        "kind": scheme.kind,
        "scheme": scheme.model_dump(exclude_none=True),
        "seed": seed,
        **dealt.facts,
        "smallest_client": min(sizes),
        "largest_client": max(sizes),
        "server_rows": len(server),
        "held_out_rows": len(held_out),
        "classes_held": len(covered),
        "classes_missing": np.setdiff1d(np.unique(labels), covered).tolist(),
    }

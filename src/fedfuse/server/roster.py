"""Which clients answer, and with which rows: a server that trains as one more client, and one that lends its rows out.

Each is an `Engine` around another: methods and engines know nothing of it, and what it changes for the door and for the
record it says in `Terms`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch

from fedfuse.core.messages import Brief, Envelope
from fedfuse.core.rows import Rows
from fedfuse.core.seams import Engine, OwnRows, Terms, View, Work
from fedfuse.core.state import Bench
from fedfuse.core.torch_utils import one_thread
from fedfuse.errors import ConfigError
from fedfuse.training.round import client_round
from fedfuse.wire.messages import hand_over

SERVER = "server"


@dataclass(frozen=True, slots=True)
class WithServer:
    """The server answers too, in every round, with a model trained on its own rows, and weighs by their number."""

    needs: ClassVar[frozenset[str]] = frozenset({"server_rows"})
    reveals: ClassVar[str] = ""

    def __call__(self, engine: Engine, bench: Bench) -> Engine:
        """The engine with one more client, which is asked in addition to those chosen."""
        if SERVER in engine.clients:
            raise ConfigError(f"a client is called {SERVER!r}, the name the server trains under; rename the client")
        return _EngineWithServer(engine, bench.need_rows("a server that trains as a client"), bench.seed)


@dataclass(frozen=True, slots=True)
class _EngineWithServer:
    """An engine whose server is one of its clients."""

    engine: Engine
    rows: Rows
    seed: int

    @property
    def clients(self) -> tuple[str, ...]:
        """Those that can be chosen: the server is not one of them, it always answers."""
        return self.engine.clients

    @property
    def terms(self) -> Terms:
        """The server is asked in every round."""
        inner = self.engine.terms
        return replace(inner, always=(*inner.always, SERVER))

    def exchange(self, brief: Brief, work: Work, asked: tuple[str, ...]) -> Iterator[Envelope]:
        """The clients' answers; the server trains while others still do."""
        others = tuple(client for client in asked if client != SERVER)
        answers = iter(self.engine.exchange(brief, work, others))
        first = next(answers, None)  # an engine may send its briefs only when it is asked: now its clients are at work
        if first is not None:
            yield first
        if SERVER in asked:
            own_brief = brief.to(SERVER)
            with one_thread():  # as in a client's own process: another number of threads would sum in another order
                reply = client_round(work, hand_over(own_brief), SERVER, self.rows, seed=self.seed).reply
            yield Envelope(SERVER, reply)
        yield from answers


@dataclass(frozen=True, slots=True)
class WithShared:
    """A client's own rows and some that all were given.

    Attributes:
        shared: the rows that all have.
        base: what the client would see without them.

    Example:
        >>> given = Rows(torch.ones(2, 1), torch.tensor([1, 1]))
        >>> own = Rows(torch.zeros(1, 1), torch.tensor([0]))
        >>> WithShared(given)(own, Brief(0, None, {})).y.tolist()
        [0, 1, 1]
    """

    shared: Rows
    base: View = field(default_factory=OwnRows)

    def __call__(self, rows: Rows, brief: Brief) -> Rows:
        """Own rows first, then the shared ones."""
        own = self.base(rows, brief)
        return Rows(torch.cat([own.x, self.shared.x.to(own.x)]), torch.cat([own.y, self.shared.y.to(own.y)]))


@dataclass(frozen=True, slots=True)
class ShareServerRows:
    """Every client is given the same rows of the server's, once, and trains on them in addition to its own.

    Attributes:
        most: how many at most; None lends all. Fewer are drawn at random, once for the whole run.
    """

    most: int | None = None
    needs: ClassVar[frozenset[str]] = frozenset({"server_rows"})

    @property
    def reveals(self) -> str:
        """What leaves the server."""
        some = "the server's labelled rows" if self.most is None else f"up to {self.most} of the server's labelled rows"
        return f"{some}, to every client"

    def __call__(self, engine: Engine, bench: Bench) -> Engine:
        """The engine whose clients see the lent rows."""
        rows = bench.need_rows("data sharing")
        if self.most is not None and self.most < len(rows):
            rows = rows.take(torch.randperm(len(rows), generator=bench.stream("lend"))[: self.most].sort().values)
        return _EngineWithSharedRows(engine, rows)


@dataclass(frozen=True, slots=True)
class _EngineWithSharedRows:
    """An engine whose clients hold some of the server's rows."""

    engine: Engine
    rows: Rows

    @property
    def clients(self) -> tuple[str, ...]:
        """As before."""
        return self.engine.clients

    @property
    def terms(self) -> Terms:
        """Lent rows count in every client's num_examples, and are sent before the first round."""
        inner, size = self.engine.terms, self.rows.x.nbytes + self.rows.y.nbytes
        words = f"{len(self.rows):,} labelled rows of the server, given to each of {len(self.clients):,} clients"
        return replace(
            inner,
            shared_rows=inner.shared_rows + len(self.rows),
            shared_bytes=inner.shared_bytes + size * len(self.clients),
            reveals=(*inner.reveals, words),
        )

    def exchange(self, brief: Brief, work: Work, asked: tuple[str, ...]) -> Iterator[Envelope]:
        """The answers of clients that train on their own rows and the lent ones."""
        yield from self.engine.exchange(brief, replace(work, view=WithShared(self.rows, work.view)), asked)

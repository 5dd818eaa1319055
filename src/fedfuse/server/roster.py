"""Who answers, and with whose rows: a server that trains as one more client, and one that lends its rows out."""

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
from fedfuse.wire.codec import Packet
from fedfuse.wire.messages import hand_over


@dataclass(frozen=True, slots=True)
class WithShared:
    """A client's own rows and some that everybody was given.

    Attributes:
        shared: the rows everybody has.
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


SERVER = "server"


@dataclass(frozen=True, slots=True)
class WithServer:
    """The server answers too, in every round, with a model it trained on its own rows; it weighs as they number."""

    needs: ClassVar[frozenset[str]] = frozenset({"server_rows"})
    reveals: ClassVar[str] = ""

    def __call__(self, engine: Engine, bench: Bench) -> Engine:
        """The engine with one more client, which is asked beside those chosen."""
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
        """Those who can be chosen: the server is not one of them, it always answers."""
        return self.engine.clients

    @property
    def terms(self) -> Terms:
        """The server is asked in every round."""
        before = self.engine.terms
        return replace(before, always=(*before.always, SERVER))

    def exchange(self, brief: Brief, work: Work, asked: tuple[str, ...]) -> Iterator[Envelope]:
        """The clients' answers; the server trains while others still do."""
        others = tuple(client for client in asked if client != SERVER)
        answers = iter(self.engine.exchange(brief, work, others))
        first = next(answers, None)
        if first is not None:
            yield first
        if SERVER in asked:
            yield Envelope(SERVER, self._server_reply(brief, work))
        yield from answers

    def _server_reply(self, brief: Brief, work: Work) -> Packet:
        """The server's reply, made by the same work as any client's."""
        own_brief = brief.to(SERVER)
        with one_thread():
            return client_round(work, hand_over(own_brief), SERVER, self.rows, seed=self.seed).reply


@dataclass(frozen=True, slots=True)
class ShareServerRows:
    """Every client is given the same rows of the server's, once, and trains on them beside its own.

    Attributes:
        most: at most so many; None lends all. Fewer are drawn at random, once for the whole run.
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
        """Lent rows count in everybody's num_examples, and are sent before the first round."""
        before, weight = self.engine.terms, self.rows.x.nbytes + self.rows.y.nbytes
        words = f"{len(self.rows):,} labelled rows of the server, given to each of {len(self.clients):,} clients"
        shared_rows, shared_bytes = (
            before.shared_rows + len(self.rows),
            before.shared_bytes + weight * len(self.clients),
        )
        return replace(before, shared_rows=shared_rows, shared_bytes=shared_bytes, reveals=(*before.reveals, words))

    def exchange(self, brief: Brief, work: Work, asked: tuple[str, ...]) -> Iterator[Envelope]:
        """The answers of clients that train on their own rows and the lent ones."""
        yield from self.engine.exchange(brief, replace(work, view=WithShared(self.rows, work.view)), asked)

"""What every engine shares: whose rows are whose, what clients remember, and the plainest engine of all."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedfuse.client.work import client_round
from fedfuse.core.messages import Brief, Envelope, client_order
from fedfuse.core.params import Params
from fedfuse.core.recipe import Work
from fedfuse.core.rows import Rows
from fedfuse.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Population:
    """All rows, and which of them each client holds.

    Example:
        >>> import torch
        >>> people = Population(Rows(torch.zeros(4, 1), torch.arange(4)), {"a": torch.tensor([3, 1])})
        >>> people.rows_of("a").y.tolist(), people.clients
        ([3, 1], ('a',))
    """

    rows: Rows
    index: Mapping[str, Tensor]

    @classmethod
    def of(cls, data: Mapping[str, Rows]) -> Population:
        """A population from each client's own rows."""
        if not data:
            raise ConfigError("a federation needs at least one client, got none")
        sizes = [len(rows) for rows in data.values()]
        places = torch.arange(sum(sizes)).split(sizes)
        whole = Rows(torch.cat([r.x for r in data.values()]), torch.cat([r.y for r in data.values()]))
        return cls(whole, dict(zip(data, places, strict=True)))

    @property
    def clients(self) -> tuple[str, ...]:
        """Client ids in client order."""
        return tuple(sorted(self.index, key=client_order))

    def rows_of(self, client: str) -> Rows:
        """One client's rows."""
        return self.rows.take(self.index[client])

    def sizes(self) -> dict[str, int]:
        """How many rows each client has: what it enrols with."""
        return {client: len(index) for client, index in self.index.items()}


@dataclass(slots=True)
class InProcess:
    """Clients one after another in this process: slow, simple, easy to step through with a debugger."""

    population: Population
    seed: int = 0
    memories: dict[str, Params] = field(default_factory=dict)

    @property
    def clients(self) -> tuple[str, ...]:
        """Client ids in client order."""
        return self.population.clients

    def exchange(self, brief: Brief, work: Work, asked: tuple[str, ...]) -> Iterator[Envelope]:
        """Train the asked clients one by one; a client that fails is dropped with its reason."""
        for client in asked:
            began = time.perf_counter()
            rows, memory = self.population.rows_of(client), self.memories.get(client, {})
            try:
                answer = client_round(work, brief.to(client), client, rows, memory=memory, seed=self.seed)
            except (RuntimeError, ArithmeticError, ValueError) as why:
                yield Envelope(client, None, dropped=f"{type(why).__name__}: {why}")
                continue
            self.memories[client] = answer.memory
            yield Envelope(client, answer.payload, seconds=time.perf_counter() - began)

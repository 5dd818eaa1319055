"""What every engine shares: whose rows are whose, how one client answers, and the plainest engine of all."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import ClassVar, Generic, NamedTuple, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor

from fedfuse.core.messages import Brief, Envelope, client_order
from fedfuse.core.params import Params
from fedfuse.core.rows import Rows
from fedfuse.core.seams import Terms, Work
from fedfuse.core.torch_utils import one_thread
from fedfuse.errors import ConfigError, RecipeError
from fedfuse.training.round import client_round
from fedfuse.wire.codec import Packet, encode
from fedfuse.wire.messages import hand_over

T = TypeVar("T")
OnClient: TypeAlias = Callable[[str, float, bool], None]  # client, seconds, whether nothing was trained
FindTraining: TypeAlias = Callable[[str], bytes | None]  # a client's reply without evidence, if its training is known

_BLOCK = 1024  # rows that are copied and hashed at a time

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Population:
    """All rows, and which of them each client holds.

    Example:
        >>> import torch
        >>> population = Population(Rows(torch.zeros(4, 1), torch.arange(4)), {"a": torch.tensor([3, 1])})
        >>> population.rows_of("a").y.tolist(), population.clients
        ([3, 1], ('a',))
    """

    rows: Rows
    index: Mapping[str, Tensor]
    _fingerprints: dict[str, bytes] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def of(cls, data: Mapping[str, Rows]) -> Population:
        """A population from each client's own rows."""
        if not data:
            raise ConfigError("a federation needs at least one client, got none")
        sizes = [len(rows) for rows in data.values()]
        indices = torch.arange(sum(sizes)).split(sizes)
        whole = Rows(torch.cat([r.x for r in data.values()]), torch.cat([r.y for r in data.values()]))
        return cls(whole, dict(zip(data, indices, strict=True)))

    @property
    def clients(self) -> tuple[str, ...]:
        """Client ids in client order."""
        return tuple(sorted(self.index, key=client_order))

    def rows_of(self, client: str) -> Rows:
        """One client's rows."""
        with one_thread():  # two threads that wait for each other are slower on a busy machine
            return self.rows.take(self.index[client])

    def sizes(self) -> dict[str, int]:
        """How many rows each client has: what it enrols with."""
        return {client: len(index) for client, index in self.index.items()}

    def fingerprint(self, client: str) -> bytes:
        """A digest of one client's rows, made at its first use."""
        if client not in self._fingerprints:
            digest = hashlib.sha256()
            for part in torch.as_tensor(self.index[client]).split(_BLOCK):
                with one_thread():
                    rows = self.rows.take(part)
                digest.update(encode({"x": rows.x, "y": rows.y}, {}))
            self._fingerprints[client] = digest.digest()
        return self._fingerprints[client]


class LocalEngine(Protocol):
    """An engine whose clients' rows are on this machine: in this process, or in workers beside it."""

    population: Population
    seed: int
    memories: dict[str, Params]
    on_client: OnClient | None

    @property
    def terms(self) -> Terms:
        """What a roster has arranged: nothing yet."""
        ...

    @property
    def clients(self) -> tuple[str, ...]:
        """Client ids in client order."""
        ...

    def exchange(
        self, brief: Brief, work: Work, asked: tuple[str, ...], trained: FindTraining | None = None
    ) -> Iterator[Envelope]:
        """Bring the asked clients' answers in any order; where `trained` knows a training, only evidence is new."""
        ...


@dataclass(slots=True)
class OncePerBrief(Generic[T]):
    """What an engine makes of a brief, made once for all the clients that get the same one."""

    brief: Brief
    make: Callable[[Brief], T]
    _common: list[T] = field(default_factory=list)

    def for_client(self, client: str) -> T:
        """What was made of the brief as this client gets it."""
        if client in self.brief.own:
            return self.make(self.brief.to(client))
        if not self._common:
            self._common.append(self.make(self.brief.to(client)))
        return self._common[0]


class ClientResult(NamedTuple):
    """How one client's round ended: its reply and what the client remembers, or why there is none."""

    payload: Packet | bytes | None  # bytes where it was in another process
    memory: Params = MappingProxyType({})
    seconds: float = 0.0
    remembered: bool = False
    dropped: str = ""


def answer(
    work: Work, brief: Brief, client: str, rows: Rows, memory: Params, *, seed: int, trained: bytes | None = None
) -> ClientResult:
    """One client's round as every local engine runs it, so that none can differ from another in a single bit.

    All tensors lie as in a message (their strides decide the order of sums), and one thread does it.

    Raises:
        ConfigError: when the user asked for what cannot be; any other failure is the client's own and drops it.
        RecipeError: likewise.
    """
    started = time.perf_counter()
    rows = Rows(rows.x.contiguous(), rows.y)
    try:
        with one_thread():
            reply, after = client_round(work, brief, client, rows, memory=memory, seed=seed, trained=trained)
    except (ConfigError, RecipeError):
        raise
    except Exception as why:
        _log.debug("%s failed", client, exc_info=True)
        return ClientResult(None, seconds=time.perf_counter() - started, dropped=f"{type(why).__name__}: {why}")
    return ClientResult(reply, after, time.perf_counter() - started, trained is not None)


def close_round(engine: LocalEngine, client: str, done: ClientResult) -> Envelope:
    """Keep what the client remembers, tell who watches, and put its answer in an envelope."""
    if done.payload is not None:
        engine.memories[client] = done.memory
    if engine.on_client is not None:
        engine.on_client(client, done.seconds, done.remembered)
    return Envelope(client, done.payload, done.dropped, done.seconds, done.remembered)


@dataclass(slots=True)
class InProcess:
    """Clients one after another in this process: slow, simple, easy to step through with a debugger."""

    population: Population
    seed: int = 0
    memories: dict[str, Params] = field(default_factory=dict)
    on_client: OnClient | None = None
    terms: ClassVar[Terms] = Terms()

    @property
    def clients(self) -> tuple[str, ...]:
        """Client ids in client order."""
        return self.population.clients

    def exchange(
        self, brief: Brief, work: Work, asked: tuple[str, ...], trained: FindTraining | None = None
    ) -> Iterator[Envelope]:
        """Train the asked clients one by one; a client that fails is dropped with its reason."""
        per_brief = OncePerBrief(brief, hand_over)
        for client in asked:
            rows, memory = self.population.rows_of(client), self.memories.get(client, {})
            known = trained(client) if trained else None
            done = answer(work, per_brief.for_client(client), client, rows, memory, seed=self.seed, trained=known)
            yield close_round(self, client, done)

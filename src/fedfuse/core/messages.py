"""What is said in a round: the server's Brief, a client's reply, and the Cohort of those admitted."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fedfuse.core.params import Params
from fedfuse.core.posterior import Posterior
from fedfuse.core.settings import LocalSettings
from fedfuse.core.spec import Spec
from fedfuse.tasks import CLASSIFICATION, Task


class Form(NamedTuple):
    """The shape and dtype a tensor must have."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> Form:
        """The form of a tensor."""
        return cls(tuple(tensor.shape), tensor.dtype)

    def blank(self) -> Tensor:
        """A tensor of this form without numbers: however large, it takes no memory."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


class Flaw(NamedTuple):
    """What is wrong with a piece of evidence, in the door's words."""

    field: str
    got: object
    expected: str


class Start(NamedTuple):
    """Where a client begins: a network and its weights."""

    spec: Spec
    params: Params


@dataclass(frozen=True, slots=True)
class Brief:
    """All that a client gets from the server in one exchange.

    Attributes:
        round: counted from 0.
        spec: the network to train.
        params: its weights and buffers.
        memory: server memory the recipe publishes (control variates, masks, …), by name.
        own: clients that begin elsewhere: another start, another architecture.
        classes: how many classes there are, or labels, or numbers to be predicted.
        task: what is to be learned.
    """

    round: int
    spec: Spec
    params: Params
    memory: Params = field(default_factory=dict)
    own: Mapping[str, Start] = field(default_factory=dict)
    classes: int = 0
    task: Task = CLASSIFICATION

    def to(self, client: str) -> Brief:
        """The brief as this client gets it."""
        if client not in self.own:
            return replace(self, own={}) if self.own else self
        spec, params = self.own[client]
        return replace(self, spec=spec, params=params, own={})


class Message(Protocol):
    """A message that is a value: what its bytes would say, and how many they would be."""

    @property
    def header(self) -> Mapping[str, Any]:
        """What it says beside its tensors."""

    @property
    def tensors(self) -> Params:
        """Its tensors by name."""

    @property
    def size(self) -> int:
        """How many bytes it takes on its way."""


@dataclass(frozen=True, slots=True)
class Envelope:
    """What the transport brings back from one client, or why there is nothing.

    What comes from elsewhere is untrusted bytes or a file of them; within one process a message stays a value.

    `client` is the transport's word for who sent it, never the sender's own.

    Attributes:
        client: who sent it.
        payload: what came.
        dropped: why nothing came.
        seconds: how long the client was at it.
        remembered: nothing was trained for it.
        late: the closed round that it answers, where it came too late.
        on_refused: told when the door refuses it, for a transport that waits for good answers.
    """

    client: str
    payload: Message | bytes | Path | None
    dropped: str = ""
    seconds: float = 0.0
    remembered: bool = False
    late: int | None = None
    on_refused: Callable[[], object] = field(default=bool, repr=False, compare=False)  # bool() does nothing


@dataclass(frozen=True, slots=True)
class ClientUpdate:
    """An admitted reply; only the door makes these.

    Attributes:
        client: who sent it.
        posterior: the trained weights and their geometry; tensors may live on disk until asked for.
        num_examples: how many examples stand behind it.
        steps: local optimizer steps.
        notes: further evidence, by name.
        spec: the network the weights belong to.
        facts: small numbers it says of itself (loss, …), for the ledger alone.
        training: how it was trained, if it says so.
        sites: how many sites it is the sum of, by its own word.
    """

    client: str
    posterior: Posterior
    num_examples: float
    steps: int
    spec: Spec
    notes: Params = field(default_factory=dict)
    facts: Mapping[str, float] = field(default_factory=dict)
    training: LocalSettings | None = None
    sites: int = 1

    @property
    def examples_per_site(self) -> float:
        """Examples behind each of the sites it is the sum of: what is compared with those of other clients."""
        return self.num_examples / self.sites

    def record(self) -> dict[str, Any]:
        """What the ledger says of it: numbers that were checked, and apart from them what the client says itself."""
        return {"num_examples": self.num_examples, "steps": self.steps, "facts": dict(self.facts)}


@dataclass(frozen=True, slots=True)
class Cohort:
    """The admitted updates of one round in client order, to be read one update or one tensor at a time.

    Example:
        >>> spec = Spec("mlp")
        >>> one = ClientUpdate("a", Posterior({"w": torch.ones(2)}), 1.0, 1, spec)
        >>> cohort = Cohort.of([replace(one, client="b", num_examples=3.0), one])
        >>> cohort.clients, cohort.weights.tolist(), tuple(cohort.stack("w").shape)
        (('a', 'b'), [0.25, 0.75], (2, 2))
    """

    updates: tuple[ClientUpdate, ...]

    @classmethod
    def of(cls, updates: list[ClientUpdate] | tuple[ClientUpdate, ...]) -> Cohort:
        """Put the updates in client order, in whatever order they came."""
        return cls(tuple(sorted(updates, key=lambda u: client_order(u.client))))

    def __iter__(self) -> Iterator[ClientUpdate]:
        return iter(self.updates)

    def __len__(self) -> int:
        return len(self.updates)

    @property
    def clients(self) -> tuple[str, ...]:
        """Client ids in order."""
        return tuple(u.client for u in self.updates)

    @property
    def num_examples(self) -> Tensor:
        """Examples behind each update, float64."""
        return torch.tensor([u.num_examples for u in self.updates], dtype=torch.float64)

    @property
    def sites(self) -> int:
        """How many sites are behind all updates: more than updates where some are sums."""
        return sum(u.sites for u in self.updates)

    @property
    def weights(self) -> Tensor:
        """Each client's share of the examples: f_k = n_k / Σ n."""
        return self.num_examples / self.num_examples.sum()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the tensors every update has."""
        return tuple(self.updates[0].posterior.mean)

    def tensors(self, name: str) -> Iterator[Tensor]:
        """One tensor across clients, one client at a time."""
        return (u.posterior.mean[name] for u in self.updates)

    def stack(self, name: str) -> Tensor:
        """One tensor across clients, stacked in client order."""
        return torch.stack(list(self.tensors(name)))


def client_order(client: str) -> tuple[list[tuple[int, str]], str]:
    """Sort key that puts site-2 before site-10, and tells site-2 from site-02.

    Example:
        >>> sorted(["site-10", "site-2"], key=client_order)
        ['site-2', 'site-10']
    """
    parts = re.findall(r"\d+|\D+", client)  # of long digits `int` makes an error, from 4,301 on: they compare as text
    return [(int(p), "") if p.isdecimal() and len(p) < 19 else (-1, p) for p in parts], client

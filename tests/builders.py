"""What tests are made of: rows, weights, updates and cohorts, drawn from a seed and built without a client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedfuse.core.messages import Brief, ClientUpdate, Cohort, Envelope
from fedfuse.core.model import Single
from fedfuse.core.params import Params
from fedfuse.core.posterior import Flat, Geometry, Posterior
from fedfuse.core.rows import Rows
from fedfuse.core.seams import Aggregator, Engine, Work
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench, ServerState
from fedfuse.data.partitions import partition
from fedfuse.data.schemes import Classes, Dirichlet, Scheme, Shares
from fedfuse.data.sources import load
from fedfuse.nets.channels import channel_groups
from fedfuse.server.align.nets import Net
from fedfuse.wire.codec import Packet

if TYPE_CHECKING:
    from tests.conftest import Said


def rows(
    count: int, *shape: int, classes: int = 3, seed: int = 0, shift: float = 0.0, dtype: torch.dtype = torch.float32
) -> Rows:
    """Normal inputs of a shape and random labels; with a shift, every input lies that far along its label."""
    draw = torch.Generator().manual_seed(seed)
    x, y = torch.randn(count, *shape, generator=draw, dtype=dtype), torch.randint(classes, (count,), generator=draw)
    return Rows(x + shift * y.reshape(-1, *(1 for _ in shape)), y)


def drawn(spec: Spec, seed: int = 0, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Normal numbers of the shapes of a network's tensors; counters count as they would in a fresh one."""
    draw = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(t.shape, generator=draw, dtype=dtype or t.dtype) if t.is_floating_point() else t.clone()
        for name, t in spec.skeleton().state_dict().items()
    }


def initial(spec: Spec, seed: int = 0) -> dict[str, Tensor]:
    """A network's own initial weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return {name: t.detach().clone() for name, t in spec.build().state_dict().items()}


def constant(spec: Spec, value: float) -> dict[str, Tensor]:
    """The same number everywhere in a network."""
    return {name: torch.full_like(t, value) for name, t in initial(spec).items()}


def update_of(
    client: str, params: Params, spec: Spec, examples: float = 1.0, geometry: Geometry | None = None, **fields: Any
) -> ClientUpdate:
    """An admitted update, as if it had passed the door."""
    return ClientUpdate(client, Posterior(params, geometry or Flat()), examples, fields.pop("steps", 1), spec, **fields)


def cohort_of(
    clients: Mapping[str, Params] | Sequence[Params],
    spec: Spec,
    examples: Mapping[str, float] | Sequence[float] | None = None,
    geometries: Sequence[Geometry] | None = None,
) -> Cohort:
    """A cohort of clients by name, or c0, c1, … of one example each unless told otherwise."""
    named = clients if isinstance(clients, Mapping) else {f"c{k}": params for k, params in enumerate(clients)}
    weights = examples.values() if isinstance(examples, Mapping) else examples or [1.0] * len(named)
    places = geometries or [Flat()] * len(named)
    parts = zip(named.items(), weights, places, strict=True)
    return Cohort.of([update_of(name, params, spec, float(n), place) for (name, params), n, place in parts])


def start_of(spec: Spec, params: Params | None = None, round_: int = 0, seed: int = 0, **fields: Any) -> ServerState:
    """The server's state before a round."""
    return ServerState(round_, Single(spec, Posterior(initial(spec, seed) if params is None else params)), **fields)


def fused(aggregate: Aggregator, cohort: Cohort, state: ServerState, bench: Bench | None = None) -> dict[str, Tensor]:
    """The weights that an aggregator makes of a cohort."""
    return dict(aggregate(cohort, state, bench or Bench()).single.posterior.mean)


def as_bytes(payload: object) -> object:
    """What an engine brought as it travels, whether it was a value or bytes; None stays None."""
    return payload.to_bytes() if isinstance(payload, Packet) else payload


# Honest clients that are as unlike each other as clients get: how rows are dealt, and to how many.
UNLIKE: dict[str, tuple[Scheme, int]] = {
    "Dirichlet 0.01": (Dirichlet(alpha=0.01), 10),
    "one class each": (Classes(per_client=1), 10),
    "shares": (Shares(shares=(0.6, 0.15, 0.15)), 3),
}


def digits(scheme: Scheme, clients: int, limit: int | None = None) -> dict[str, Rows]:
    """The digits of scikit-learn, flat, dealt to clients; of each its first rows, where there is a limit."""
    data = load("digits").train
    parts = partition(data.y, scheme, clients, 0).clients
    return {client: Rows(data.x[i[:limit]].flatten(1), data.y[i[:limit]]) for client, i in parts.items()}


def ask(engine: Engine, brief: Brief, work: Work) -> dict[str, Envelope]:
    """What all clients of an engine answer, by client."""
    return {envelope.client: envelope for envelope in engine.exchange(brief, work, engine.clients)}


def payloads(engine: Engine, brief: Brief, work: Work) -> dict[str, object]:
    """The same, as the bytes that they send."""
    return {client: as_bytes(envelope.payload) for client, envelope in ask(engine, brief, work).items()}


def net_of(spec: Spec, shape: tuple[int, ...], seed: int = 0) -> Net:
    """A network to be aligned, its weights drawn, for inputs of this shape."""
    return Net(f"c{seed}", spec, channel_groups(spec, shape), drawn(spec, seed))


def ok(said: Said) -> Said:
    """What a command answered, which did not fail."""
    assert said.code == 0, said.err
    return said


def refused(said: Said, *parts: str) -> None:
    """The command was refused for bad input: code 2 and one sentence, with nothing before it but warnings."""
    assert said.code == 2, said
    *before, last = said.err.splitlines()
    assert last.startswith("error: ")
    assert all(line.startswith("warning: ") for line in before), said.err
    for part in parts:
        assert part in last, last

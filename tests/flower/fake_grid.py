"""A Flower grid without Flower's processes: real messages, serialised both ways, in nodes of this process."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from fedfuse.core.messages import Brief
from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import Method
from fedfuse.core.rows import Rows
from fedfuse.core.seams import Work
from fedfuse.core.settings import LocalSettings
from fedfuse.data import load
from fedfuse.engines.local import Population
from fedfuse.flower.records import Order
from fedfuse.flower.site import Enrolment

App = Callable[[Message, Context], Message]


def through_bytes(message: Message) -> Message:
    """What arrives at the other end of a wire."""
    return message_from_proto(type(message_to_proto(message)).FromString(message_to_proto(message).SerializeToString()))


@dataclass
class Node:
    """A node: its app, its state, and how it behaves."""

    app: App
    context: Context
    name: str = ""
    online: bool = True
    silent: bool = False


@dataclass
class FakeGrid(Grid):
    """Runs each node's app when its reply is asked for, and answers in an order of its own."""

    nodes: dict[int, Node] = field(default_factory=dict)
    replies: dict[str, Message] = field(default_factory=dict)
    pulls: list[int] = field(default_factory=list)
    refuses: set[int] = field(default_factory=set)
    _shy: dict[str, int] = field(default_factory=dict)
    _draw: random.Random = field(default_factory=lambda: random.Random(0))

    def __post_init__(self) -> None:
        TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = 1, 1, 1  # as Flower's own server process does

    def add(self, app: App, name: str = "", **config: str | int) -> int:
        node = 1000 + 7 * len(self.nodes)
        self.nodes[node] = Node(app, Context(1, node, dict(config), RecordDict(), {}), name)
        return node

    def set_run(self, run: Run) -> None: ...

    @property
    def run(self) -> Run:
        raise AssertionError

    def create_message(self, *_: object, **__: object) -> Message:
        raise AssertionError("deprecated by Flower")

    def get_nodes(self) -> Iterable[NodeInfo]:
        return [NodeInfo(node_id=i, name=n.name) for i, n in self.nodes.items() if n.online]

    def get_node_ids(self) -> Iterable[int]:
        return [info.node_id for info in self.get_nodes()]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        taken = []
        for message in messages:
            message.metadata.__dict__["_message_id"] = key = f"message-{self._draw.getrandbits(64)}"
            if message.metadata.dst_node_id in self.refuses:
                continue
            taken.append(key)
            self.replies[key] = through_bytes(message)
            self._shy[key] = self._draw.randrange(3)  # so often it is asked for in vain
        return taken

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        (key,) = message_ids
        message = self.replies[key]
        node = self.nodes[message.metadata.dst_node_id]
        if node.silent or self._shy[key] > 0:
            self._shy[key] -= 1
            return []
        del self.replies[key]
        self.pulls.append(message.metadata.dst_node_id)
        if not node.online:
            return [Message(Error(code=5, reason="node unavailable"), reply_to=message)]
        return [through_bytes(node.app(message, node.context))]

    def send_and_receive(self, *_: object, **__: object) -> Iterable[Message]:
        raise AssertionError("it gathers all replies before the first is used")


@dataclass
class Gathering(FakeGrid):
    """A grid as Flower's own loop uses it: everything is sent, then everything comes back, the last first."""

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        sent = [through_bytes(message) for message in messages]
        nodes = [self.nodes[message.metadata.dst_node_id] for message in sent]
        replies = [node.app(m, node.context) for m, node in zip(sent, nodes, strict=True) if not node.silent]
        return [through_bytes(reply) for reply in reversed(replies)]


@dataclass(frozen=True)
class TestSite:
    """A site whose rows are a part of a population, by the number in its node config."""

    __test__ = False

    population: Population
    recipe: Recipe
    local: LocalSettings
    trusted_factories: frozenset[str] = frozenset()

    def enrol(self, context: Context) -> Enrolment:
        place = int(context.node_config["partition-id"])
        return Enrolment("", len(self.population.rows_of(self.population.clients[place])), place)

    def rows(self, context: Context, brief: Brief, order: Order) -> Rows:
        return self.population.rows_of(order.client)

    def work(self, order: Order, round_: int) -> Work:
        return self.recipe.at(round_).work(self.local)


def grid_of(app: ClientApp, clients: int) -> FakeGrid:
    """A grid of as many nodes as there are clients, the last first."""
    grid = FakeGrid()
    for place in reversed(range(clients)):
        grid.add(app, **{"partition-id": place, "num-partitions": clients})
    return grid


def spoilt(grid: FakeGrid, node: int, spoil: Callable[[RecordDict], None]) -> None:
    """Let a node's answers to training be changed before they leave it."""
    app = grid.nodes[node].app

    def changed(message: Message, context: Context) -> Message:
        reply = app(message, context)
        if message.metadata.message_type == "train":
            spoil(reply.content)
        return reply

    grid.nodes[node].app = changed


def site_files(folder: Path, sizes: dict[str, int]) -> dict[str, Path]:
    """Neighbouring parts of the digits, a file for each site."""
    x, y = (t.numpy() for t in (load("digits").train.x, load("digits").train.y))
    begin, files = 0, {name: folder / f"{name}.npz" for name in sizes}
    for name, size in sizes.items():
        own = slice(begin, begin := begin + size)
        np.savez(files[name], x_train=x[own], y_train=y[own], x_test=x[own][:1], y_test=y[own][:1])
    return files


def small_options(method: Method) -> dict[str, int]:
    """Options that bring a method down to a size a test can bear, where it distils or draws much."""
    known = {option.name: option.default for option in method.options}
    small = {"epochs": 1, "steps": 1, "batch": 8, "latent": 4, "width": 4, "at": 1, "every": 1, "times": 1}
    return {key: value for key, value in small.items() if isinstance(known.get(key), int) and known[key] > value}

"""Clients on a Flower federation: who is there, one exchange over Flower's grid, and nothing of Flower's loop.

A node's name is the one its operator registered it with; only a federation without registered names asks the nodes
themselves. Replies are pulled one message at a time, so who answered is known from what was asked and never from what
an answer says of itself, and the server holds one reply at a time: large ones wait in files for their turn.

`FlowerEngine` at the end is the engine that a round speaks to; before it stand the nodes (`Federation`), when a round
is over (`OpenRound`) and where replies wait (`Inbox`).
"""

from __future__ import annotations

import gc
import logging
import math
import shutil
import tempfile
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

from fedfuse.core.messages import Brief, Envelope, client_order
from fedfuse.core.params import Params
from fedfuse.core.recipe import Recipe
from fedfuse.core.seams import Terms, Work
from fedfuse.core.settings import LocalSettings
from fedfuse.engines.local import OncePerBrief, OnClient
from fedfuse.errors import ConfigError, QuorumLost, Refused
from fedfuse.flower.records import (
    BRIEF,
    FAILED,
    BriefRecords,
    Order,
    fingerprint,
    read_reply,
    seconds_in,
)
from fedfuse.wire.codec import Malformed, encode, forms_of, forms_size, write
from fedfuse.wire.messages import VERSION

from flwr.app import ConfigRecord, Message, MessageType, RecordDict  # isort: skip - after records has checked
from flwr.common.constant import ErrorCode  # isort: skip
from flwr.serverapp import Grid  # isort: skip

_log = logging.getLogger("flwr")  # Flower's own: what a federation's operator reads
ENROL = "query.enrol"
SITE = "site"
INBOX_BYTES = 64 * 2**20  # bytes of one round's replies kept in memory; the rest waits in files
_NODE_GONE = (ErrorCode.NODE_UNAVAILABLE, ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE)
_LARGE_BRIEF = 16 * 2**20  # bytes of a brief from which on a garbage collection pays
_PAUSE, _LONGEST_PAUSE, _PAUSE_GROWTH = 0.02, 1.0, 1.3  # seconds between two looks for answers: 0.02, 0.026, … 1


Key = TypeVar("Key", int, str)


class Member(NamedTuple):
    """A node that takes part: its id, how many rows it enrolled with, and its partition in a simulation."""

    node: int
    rows: int = 0
    partition: int = -1


@dataclass(slots=True)
class OpenRound:
    """When a round is over: at its deadline, or some time after a quorum has answered well.

    Attributes:
        round: its number.
        quorum: how many good answers allow it to close.
        deadline: seconds it may take.
        patience: seconds it waits for others after that, or as long again as the quorum took.
    """

    round: int
    quorum: int
    deadline: float
    patience: float
    good: int = 0
    _began: float = field(default_factory=lambda: time.monotonic())
    _quorum_after: float = math.inf  # seconds until the quorum had answered

    def count_answer(self) -> None:
        """A client has answered."""
        self.good += 1
        if self.good >= self.quorum and self._quorum_after == math.inf:
            self._quorum_after = self._seconds_open()

    def discount_answer(self) -> None:
        """An answer that was counted is refused: clients that answer with rubbish must not close a round."""
        self.good -= 1
        if self.good < self.quorum:
            self._quorum_after = math.inf

    def seconds_left(self) -> float:
        """How long it is still open."""
        # as long again as the quorum took: a slower half of honest clients is not cut off by a short patience
        early = self._quorum_after + max(self.patience, self._quorum_after)
        return min(self.deadline, early) - self._seconds_open()

    def reason(self) -> str:
        """Why it closed without some of its clients."""
        if self._seconds_open() < self.deadline and self._quorum_after < math.inf:
            return f"no answer when the round closed with its quorum, {self._seconds_open():.3g} s after it began"
        return f"no answer within {self.deadline:g} s"

    def _seconds_open(self) -> float:
        return time.monotonic() - self._began


@dataclass(slots=True)
class Federation:
    """The nodes behind a grid, by the names of their clients.

    Attributes:
        grid: how messages travel.
        expected: how many clients there should be.
        quorum: the share of them without which nothing begins.
        deadline: seconds a round may take; of several, each round its own and later ones the last.
        wait: seconds to wait for all clients at the beginning.
        patience: seconds a round waits for others once the quorum has answered, or as long again as that took. In a
            simulation no client is slow: they wait for this machine's cores, and a round waits for them.
        names: what clients are called in a simulation, by the number of their partition.
        members: who takes part, by client.
        unknown_nodes: connected nodes that do not take part, and why.
        closed: set when the federation ends, so that no round waits for answers any more.
    """

    grid: Grid
    expected: int
    quorum: float = 0.5
    deadline: float | Sequence[float] = 3600.0
    wait: float = 3600.0
    patience: float = 60.0
    names: Sequence[str] = ()
    members: dict[str, Member] = field(default_factory=dict)
    unknown_nodes: dict[int, str] = field(default_factory=dict)
    closed: bool = False
    _asked: dict[int, str] = field(default_factory=dict)  # node → the message that asks it to enrol
    _unanswered: dict[str, tuple[str, int]] = field(default_factory=dict)  # message → client and closed round

    @property
    def is_simulated(self) -> bool:
        """Whether its nodes are parts of one data set on one machine."""
        return bool(self.members) and all(member.partition >= 0 for member in self.members.values())

    def gather(self) -> None:
        """Wait until all expected clients have enrolled; after `wait` seconds a quorum is enough.

        Raises:
            QuorumLost: if fewer came than may begin.
        """
        ends, pause = time.monotonic() + self.wait, _PAUSE
        self.poll_nodes()
        while len(self.members) < self.expected and time.monotonic() < ends and not self.closed:
            time.sleep(pause)
            pause = min(pause * _PAUSE_GROWTH, _LONGEST_PAUSE)
            self.poll_nodes()
        if not self.members or len(self.members) < self.quorum * self.expected:
            silent = [f"node {node}: it has not said who it is" for node in self._asked]
            why = "; ".join([*self.unknown_nodes.values(), *silent]) or "no other node connected"
            raise QuorumLost(
                f"{len(self.members)} of {self.expected} clients enrolled within {self.wait:g} s and the quorum is "
                f"{self.quorum:.0%}; {why}; start the missing SuperNodes or lower data.clients"
            )

    def poll_nodes(self) -> dict[int, str]:
        """Ask new nodes to enrol and read the answers of those asked before; returns the nodes connected now.

        This does not wait: a node that answers late takes part from a later round on.
        """
        online = {info.node_id: info.name for info in self.grid.get_nodes()}
        self.unknown_nodes = {node: why for node, why in self.unknown_nodes.items() if node in online}
        known = {member.node for member in self.members.values()} | self.unknown_nodes.keys() | self._asked.keys()
        content = RecordDict({BRIEF: ConfigRecord({"version": VERSION})})
        self._asked |= self._push({node: Message(content, node, ENROL) for node in online if node not in known})
        for node, message_id in list(self._asked.items()):
            if reply := next(iter(self.grid.pull_messages([message_id])), None):
                del self._asked[node]
                if not (reply.has_error() and reply.error.code in _NODE_GONE):  # else it is asked again when it is back
                    self._enrol(node, online.get(node, ""), content_or_reason(reply), online)
        return online

    def _enrol(self, node: int, registered: str, reply: Message | str, online: Mapping[int, str]) -> None:
        if isinstance(reply, str):
            self.unknown_nodes[node] = f"node {node}: {reply}"
            return
        answer = dict(reply.content.config_records.get(SITE, {}))
        rows, partition = (answer.get(key) for key in ("rows", "partition"))
        if type(rows) is not int or type(partition) is not int or rows < 0:
            self.unknown_nodes[node] = f"node {node}: it did not say what it has"
            return
        name = registered or self._claimed_name(node, answer.get("name"), partition)
        if name is None:
            self.unknown_nodes[node] = f"node {node}: this federation has no place for partition {partition}"
        elif name in self.members and self.members[name].node in online:
            self.unknown_nodes[node] = f"node {node}: it is called {name!r} as node {self.members[name].node} is"
        else:  # the name is free, or its old node is gone and this is the site come back
            # what a registered node says of a partition counts for nothing: it is no part of a simulation
            self.members[name] = Member(node, rows, -1 if registered else partition)

    def _claimed_name(self, node: int, answer: object, partition: int) -> str | None:
        """What a node without a registered name is called: by its partition, as it says, or by its number."""
        if partition >= 0:
            return self.names[partition] if partition < len(self.names) else None
        return printable(answer, 80) if isinstance(answer, str) and answer.strip() else f"node-{node}"

    def _push(self, messages: Mapping[Key, Message]) -> dict[Key, str]:
        """Send messages; the ids of those that the SuperLink took."""
        taken = set(self.grid.push_messages(list(messages.values()))) if messages else set()
        sent = {key: message.metadata.message_id for key, message in messages.items()}
        return {key: message_id for key, message_id in sent.items() if message_id in taken}

    def deadline_of(self, round_: int) -> float:
        """How many seconds a round may take.

        Example:
            >>> Federation(None, 1, deadline=(600.0, 60.0)).deadline_of(5)
            60.0
        """
        each = (self.deadline,) if isinstance(self.deadline, int | float) else self.deadline
        return each[min(round_, len(each) - 1)]

    def open_round(self, round_: int, asked: int) -> OpenRound:
        """A round that begins now."""
        patience = math.inf if self.is_simulated else self.patience
        return OpenRound(round_, math.ceil(self.quorum * asked), self.deadline_of(round_), patience)

    def ask(self, messages: dict[str, Message], now: OpenRound, weight: int = 0) -> Iterator[tuple[str, Message | str]]:
        """Send messages and give each its reply, or why there is none, as they come; `messages` is emptied.

        Each is asked for alone: the reply is then surely this client's, and only one is in memory.

        Args:
            messages: by client.
            now: the round they belong to, which says when it is over.
            weight: how many bytes the messages share.
        """
        asked, sent = list(messages), self._push(messages)
        messages.clear()  # what was sent is the SuperLink's to keep
        if weight > _LARGE_BRIEF:
            gc.collect()  # Flower's records refer to themselves: without this they stay long after their last use
        for key in asked:
            if key not in sent:
                yield key, "the SuperLink would not take the message for it"
        pause = _PAUSE
        while sent and now.seconds_left() > 0 and not self.closed:
            before = len(sent)
            for key, message_id in list(sent.items()):
                if reply := next(iter(self.grid.pull_messages([message_id])), None):
                    del sent[key]
                    yield key, content_or_reason(reply)
                    reply = None  # or it would stay in memory while the next one is read
            pause = _PAUSE if len(sent) < before else min(pause * _PAUSE_GROWTH, _LONGEST_PAUSE)
            if sent:
                time.sleep(max(0.0, min(pause, now.seconds_left())))
        self._unanswered |= {message_id: (key, now.round) for key, message_id in sent.items()}
        for key in sent:
            yield key, now.reason()

    def late_answers(self) -> Iterator[tuple[str, int]]:
        """Clients whose answers to closed rounds have come by now, and which rounds; what they say is not read."""
        for message_id, (client, round_) in list(self._unanswered.items()):
            if reply := next(iter(self.grid.pull_messages([message_id])), None):
                del self._unanswered[message_id]
                if not reply.has_error():
                    yield client, round_


def content_or_reason(reply: Message) -> Message | str:
    """The reply, or the reason why the node or the site has none."""
    if reply.has_error():
        return f"Flower reports error {reply.error.code}: {printable(reply.error.reason or 'no reason given')}"
    if failed := reply.content.config_records.get(FAILED):
        return printable(failed.get("why", "it failed and did not say why"))
    return reply


class Inbox:
    """Opens a round's replies: small ones stay in memory, the others in files that go when the inbox does."""

    def __init__(self, room: int) -> None:
        self._room, self._files = room, 0
        self._folder: Path | None = None

    def open(self, client: str, reply: Message | str) -> Envelope:
        """A reply as the door wants it."""
        if isinstance(reply, str):
            return Envelope(client, None, dropped=reply)
        seconds = seconds_in(reply.content)
        try:
            payload = read_reply(reply.content, self._store_reply)
        except Malformed as why:
            return Envelope(client, None, dropped=f"malformed: {printable(why)}", seconds=seconds)
        for record in reply.content.array_records.values():
            record.clear()  # as in `Federation.ask`: what was read must not wait for a garbage collection
        return Envelope(client, payload, seconds=seconds)

    def _store_reply(self, tensors: Params, header: Mapping[str, Any]) -> bytes | Path:
        size = forms_size(forms_of(tensors))
        if size <= self._room:
            self._room -= size
            return encode(tensors, header)
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="fedfuse-inbox-"))
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        self._files += 1
        path = self._folder / f"{self._files}.safetensors"  # no client's name is ever part of a path
        write(path, tensors, header, durable=False)
        return path


def printable(text: object, limit: int = 300) -> str:
    r"""A node's text as one short line of printable characters, safe for a terminal and a ledger.

    Example:
        >>> printable("no\x1b[31m data")
        'no [31m data'
    """
    return "".join(c if c.isprintable() else " " for c in str(text)[:limit]).strip()


@dataclass(slots=True)
class FlowerEngine:
    """The clients of one method on one seed, on a federation; their memories stay with them.

    Attributes:
        federation: who is there.
        label: what the sites' own copies of the experiment call the method.
        recipe: the method.
        local: the settings clients train with.
        seed: the seed of the run.
        among: the clients that hold rows for this seed; None for all.
        memories: always empty here.
        on_client: called when a client has answered.
    """

    federation: Federation
    label: str
    recipe: Recipe
    local: LocalSettings
    seed: int = 0
    among: tuple[str, ...] | None = None
    memories: dict[str, Params] = field(default_factory=dict)
    on_client: OnClient | None = None
    terms: ClassVar[Terms] = Terms()
    _inbox: Inbox | None = field(default=None, repr=False)

    @property
    def clients(self) -> tuple[str, ...]:
        """All that ever enrolled, in client order; those that are not connected now are dropped when asked."""
        self.federation.poll_nodes()
        here = [c for c in self.federation.members if self.among is None or c in self.among]
        return tuple(sorted(here, key=client_order))

    def exchange(self, brief: Brief, work: Work, asked: tuple[str, ...]) -> Iterator[Envelope]:
        """Send the brief, then give answers as they come, until all have answered or the round is over.

        Answers to earlier rounds that come now are given as late ones.

        Raises:
            ConfigError: if the brief or the work cannot travel.
        """
        if work != self.recipe.at(brief.round).work(self.local):
            raise ConfigError(
                f"method {self.label!r} cannot run on a federation: its server changes what clients do beyond what an "
                "experiment file says, by lending them rows for instance; run it on this machine"
            )
        which, members = fingerprint(work), self.federation.members
        online = self.federation.poll_nodes()
        here = [client for client in asked if members[client].node in online]
        messages = self._messages(brief, which, here)
        for node, why in self.federation.unknown_nodes.items():
            yield Envelope(f"node {node}", None, dropped=why)
        yield from (Envelope(client, None, dropped="it is not connected") for client in asked if client not in here)
        self._inbox = Inbox(INBOX_BYTES)  # it stays until the next round: models are fused from its files
        now = self.federation.open_round(brief.round, len(asked))
        for client, reply in self.federation.ask(messages, now, forms_size(forms_of(brief.params))):
            envelope = self._inbox.open(client, reply)
            if envelope.payload is not None:
                now.count_answer()
                envelope = replace(envelope, on_refused=now.discount_answer)
            if self.on_client is not None:
                self.on_client(envelope.client, envelope.seconds, False)
            yield envelope
            del reply
        yield from (Envelope(client, None, late=round_) for client, round_ in self.federation.late_answers())

    def _messages(self, brief: Brief, which: str, clients: list[str]) -> dict[str, Message]:
        """A message per client; they hold the brief's last copies, which are gone once the messages are."""
        per_brief, round_ = OncePerBrief(brief, BriefRecords.of), str(brief.round)
        ttl = max(self.federation.deadline_of(brief.round), 1.0)
        messages = {}
        for client in clients:
            content = per_brief.for_client(client).to(Order(self.label, self.seed, client, which))
            node = self.federation.members[client].node
            messages[client] = Message(content, node, MessageType.TRAIN, ttl=ttl, group_id=round_)
        return messages


def log_incidents(when: str, line: Mapping[str, Any]) -> None:
    """Log what the door did in a round, by its ledger line: for each client its first entry, in Flower's own log."""
    for what in ("refused", "clipped"):
        by_client: dict[str, list[Mapping[str, str]]] = {}
        for entry in line.get(what, ()):
            by_client.setdefault(entry["client"], []).append(entry)
        for first, *others in by_client.values():
            more = f"; so were {len(others)} more of its fields, which stand in the ledger" if others else ""
            _log.warning("%s: %s %s%s", when, what, Refused(**first), more)
    for entry in line.get("dropped", ()):
        _log.warning("%s: dropped %s: %s", when, entry["client"], entry["reason"])

"""A site's side of a Flower federation: say who you are, hear a brief, do a client's round, answer.

The work is never sent: a site makes it from its own copy of the experiment file, and the brief only says which one is
meant. What a client remembers from round to round stays in Flower's `Context.state`, on the site's own machine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from fedfuse.core.messages import Brief
from fedfuse.core.rows import Rows
from fedfuse.core.seams import Work
from fedfuse.engines.base import Done, answer
from fedfuse.engines.flower import ENROL, SITE
from fedfuse.engines.flower_records import (
    MEMORY,
    Order,
    failed_content,
    fingerprint,
    read_brief,
    reply_content,
    to_arrays,
    to_tensors,
)
from fedfuse.errors import ConfigError
from fedfuse.wire.codec import decode, encode

from flwr.app import ConfigRecord, Context, Message, RecordDict  # isort: skip - after flower_records has checked
from flwr.clientapp import ClientApp  # isort: skip

COURSE = "course"
_log = logging.getLogger(__name__)


class Enrolment(NamedTuple):
    """What a site says of itself: a name, how many rows it has, and its number if it is part of a simulation."""

    name: str
    rows: int
    partition: int = -1


class Site(Protocol):
    """What a site has of its own: rows, and a copy of the experiment."""

    @property
    def trusted(self) -> frozenset[str]:
        """Networks that are not fedfuse's and may be built because the site's own file names them."""
        ...

    def enrol(self, context: Context) -> Enrolment:
        """Who this site is."""
        ...

    def rows(self, context: Context, brief: Brief, order: Order) -> Rows:
        """The rows to train on."""
        ...

    def work(self, order: Order, round_: int) -> Work:
        """The client half of the method in force."""
        ...


@dataclass(frozen=True, slots=True)
class Clerk:
    """Answers the server's messages for a site; whatever goes wrong is told, and the site stays."""

    site: Site

    def enrol(self, message: Message, context: Context) -> Message:
        """Say who this site is."""
        return reply_with(message, lambda: self._enrolment(context))

    def train(self, message: Message, context: Context) -> Message:
        """Do a client's round."""
        return reply_with(message, lambda: self._round(message, context))

    def _enrolment(self, context: Context) -> RecordDict:
        return RecordDict({SITE: ConfigRecord(dict(self.site.enrol(context)._asdict()))})

    def _round(self, message: Message, context: Context) -> RecordDict:
        brief, order = read_brief(message.content, self.site.trusted)
        work = self.site.work(order, brief.round)
        check_work(work, order)
        return client_reply(work, brief, order, self.site.rows(context, brief, order), context)


def reply_with(message: Message, do: Callable[[], RecordDict]) -> Message:
    """The reply to a message: what is done for it, or in words why it could not be done."""
    try:
        content = do()
    except Exception as why:
        _log.warning("this site could not answer: %s", why, exc_info=True)
        content = failed_content(f"{type(why).__name__}: {why}")
    return Message(content, reply_to=message)


def check_work(work: Work, order: Order) -> None:
    """Go on only if this is the work the server means.

    Raises:
        ConfigError: if the two sides have different code or files.
    """
    if fingerprint(work) != order.work:
        raise ConfigError(
            f"the server's {order.label!r} is another than this site's; install the same fedfuse on both sides and "
            "run the same app"
        )


def client_reply(work: Work, brief: Brief, order: Order, rows: Rows, context: Context) -> RecordDict:
    """One client's round as every app of ours does it; what the client remembers stays in Flower's state."""
    done = answer(work, brief, order.client, rows, _recalled(context, order), seed=order.seed)
    if done.payload is None:
        return failed_content(done.dropped)
    _remember(context, order, done)
    return reply_content(done.payload, done.seconds)


def client_app(site: Site) -> ClientApp:
    """Flower's `ClientApp` for a site."""
    app, clerk = ClientApp(), Clerk(site)
    app.query(ENROL.partition(".")[2])(clerk.enrol)
    app.train()(clerk.train)
    return app


def _recalled(context: Context, order: Order) -> bytes:
    """What this client remembers of this course; a course that begins remembers nothing of the one before."""
    course = dict(context.state.config_records.get(COURSE, {}))
    mine = (course.get("label"), course.get("seed")) == (order.label, order.seed)
    return encode(to_tensors(context.state.array_records.get(MEMORY, {})) if mine else {}, {})


def _remember(context: Context, order: Order, done: Done) -> None:
    """Keep what the client remembers; one course is at work at a time, so only its memory is kept."""
    context.state[COURSE] = ConfigRecord({"label": order.label, "seed": order.seed})
    context.state[MEMORY] = to_arrays(decode(done.memory).tensors)

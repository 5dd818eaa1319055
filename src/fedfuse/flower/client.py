"""A client's side of a federation: read a brief, train, reply; for a ClientApp of your own and for fedfuse's.

`train` and `evaluate` are for an app of your own. What a client remembers from round to round stays in Flower's
`Context.state`, on its own machine.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fedfuse.api import settings_from
from fedfuse.core.messages import Brief
from fedfuse.core.model import Single
from fedfuse.core.posterior import Posterior
from fedfuse.core.recipe import Recipe
from fedfuse.core.rows import Rows, RowSource, as_rows
from fedfuse.core.seams import Work
from fedfuse.core.settings import LocalSettings
from fedfuse.engines.local import answer
from fedfuse.errors import ConfigError
from fedfuse.flower.parts import Network, own_network, recipe_from, spec_of
from fedfuse.flower.records import (
    BRIEF,
    MEMORY,
    Order,
    failed_content,
    fingerprint,
    read_brief,
    reply_content,
    to_arrays,
    to_tensors,
)
from fedfuse.server.judge import accuracy_and_loss
from fedfuse.wire.codec import Packet, laid_out

from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict  # isort: skip - after the check

COURSE = "course"
_OWN = {"device", "augment"}  # the client decides these, even where the server sets the others
_log = logging.getLogger(__name__)


def train(
    message: Message,
    context: Context,
    model: Network,
    rows: RowSource,
    *,
    recipe: Recipe | None = None,
    **settings: Any,
) -> Message:
    """Do one client round as a `FuseStrategy(…, clients="fedfuse")` asks, in your own `@app.train()`.

    Objectives, projections, masks, pruned shapes and evidence are the method's; what the client remembers from round
    to round is kept in `context.state`. An error is reported to the server, which leaves this client out.

    Args:
        message: what the server sent.
        context: Flower's context of this client.
        model: your network: its class, a function that makes it, or one made; the server must mean the same.
        rows: this client's inputs and labels: two tensors, a `Dataset` of pairs, read by its `len()`, or a
            `DataLoader`.
        recipe: the server's recipe, where it is one of your own; a method's name and options come with the message.
        settings: how to train: `lr`, `momentum`, `epochs`, `batch_size`, `device`, …, as for `fedfuse.local_update`.
            Where the server says it (`FuseStrategy(…, local=…)`), only `device` and `augment` are this client's.
    """
    return reply_with(message, lambda: _train_reply(message.content, context, model, as_rows(rows), recipe, settings))


def evaluate(
    message: Message,
    context: Context,  # noqa: ARG001 - Flower's own signature
    model: Network,
    rows: RowSource,
    *,
    recipe: Recipe | None = None,
) -> Message:
    """Score the global model on this client's rows, in your own `@app.evaluate()`: `num-examples`, `loss`, `accuracy`.

    It reads what a `FuseStrategy` sends, and what any of Flower's strategies does.

    Args:
        message: what the server sent.
        context: Flower's context of this client.
        model: your network, as for `train`.
        rows: the inputs and labels to score on, likewise.
        recipe: as for `train`.
    """
    return reply_with(message, lambda: _evaluate_reply(message.content, model, as_rows(rows), recipe))


def _train_reply(
    content: RecordDict, context: Context, model: Network, rows: Rows, recipe: Recipe | None, settings: dict[str, Any]
) -> RecordDict:
    if BRIEF not in content.config_records:
        raise ConfigError("the server sent a plain model; let it say FuseStrategy(…, clients='fedfuse')")
    now, brief, order = _receive_brief(content, model, recipe)
    if flaw := brief.task.flaw(rows.y, brief.classes):
        raise ConfigError(f"this client's {flaw} (task {brief.task.name}); number its targets as the others do")
    check_work(now.work(LocalSettings()), order)  # the settings travel apart from the work
    return client_reply(now.work(_agree_on_settings(order, settings)), brief, order, rows, context)


def _evaluate_reply(content: RecordDict, model: Network, rows: Rows, recipe: Recipe | None) -> RecordDict:
    if BRIEF in content.config_records:
        _, brief, _ = _receive_brief(content, model, recipe)
        single = Single(brief.spec, Posterior(brief.params))
    else:
        (arrays,) = content.array_records.values()
        single = Single(spec_of(model), Posterior(to_tensors(arrays)))
    accuracy, loss = accuracy_and_loss(single, rows)
    return RecordDict({"metrics": MetricRecord({"num-examples": len(rows), "loss": loss, "accuracy": accuracy})})


def _receive_brief(content: RecordDict, model: Network, recipe: Recipe | None) -> tuple[Recipe, Brief, Order]:
    """The recipe in force, the brief with this client's own network in it, and the order."""
    brief, order = read_brief(content, None)  # its spec is compared with our own network's, and not built
    if recipe is None and not order.method:
        raise ConfigError(
            f"the server's {order.label!r} is a recipe of its own and this client was not given it; pass the same "
            "one: train(…, recipe=…)"
        )
    now = (recipe or recipe_from(json.loads(order.method))).at(brief.round)
    return now, replace(brief, spec=own_network(model, brief.spec, now.prepare_model, brief.classes, brief.task)), order


def _agree_on_settings(order: Order, settings: dict[str, Any]) -> LocalSettings:
    """The training settings: the server's if it sent any, else this client's own."""
    mine = settings_from(settings)
    if not order.local:
        return mine
    theirs = LocalSettings.from_json(json.loads(order.local))
    own = mine.model_fields_set - _OWN - {"optimizer"}
    odd = {key for key in own if getattr(mine, key) != getattr(theirs, key)}
    if "optimizer" in mine.model_fields_set:  # its fields one by one: a client may give the rate alone
        own = mine.optimizer.model_fields_set
        odd |= {key for key in own if getattr(mine.optimizer, key) != getattr(theirs.optimizer, key)}
    if odd:
        raise ConfigError(
            f"the server says how to train and this client says {min(odd)} otherwise; leave it out here, or give "
            "FuseStrategy no `local`"
        )
    return theirs.model_copy(update={key: getattr(mine, key) for key in _OWN})


def reply_with(message: Message, do: Callable[[], RecordDict]) -> Message:
    """The reply to a message: the result, or the reason why there is none."""
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
    # One method runs on one seed at a time, so one memory is kept; that of another method or seed is not this one's.
    course: dict[str, Any] = {"label": order.label, "seed": order.seed}
    mine = dict(context.state.config_records.get(COURSE, {})) == course
    memory = dict(laid_out(to_tensors(context.state.array_records.get(MEMORY, {})))) if mine else {}
    done = answer(work, brief, order.client, rows, memory, seed=order.seed)
    if not isinstance(done.payload, Packet):
        return failed_content(done.dropped)
    context.state[COURSE] = ConfigRecord(course)
    context.state[MEMORY] = to_arrays(done.memory)
    return reply_content(done.payload, done.seconds)

"""fedfuse for people who use Flower: whole experiments as apps, or any method as a strategy of an app of yours.

`FuseStrategy` is a drop-in strategy of Flower's Message API: your own ClientApp trains as it did, and a recipe fuses.
Every reply passes fedfuse's door; a client that is refused is logged and left out, and the round goes on.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from fedfuse.api import method
from fedfuse.core.messages import Brief, Envelope
from fedfuse.core.model import Single
from fedfuse.core.params import Params
from fedfuse.core.posterior import Posterior
from fedfuse.core.recipe import Recipe
from fedfuse.core.seams import ClientsOnly, Plain
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench, ServerState
from fedfuse.engines.flower import printable
from fedfuse.engines.flower_records import to_arrays, to_tensors
from fedfuse.errors import QuorumLost, RecipeError
from fedfuse.experiment.flower import server_app, simulate
from fedfuse.experiment.flower_site import site_app
from fedfuse.server.admit import Admission, Rules, admit_all
from fedfuse.server.gather import Bundle
from fedfuse.server.loop import check_quorum, choose
from fedfuse.server.round import fuse_round
from fedfuse.wire.codec import Malformed, encode, forms_of
from fedfuse.wire.messages import reply_header

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict  # isort: skip
from flwr.serverapp import Grid  # isort: skip
from flwr.serverapp.strategy import Strategy  # isort: skip

__all__ = ["FuseStrategy", "server_app", "simulate", "site_app"]

_log = logging.getLogger(__name__)


class FuseStrategy(Strategy):
    """Any recipe's aggregation and server steps as a Flower strategy.

    A client answers with one `ArrayRecord` (the names, shapes and dtypes it was sent) and one `MetricRecord` with
    `num-examples`, as for Flower's own FedAvg; `num-steps` is read by methods that normalise by local steps. What a
    method asks for beside the weights comes as arrays whose names begin with "~".

    Args:
        recipe: a method's name or a recipe of your own.
        model: your network, where a method needs its layers; without it, roles are read off the tensors' names.
        fraction_train: the share of the connected nodes that trains in a round.
        fraction_evaluate: the share that evaluates.
        min_available_nodes: how many nodes a round waits for; Flower's own timeout ends the wait for replies.
        quorum: the share of those asked that must be admitted; below it the model stays as it was.
        bench: what the server may touch: rows of its own, unlabelled inputs, the seed.

    Example:
        >>> FuseStrategy("fednova", quorum=0.8).recipe.name
        'fednova'
    """

    def __init__(
        self,
        recipe: str | Recipe = "fedavg",
        model: nn.Module | Spec | None = None,
        *,
        fraction_train: float = 1.0,
        fraction_evaluate: float = 0.0,
        min_available_nodes: int = 2,
        quorum: float = 0.5,
        bench: Bench | None = None,
    ) -> None:
        self.recipe = method(recipe) if isinstance(recipe, str) else recipe
        _check_fits(self.recipe)
        self.spec = Spec.of(model) if isinstance(model, nn.Module) else model
        self.fractions = {MessageType.TRAIN: fraction_train, MessageType.EVALUATE: fraction_evaluate}
        self.available, self.rules, self.bench = min_available_nodes, Rules(quorum=quorum), bench or Bench()
        self.admission: Admission | None = None
        self._state: ServerState | None = None
        self._asked: tuple[str, ...] = ()

    def summary(self) -> None:
        """Log what fuses."""
        _log.info("fedfuse %s, quorum %.0f%%", self.recipe.label or self.recipe.name, 100 * self.rules.quorum)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The global model to this round's nodes."""
        self._state = self._standing(server_round, to_tensors(arrays))
        messages = self._messages(MessageType.TRAIN, server_round, arrays, config, grid)
        self._asked = tuple(_name(message.metadata.dst_node_id) for message in messages)
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Admit the replies, fuse them, take the server's steps; None keeps the model as it was."""
        state = self._state
        if state is None or not self._asked:
            return None, None
        recipe, bench = self.recipe.at(server_round - 1), replace(self.bench, population=len(self._asked))
        brief, numbers = state.brief(recipe.publishes, bench.classes), dict[str, dict[str, float]]()
        envelopes = (self._envelope(reply, brief, numbers) for reply in replies)
        self.admission = seen = admit_all(envelopes, brief, recipe.evidence, self._asked, self.rules)
        for told in (*seen.refused, *seen.dropped):
            _log.warning("%s", told)
        try:
            check_quorum(seen, self._asked, self.rules.quorum, server_round - 1)
        except QuorumLost as why:
            _log.error("%s", why)
            return None, None
        self._state = state = fuse_round(recipe, seen.cohort, state, bench)
        shares = dict(zip(seen.cohort.clients, seen.cohort.weights.tolist(), strict=True))
        return to_arrays(state.single.posterior.mean), _averaged(numbers, shares, len(seen.refused) + len(seen.dropped))

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The global model to the nodes that evaluate it."""
        return self._messages(MessageType.EVALUATE, server_round, arrays, config, grid)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:  # noqa: ARG002
        """The nodes' numbers, averaged by their examples."""
        numbers = {_name(r.metadata.src_node_id): _numbers(r.content) for r in replies if r.has_content()}
        masses = {name: n.get("num-examples", 0.0) for name, n in numbers.items()}
        good = {name: mass for name, mass in masses.items() if 0 < mass < 1e12}
        shares = {name: mass / sum(good.values()) for name, mass in good.items()}
        return _averaged(numbers, shares, len(numbers) - len(shares)) if shares else None

    def _messages(
        self, kind: str, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        if not self.fractions[kind]:
            return []
        nodes = {_name(node): node for node in grid.get_node_ids()}
        wanted = max(math.ceil(self.fractions[kind] * len(nodes)), min(self.available, len(nodes)))
        chosen = choose(tuple(sorted(nodes)), wanted, self.bench.seed, server_round)
        config["server-round"] = server_round
        content = RecordDict({"arrays": arrays, "config": config})
        return [Message(content, nodes[name], kind) for name in chosen]

    def _standing(self, server_round: int, mean: Params) -> ServerState:
        """What the server knows before a round: its memory stays, the model is the one Flower hands us."""
        spec = self.spec or Spec("state-dict", prototype=Bundle(forms_of(mean)))
        model = Single(spec, Posterior(mean))
        if self._state is None:
            return ServerState(server_round - 1, model)
        return replace(self._state, round=server_round - 1, model=model, facts={})

    def _envelope(self, reply: Message, brief: Brief, numbers: dict[str, dict[str, float]]) -> Envelope:
        client = _name(reply.metadata.src_node_id)
        if reply.has_error():
            return Envelope(client, None, dropped=printable(reply.error.reason or "it failed"))
        numbers[client] = said = _numbers(reply.content)
        facts = {key: value for key, value in said.items() if key not in ("num-examples", "num-steps")}
        mass, steps = said.get("num-examples", math.nan), said.get("num-steps", 1)
        header: dict[str, Any] = reply_header(brief, mass=mass, steps=int(steps), facts=facts)
        try:
            if not math.isfinite(mass):
                header["mass"] = str(mass)  # the door refuses it by name
            (arrays,) = reply.content.array_records.values()
            return Envelope(client, encode(to_tensors(arrays), header))
        except (Malformed, ValueError) as why:
            return Envelope(client, None, dropped=f"malformed: {printable(why)}")


def _check_fits(recipe: Recipe) -> None:
    """A strategy sends and returns the user's own network, and only nodes answer."""
    odd = {
        "ends a round with several networks and a Flower strategy returns one": recipe.result != "single",
        "trains layers of its own and not the network as it is": not isinstance(recipe.dress, Plain),
        "lets the server train or lend rows": not isinstance(recipe.roster, ClientsOnly),
    }
    for why in (why for why, so in odd.items() if so):
        raise RecipeError(f"method {recipe.name!r} {why}; use fedfuse.flower.server_app, where the loop is ours")


def _name(node: int) -> str:
    return f"node-{node}"


def _numbers(content: RecordDict) -> dict[str, float]:
    """The plain numbers of a reply's metric records."""
    found: Mapping[str, Any] = {k: v for record in content.metric_records.values() for k, v in record.items()}
    return {key: value for key, value in found.items() if isinstance(value, int | float)}


def _averaged(numbers: Mapping[str, Mapping[str, float]], shares: Mapping[str, float], left_out: int) -> MetricRecord:
    """Everybody's common finite numbers, weighted by examples; and how many were left out."""
    common = set.intersection(*({k for k, v in numbers[name].items() if math.isfinite(v)} for name in shares))
    means = {key: sum(share * numbers[name][key] for name, share in shares.items()) for key in sorted(common)}
    return MetricRecord({**means, "left-out": left_out})

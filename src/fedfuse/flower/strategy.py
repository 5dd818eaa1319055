"""Any method as a strategy of Flower's Message API, in a ServerApp of yours.

Flower's own loop sends and gathers; every reply passes fedfuse's door, and the round is fused where every round is. A
client that is refused is left out, below the quorum the model stays as it was, and whatever the door did to a client
stands in Flower's log, in the round's metrics and in `ledger`.
"""

from __future__ import annotations

import copy
import json
import logging
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from fedfuse.api import Fused, settings_from
from fedfuse.core.messages import Brief, Envelope, client_order
from fedfuse.core.model import Single, outputs
from fedfuse.core.params import Params
from fedfuse.core.posterior import Posterior
from fedfuse.core.recipe import Recipe
from fedfuse.core.settings import Bounds, LocalSettings, validate_settings
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench, ServerState
from fedfuse.engines.local import OncePerBrief
from fedfuse.errors import ConfigError, QuorumLost, RecipeError
from fedfuse.flower.engine import INBOX_BYTES, Inbox, content_or_reason, log_incidents, printable
from fedfuse.flower.parts import (
    USE_FEDFUSE_CLIENTS,
    Clients,
    Network,
    counts_steps,
    named_recipe,
    refuse_unfit,
    refuse_unknown_training,
    spec_of,
    stages,
)
from fedfuse.flower.records import BriefRecords, Order, fingerprint, to_arrays, to_tensors
from fedfuse.models.bayes import BayesianLayers
from fedfuse.server.admission.admit import Admission, Rules, admit_all
from fedfuse.server.admission.opened import first_difference
from fedfuse.server.filters import AlignChoice, GuardChoice, with_filters
from fedfuse.server.loop import check_quorum, choose_clients
from fedfuse.server.round import fuse_admitted
from fedfuse.wire.codec import Malformed, encode, forms_of
from fedfuse.wire.messages import reply_header

from flwr.app import (  # isort: skip - after records has checked that it is there
    ArrayRecord,
    ConfigRecord,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from flwr.serverapp import Grid  # isort: skip
from flwr.serverapp.strategy import Result, Strategy  # isort: skip

CONFIG, NUM_EXAMPLES, STEPS = "config", "num-examples", "num-steps"  # the first two are Flower's own words
_log = logging.getLogger("flwr")  # Flower's own: what a federation's operator reads


@dataclass(frozen=True, slots=True)
class _RoundTask:
    """The round in progress: its recipe, the state it began with, the brief and who was asked."""

    recipe: Recipe
    bench: Bench
    state: ServerState
    brief: Brief
    nodes: Mapping[str, int]
    asked: tuple[str, ...]


class FuseStrategy(Strategy):
    """Any method as a Flower strategy.

    With plain clients, each answers with one `ArrayRecord` (the names, shapes and dtypes it was sent) and one
    `MetricRecord` with `num-examples`, as for Flower's own FedAvg. Methods that normalize by local steps read
    `num-steps`, which follows from `local` where a client does not say it. A method that asks more of clients is
    refused here, before anything is sent, unless they train with `fedfuse.flower.train`.

    A client's id, which orders clients and names its random streams, is the name its SuperNode was registered with,
    or else "node-" and Flower's number of it.

    Args:
        recipe: a method's name; a table with its `name` and options; or a recipe of your own.
        model: your network (a module, its class, or a spec), where a method needs its layers, and always with
            clients="fedfuse"; without it, roles are read off the tensors' names.
        clients: "plain", or "fedfuse" where the ClientApp trains with `fedfuse.flower.train`.
        align: how hidden units are moved to common places first: a name, a table with its options, or one made.
        guard: a robust filter before the aggregator: likewise.
        local: how clients train (`lr`, `momentum`, `epochs`, …), for methods whose server must know it. Plain clients
            are believed to do so; clients="fedfuse" are told to, and without it say how they did.
        fraction_train: the share of the connected nodes that trains in a round, at least one.
        fraction_evaluate: the share that evaluates the model after it.
        min_available_nodes: how many nodes a round waits for; Flower's own timeout ends the wait for replies.
        quorum: the share of those asked that must be admitted; below it the model stays as it was.
        bounds: how far above the others one client may be, as `server.bounds` of a file says: {"ratio": 3.0}.
        enrol: how many examples clients have, by your word. Without it all clients are believed, as Flower believes
            them, unless they say a million times the median; with it those you do not name are held to the others'
            numbers, and {} vouches for none.
        bench: what the server may touch: rows of its own, unlabelled inputs, the seed.

    Attributes:
        admission: who was let in in the last round, who was not, and why.
        ledger: a line for every round, as a run's ledger has it: who was fused (`clients`), `refused`, `clipped`
            (weakened to a bound) and `dropped`.
        variances: σ² of every Gaussian weight of the model as it is now, under the weight's name, where the method
            trains Bayesian layers; the arrays Flower has are the means, under the names of your network.
        rounds_fused: rounds that changed the model.
        rounds_lost: rounds below the quorum.

    Raises:
        RecipeError: if the method asks for what such clients cannot do.
        ConfigError: if an argument cannot be.

    Example:
        >>> FuseStrategy("fednova", local={"lr": 0.1, "momentum": 0.9}, quorum=0.8).recipe.name
        'fednova'
        >>> FuseStrategy("fedavg", guard="median").recipe.label
        'fedavg+median'
    """

    def __init__(
        self,
        recipe: str | Mapping[str, Any] | Recipe = "fedavg",
        model: Network | None = None,
        *,
        clients: Clients = "plain",
        align: AlignChoice = None,
        guard: GuardChoice = None,
        local: LocalSettings | Mapping[str, Any] | None = None,
        fraction_train: float = 1.0,
        fraction_evaluate: float = 1.0,
        min_available_nodes: int = 2,
        quorum: float = 0.5,
        bounds: Bounds | Mapping[str, Any] | None = None,
        enrol: Mapping[str, int] | None = None,
        bench: Bench | None = None,
    ) -> None:
        base, self._method = named_recipe(recipe)
        self.recipe = self._as_given = with_filters(base, align=align, guard=guard)
        self.spec = None if model is None else spec_of(model)
        if local is None and bench is not None and bench.local != LocalSettings():
            local = bench.local
        self.clients = clients
        self.local = local if local is None or isinstance(local, LocalSettings) else settings_from(local)
        self.fractions = {MessageType.TRAIN: fraction_train, MessageType.EVALUATE: fraction_evaluate}
        self.available, self.enrolled, self.bench = min_available_nodes, dict(enrol or {}), bench or Bench()
        limits = bounds if isinstance(bounds, Bounds) else validate_settings(Bounds, bounds or {}, "bounds")
        self.rules = Rules(quorum=quorum, bounds=limits, believes=enrol is None, told_steps=False)
        if self.local is not None:
            self.bench = replace(self.bench, local=self.local)
        self._check()
        self._begin()

    def _check(self) -> None:
        """Refuse what could not work before anything is sent."""
        shares = (*self.fractions.values(), self.rules.quorum)
        for name, share in zip(("fraction_train", "fraction_evaluate", "quorum"), shares, strict=True):
            if not 0 <= share <= 1 or (share == 0 and name == "fraction_train"):
                least = "above 0" if name == "fraction_train" else "from 0"
                raise ConfigError(f"{name} is {share!r}, expected a share of the nodes, {least} up to 1")
        if self.clients not in ("plain", "fedfuse"):
            raise ConfigError(f"clients is {self.clients!r}, expected 'plain' or 'fedfuse'")
        for name, count in self.enrolled.items():
            if type(count) is not int or count < 1:
                raise ConfigError(f"enrol says that {name!r} has {count!r} examples, expected a whole number above 0")
        if self.rules.believes and "share" in self.rules.bounds.model_fields_set:
            raise ConfigError(
                "bounds.share limits numbers of examples by clients' own word, and without enrol they are believed; "
                "say whom you vouch for with enrol={name: examples}, or enrol={} for none"
            )
        refuse_unfit(self.recipe, self.clients)
        refuse_unknown_training(self.recipe, self.local)
        if self.clients == "plain":
            return
        if self.spec is None:
            raise ConfigError("clients='fedfuse' are told which network to train; pass it: FuseStrategy(…, model)")
        if self.local is not None and self.local.augment is not None:
            raise ConfigError("local.augment is a function and cannot travel; pass it to the clients' train(…)")
        for now in stages(self.recipe):
            fingerprint(now.work(LocalSettings()))

    def _begin(self) -> None:
        """Forget a run before this one; a strategy may be started again."""
        self.recipe = copy.deepcopy(self._as_given)  # what a part kept on itself in a run before is not in it
        self.admission: Admission | None = None
        self.ledger: list[dict[str, Any]] = []
        self.rounds_fused = self.rounds_lost = 0
        self._state: ServerState | None = None
        self.variances: ArrayRecord | None = None
        self._names = frozenset[str]()  # the arrays of the user's own network
        self._arrays: ArrayRecord | None = None  # the state's model, as Flower was given it
        self._sent: ArrayRecord | None = None  # the same as clients are sent it
        self._task: _RoundTask | None = None
        self._inbox: Inbox | None = None  # fused models may still be read from its files
        self._last_loss_reason = ""

    @property
    def fused(self) -> Fused:
        """The model as it is now; `fused.module()` is your network, dressed or pruned as the method left it.

        Raises:
            ConfigError: before the first round.
        """
        if self._state is None:
            raise ConfigError("nothing was fused yet; call start first")
        refused = () if self.admission is None else tuple(self.admission.refused)
        return Fused(self._state.model, refused, self._state.facts)

    def start(self, grid: Grid, initial_arrays: ArrayRecord, num_rounds: int = 3, *args: Any, **kwargs: Any) -> Result:
        """Run Flower's loop; see Flower's own `Strategy.start` for the further arguments.

        Raises:
            QuorumLost: if not one round could be fused.
            RecipeError: before the first round, if the method cannot do what is asked.
            ConfigError: likewise, if the method does not fit the network.
        """
        self._begin()
        first = self._state_before(1, initial_arrays)
        self.recipe.check(num_rounds, self._bench(first), first if self.spec is not None else None)
        result = super().start(grid, initial_arrays, num_rounds, *args, **kwargs)
        if self.rounds_lost and not self.rounds_fused:
            raise QuorumLost(f"none of {num_rounds} rounds could be fused; {self._last_loss_reason}")
        return result

    def summary(self) -> None:
        """Log what fuses."""
        words = self.recipe.label or self.recipe.name, self.clients, 100 * self.rules.quorum
        _log.info("fedfuse %s, %s clients, quorum %.0f%%", *words)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """What this round's nodes are asked: the global model, or a method's whole brief."""
        nodes, now = self._nodes(grid), self.recipe.at(server_round - 1)
        before = self._state_before(server_round, arrays)
        bench = self._bench(before, len(nodes))
        state = now.begin_round(before, bench)
        self._state = state
        if arrays is not self._arrays or state.model is not before.model:
            self._publish(state, arrays if state.model is before.model else None)
        asked = self._choose(MessageType.TRAIN, server_round, nodes)
        brief = state.brief(now.publishes, bench.classes, bench.task)
        self._task = _RoundTask(now, bench, state, brief, nodes, asked)
        config["server-round"] = server_round
        return list(self._train_messages(self._task, arrays, config))

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Admit the replies, fuse them, take the server's steps; below the quorum the model stays as it was sent."""
        task, self._task = self._task, None
        if task is None:
            return None, None
        names, numbers = {node: name for name, node in task.nodes.items()}, dict[str, dict[str, float]]()
        self._inbox = Inbox(INBOX_BYTES)
        envelopes = (self._envelope(reply, task, names, numbers) for reply in replies)
        self.admission = seen = admit_all(
            envelopes,
            task.brief,
            task.recipe.evidence,
            task.asked,
            self.rules,
            enrolled=self.enrolled,
            training=self.local,
            trains=task.recipe.trains,
        )
        try:
            check_quorum(seen, task.asked, self.rules.quorum, server_round - 1)
            after = fuse_admitted(task.recipe, seen, task.state, task.bench)
            check_quorum(seen, task.asked, self.rules.quorum, server_round - 1)  # the fusion may have refused some
        except QuorumLost as why:
            _log.error("%s", why)
            self.rounds_lost += 1
            self._last_loss_reason = str(why)
            return self._arrays, MetricRecord({"quorum-lost": 1, **self._counts(task, seen)})
        finally:
            what = {"refused": seen.refused, "clipped": seen.clipped, "dropped": seen.dropped}
            clients = {update.client: update.record() for update in seen.cohort}
            self.ledger.append({"round": server_round, "clients": clients, **what})
            log_incidents(f"round {server_round}", self.ledger[-1])
        self._state = after
        self._check_shape(task)
        self.rounds_fused += 1
        self._publish(after)
        shares = dict(zip(seen.cohort.clients, seen.cohort.weights.tolist(), strict=True))
        reported = {update.client: numbers.get(update.client, update.facts) for update in seen.cohort}
        return self._arrays, MetricRecord({**average_numbers(reported, shares), **self._counts(task, seen)})

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The global model to the nodes that evaluate it."""
        if not self.fractions[MessageType.EVALUATE]:
            return []
        nodes = self._nodes(grid)
        config["server-round"] = server_round
        asked = self._choose(MessageType.EVALUATE, server_round, nodes)
        return [
            Message(self._evaluate_content(name, server_round, arrays, config), nodes[name], MessageType.EVALUATE)
            for name in asked
        ]

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """The nodes' numbers, averaged by their examples."""
        numbers = dict[str, dict[str, float]]()
        for reply in replies:
            received, name = content_or_reason(reply), _default_name(reply.metadata.src_node_id)
            if isinstance(received, str):
                _log.warning("round %s: %s could not evaluate: %s", server_round, name, received)
            numbers[name] = {} if isinstance(received, str) else numbers_in(received.content)
        num_examples = {name: reported.get(NUM_EXAMPLES, 0.0) for name, reported in numbers.items()}
        good = {name: n for name, n in num_examples.items() if 0 < n < 1e12}
        shares = {name: num_examples / sum(good.values()) for name, num_examples in good.items()}
        left_out = len(numbers) - len(shares)
        return MetricRecord({**average_numbers(numbers, shares), "left-out": left_out}) if shares else None

    def initialize_parameters(self, client_manager: object) -> NoReturn:  # noqa: ARG002 - Flower's own signature
        """What Flower's older server calls first: here it ends, for nothing after it could work.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "FuseStrategy speaks Flower's Message API and cannot be a strategy of ServerAppComponents or of "
            "ServerApp(strategy=…); use it in a ServerApp's main: strategy.start(grid, ...)"
        )

    def _nodes(self, grid: Grid) -> dict[str, int]:
        """The connected nodes by name; it waits, as Flower's own strategies do, until they are enough."""
        while len(found := {info.node_id: info.name for info in grid.get_nodes()}) < self.available:
            _log.info("waiting for nodes: %d of %d are connected", len(found), self.available)
            time.sleep(1)
        names: dict[str, int] = {}
        for node, name in sorted(found.items()):
            reported = printable(name, 80)
            names[reported if reported and reported not in names else _default_name(node)] = node
        return {name: names[name] for name in sorted(names, key=client_order)}

    def _choose(self, kind: str, server_round: int, nodes: Mapping[str, int]) -> tuple[str, ...]:
        wanted = max(1, math.ceil(self.fractions[kind] * len(nodes)))
        return choose_clients(tuple(nodes), wanted, self.bench.seed, server_round - 1)

    def _state_before(self, server_round: int, arrays: ArrayRecord) -> ServerState:
        """What the server knows before a round: its memory stays, and the model unless Flower hands us another."""
        if self._state is not None and arrays is self._arrays:  # our own object came back: nothing to read
            return replace(self._state, round=server_round - 1, facts={})
        mean: Params = to_tensors(arrays)
        if self._state is not None:
            if (layers := self._renamed(now := self._state.single.posterior.mean)) is not None:
                mean = layers.with_means(now, mean)
            return replace(self._state.fused(mean), round=server_round - 1, facts={})
        self._names = frozenset(mean)
        spec = self.spec or Spec.of_tensors(mean)
        if spec.can_run and (odd := first_difference(forms_of(mean), forms_of(spec.skeleton().state_dict()))):
            raise ConfigError(
                f"the arrays do not fit the network {spec.factory!r}: {odd[0]} is {odd[1]}, and there it is {odd[2]}; "
                "start with ArrayRecord(model.state_dict())"
            )
        return ServerState(server_round - 1, Single(spec, Posterior(mean)))

    def _renamed(self, mean: Params) -> BayesianLayers | None:
        """The preparation of Bayesian layers under whose names these weights are, where the user's are others."""
        prepared = (now.prepare_model for now in stages(self.recipe) if mean.keys() != self._names)
        return next((prepare for prepare in prepared if isinstance(prepare, BayesianLayers)), None)

    def _publish(self, state: ServerState, given: ArrayRecord | None = None) -> None:
        """Keep the state's model as clients are sent it, and as Flower is given it: under the user's own names."""
        mean = state.single.posterior.mean
        same = given is not None and given.keys() == mean.keys()  # a copy of a model is not free
        self._sent = self._arrays = given if same else to_arrays(mean)
        if (layers := self._renamed(mean)) is not None:
            self._arrays, self.variances = map(to_arrays, layers.without_variances(mean))

    def _bench(self, state: ServerState, nodes: int = 0) -> Bench:
        """What the server may touch, with what can be seen of the federation and of the network."""
        classes = self.bench.classes or (0 if self.spec is None else outputs(state.single) or 0)
        return replace(self.bench, population=self.bench.population or nodes, classes=classes)

    def _train_messages(self, task: _RoundTask, arrays: ArrayRecord, config: ConfigRecord) -> Iterator[Message]:
        if self.clients == "plain":
            content = RecordDict({"arrays": arrays, CONFIG: config})
            yield from (Message(content, task.nodes[name], MessageType.TRAIN) for name in task.asked)
            return
        per_brief = OncePerBrief(task.brief, lambda brief: BriefRecords.of(replace(brief, spec=_nameable(brief.spec))))
        for name in task.asked:
            content = per_brief.for_client(name).to(self._order(task.recipe, name))
            content[CONFIG] = config
            yield Message(content, task.nodes[name], MessageType.TRAIN)

    def _evaluate_content(self, name: str, server_round: int, arrays: ArrayRecord, config: ConfigRecord) -> RecordDict:
        """The content of a message that asks a node to evaluate."""
        if self.clients == "plain":
            return RecordDict({"arrays": arrays, CONFIG: config})
        now, state = self.recipe.at(server_round - 1), self._state or self._state_before(server_round, arrays)
        spec, bench = _nameable(state.single.spec), self._bench(state)
        brief = Brief(server_round - 1, spec, {}, classes=bench.classes, task=bench.task)
        params = self._sent if arrays is self._arrays and self._sent is not None else arrays
        content = replace(BriefRecords.of(brief), params=params).to(self._order(now, name))
        content[CONFIG] = config
        return content

    def _order(self, recipe: Recipe, client: str) -> Order:
        local = "" if self.local is None else json.dumps(self.local.to_json(), sort_keys=True)
        work = fingerprint(recipe.work(LocalSettings()))  # the settings travel apart, or are the client's own
        return Order(self.recipe.label or self.recipe.name, self.bench.seed, client, work, self._method, local)

    def _envelope(
        self, reply: Message, task: _RoundTask, names: Mapping[int, str], numbers: dict[str, dict[str, float]]
    ) -> Envelope:
        """A reply as the door wants it; what a plain client reports of itself is kept in `numbers`."""
        # the name comes from the link, not from the reply: a client cannot answer for another
        client = names.get(reply.metadata.src_node_id, _default_name(reply.metadata.src_node_id))
        received = content_or_reason(reply)
        if self.clients == "fedfuse" and self._inbox is not None:
            return self._inbox.open(client, received)
        if isinstance(received, str):
            return Envelope(client, None, dropped=received)
        numbers[client] = reported = numbers_in(received.content)
        # a method that weighs by steps must not be given a guess: the door refuses 0 by name; to the others it is 1
        if self.local is None:
            default_steps = int(not counts_steps(task.recipe))
        else:
            default_steps = steps_by(self.local, reported.get(NUM_EXAMPLES, 0.0))
        return plain_envelope(client, received.content, reported, task.brief, default_steps)

    def _check_shape(self, task: _RoundTask) -> None:
        """A plain client could not load a network of other shapes than its own."""
        if self.clients == "plain" and self._state is not None:
            now = forms_of(self._state.single.posterior.mean)
            if odd := first_difference(now, forms_of(task.brief.params)):
                raise RecipeError(
                    f"method {task.recipe.name!r} has changed the network's shape ({odd[0]} is {odd[1]}) and a plain "
                    f"Flower client could not load it; {USE_FEDFUSE_CLIENTS}"
                )

    def _counts(self, task: _RoundTask, seen: Admission) -> dict[str, int]:
        """How many clients were left out of a round, how many of them by the door, and how many were weakened."""
        refused, clipped = ({entry["client"] for entry in entries} for entries in (seen.refused, seen.clipped))
        left_out = len(task.asked) - len(seen.cohort)
        return {"left-out": left_out, "fuse-refused": len(refused), "fuse-clipped": len(clipped)}


def _nameable(spec: Spec) -> Spec:
    """The spec as a message can carry it: clients bring the network themselves."""
    return replace(spec, prototype=None)


def _default_name(node: int) -> str:
    return f"node-{node}"


def numbers_in(content: RecordDict) -> dict[str, float]:
    """The plain numbers of a reply's metric records."""
    found: Mapping[str, Any] = {k: v for record in content.metric_records.values() for k, v in record.items()}
    return {key: value for key, value in found.items() if isinstance(value, int | float)}


def plain_envelope(
    client: str, content: RecordDict, numbers: Mapping[str, float], brief: Brief, default_steps: int
) -> Envelope:
    """The reply of a plain client; where it does not say how many steps it took, it took the default."""
    facts = {key: value for key, value in numbers.items() if key not in (NUM_EXAMPLES, STEPS)}
    num_examples = numbers.get(NUM_EXAMPLES, math.nan)
    try:
        header = reply_header(
            brief, num_examples=num_examples, steps=int(numbers.get(STEPS, default_steps)), facts=facts
        )
        if not math.isfinite(num_examples):
            header["num_examples"] = str(num_examples)  # the door refuses it by name
        (arrays,) = content.array_records.values()
        return Envelope(client, encode(to_tensors(arrays), header))
    except (Malformed, ValueError, OverflowError) as why:
        return Envelope(client, None, dropped=f"malformed: {printable(why)}")


def steps_by(local: LocalSettings, num_examples: float) -> int:
    """How many steps a client takes that trains so on so many examples; 0, which no door lets in, for an odd number.

    Example:
        >>> steps_by(LocalSettings(epochs=3, batch_size=32), 100)
        12
    """
    return local.steps_for(num_examples) if 0 < num_examples < 1e9 else 0


def average_numbers(numbers: Mapping[str, Mapping[str, float]], shares: Mapping[str, float]) -> dict[str, float]:
    """The mean of each number that at least half of the clients report, over those whose own is finite, by examples.

    Example:
        >>> reported = {"a": {"loss": 1.0}, "b": {"loss": 3.0}, "c": {"loss": math.nan, "odd": 1.0}}
        >>> average_numbers(reported, {"a": 0.125, "b": 0.375, "c": 0.5})
        {'loss': 2.5}
    """
    means = {}
    for key in sorted({key for name in shares for key in numbers[name]} - {NUM_EXAMPLES}):  # it is the weight itself
        told = [(share, numbers[name][key]) for name, share in shares.items() if key in numbers[name]]
        finite = [(share, value) for share, value in told if math.isfinite(value)]
        if finite and 2 * len(told) >= len(shares):
            means[key] = sum(share * value for share, value in finite) / sum(share for share, _ in finite)
    return means

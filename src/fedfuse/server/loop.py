"""The round: brief → learn → admit → fuse → step → score → record. The whole project in one loop."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from fedfuse.core.messages import Brief, client_order
from fedfuse.core.model import Model
from fedfuse.core.recipe import Recipe
from fedfuse.core.rng import stream
from fedfuse.core.seams import Engine, Terms
from fedfuse.core.state import Bench, ServerState
from fedfuse.errors import QuorumLost
from fedfuse.nets.cost import cohort_flops, sparse_savings
from fedfuse.server.admission.admit import Admission, Rules, admit_all
from fedfuse.server.round import Clock, fuse_admitted
from fedfuse.wire.messages import brief_size


class Scorer(Protocol):
    """Gives numbers to the record; nothing in the round reads them."""

    def score(self, model: Model, admission: Admission, last: bool) -> Mapping[str, Any]:
        """What a reader wants to know of the model and of the clients' own."""
        ...


@dataclass(frozen=True, slots=True)
class Record:
    """The record of one round: the state after it, and the facts."""

    state: ServerState
    facts: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RunPlan:
    """How a run goes, apart from its recipe.

    Attributes:
        rounds: exchanges in all.
        per_round: how many clients are asked in a round; None asks all.
        participation: with which probability a client is asked in a round, by a coin of its own; None draws no coins.
        rules: what the door and the quorum insist on.
        enrolled: how many examples each client has declared beforehand.
        own_word: those of them that say so themselves and have no operator to vouch for it.
        checked: whether the recipe is known to do what is asked.
    """

    rounds: int = 1
    per_round: int | None = None
    participation: float | None = None
    rules: Rules = field(default_factory=Rules)
    enrolled: Mapping[str, int] = field(default_factory=dict)
    own_word: frozenset[str] = frozenset()
    checked: bool = False


def run(
    recipe: Recipe, engine: Engine, bench: Bench, judge: Scorer | None, state: ServerState, plan: RunPlan
) -> Iterator[Record]:
    """Run rounds from `state.round` to the end, yielding each as it is done.

    Raises:
        QuorumLost: when too few updates were admitted; the last yielded state is still good.
        RecipeError: before any training, when the recipe cannot do what is asked.
    """
    plan = replace(plan, rounds=recipe.exchanges(plan.rounds, state.network))
    if not plan.checked:
        recipe.check(plan.rounds, bench, state)
    while state.round < plan.rounds:
        now = recipe.at(state.round)
        state = now.begin_round(state, bench)
        yield (record := one_round(now, now.roster(engine, bench), bench, judge, state, plan))
        state = record.state


def one_round(
    recipe: Recipe, engine: Engine, bench: Bench, judge: Scorer | None, state: ServerState, plan: RunPlan
) -> Record:
    """One exchange and everything that follows from it."""
    terms = engine.terms
    drawn = choose_clients(engine.clients, plan.per_round, bench.seed, state.round, plan.participation)
    asked = (*drawn, *terms.always)
    brief = state.brief(recipe.publishes, bench.classes, bench.task)
    clock = Clock()
    began = time.perf_counter()
    answers = engine.exchange(brief, recipe.work(bench.local), asked)
    enrolled = terms.claimable_examples(plan.enrolled)
    admission = admit_all(
        answers,
        brief,
        recipe.evidence,
        asked,
        plan.rules,
        enrolled=enrolled,
        training=bench.local,
        trains=recipe.trains,
        unsent=frozenset(terms.always),
        own_word=plan.own_word | (set(asked) - enrolled.keys() - set(terms.always)),
    )
    train_seconds = time.perf_counter() - began
    check_quorum(admission, asked, plan.rules.quorum, state.round)
    after = fuse_admitted(recipe, admission, state, bench, clock)
    check_quorum(admission, asked, plan.rules.quorum, state.round)  # the fusion may have refused some of them
    scores = judge.score(after.model, admission, after.round == plan.rounds) if judge else {}
    facts = _round_facts(recipe, admission, brief, asked, bench, terms, state, after)
    seconds = {"train_seconds": train_seconds, "server_seconds": clock.seconds["server"]}
    if "diagnostics" in clock.seconds:
        seconds["diagnostic_seconds"] = clock.seconds["diagnostics"]
    noted = {key: fact for key, fact in after.facts.items() if key != "server_flops"}
    return Record(after, {**facts, **scores, **seconds, "facts": noted})


def choose_clients(
    clients: tuple[str, ...], per_round: int | None, seed: int, round_: int, participation: float | None = None
) -> tuple[str, ...]:
    """The clients asked in a round: all, a seeded sample without replacement, or those whose coin says so.

    Where all coins say no they are thrown again, for there is no round without clients (privacy accounts for that).

    Example:
        >>> choose_clients(("a", "b", "c"), 2, seed=0, round_=0) == choose_clients(("a", "b", "c"), 2, seed=0, round_=0)
        True
        >>> [choose_clients(("a", "b", "c"), None, 0, round_, participation=0.5) for round_ in range(3)]
        [('b',), ('b', 'c'), ('b', 'c')]
    """
    draw = stream(seed, "sample", round_)
    if participation is not None:
        drawn: tuple[str, ...] = ()
        while clients and not drawn:
            coins = torch.rand(len(clients), generator=draw, dtype=torch.float64)
            drawn = tuple(client for client, coin in zip(clients, coins.tolist(), strict=True) if coin < participation)
        return drawn
    if per_round is None or per_round >= len(clients):
        return clients
    order = torch.randperm(len(clients), generator=draw)[:per_round]
    return tuple(sorted((clients[i] for i in order.tolist()), key=client_order))


def check_quorum(admission: Admission, asked: tuple[str, ...], quorum: float, round_: int) -> None:
    """Go on only if enough of the asked clients were admitted.

    Raises:
        QuorumLost: saying how many were, and why the others were not.
    """
    got = len(admission.cohort)
    if got and got >= quorum * len(asked):
        return
    why = [f"{r['client']}: {r['field']} is {r['got']}" for r in admission.refused]
    why += [f"{d['client']}: {d['reason']}" for d in admission.dropped]
    raise QuorumLost(
        f"round {round_ + 1}: {got} of {len(asked)} clients were admitted and the quorum is {quorum:.0%}; "
        f"{'; '.join(why[:5]) or 'nobody answered'}{' …' if len(why) > 5 else ''}; the model before this round is kept"
    )


def _round_facts(
    recipe: Recipe,
    admission: Admission,
    brief: Brief,
    asked: tuple[str, ...],
    bench: Bench,
    terms: Terms,
    before: ServerState,
    after: ServerState,
) -> dict[str, Any]:
    # Where the server answers as one more client, what it sends itself is no traffic and its training is its own work.
    heard = [client for client in asked if client not in terms.always]
    own = [client for client in heard if client in brief.own]
    bytes_down = brief_size(brief.to("")) * (len(heard) - len(own)) + sum([brief_size(brief.to(c)) for c in own])
    saved, replies = sparse_savings(brief), admission.trained + admission.remembered
    shape, work = bench.inputs.shape if bench.inputs else None, recipe.work(bench.local)
    apart = [[u for u in admission.cohort if (u.client in terms.always) == is_server] for is_server in (False, True)]
    flops, own_flops = [cohort_flops(updates, work, shape, brief.round) for updates in apart]
    first = before.facts.get("server_flops") if brief.round == 0 else None
    return {
        "round": brief.round + 1,
        "clients": {u.client: u.record() for u in admission.cohort},
        "bytes_up": admission.bytes_up - saved.up * replies,
        "bytes_down": bytes_down - saved.down * len(heard) + (terms.shared_bytes if brief.round == 0 else 0),
        "flops": None if flops is None else sum(flops),
        "evidence_flops": None if flops is None else flops.curvature + flops.evidence,
        "curvature_flops": None if flops is None else flops.curvature,
        "trained": admission.trained,
        "remembered": admission.remembered,
        "refused": admission.refused,
        **({"clipped": admission.clipped} if admission.clipped else {}),
        "dropped": admission.dropped,
        "reveals": [*terms.reveals, *(e.reveals for e in recipe.evidence if e.reveals)],
        "server_flops": None if own_flops is None else sum(own_flops) + after.facts.get("server_flops", 0),
        **({} if first is None else {"first_flops": first}),
    }

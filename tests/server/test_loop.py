"""The round: who is asked, what is recorded, and when it does not count."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch

from builders import as_bytes, start_of, update_of
from fedfuse.core.messages import Brief, Cohort, Envelope
from fedfuse.core.model import Apart, Model
from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import find_method
from fedfuse.core.rows import Rows
from fedfuse.core.seams import Engine, Terms, Work
from fedfuse.core.settings import LocalSettings
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench, ServerState
from fedfuse.engines.local import InProcess, Population
from fedfuse.errors import QuorumLost
from fedfuse.server.admission.admit import Admission, Rules, Spool
from fedfuse.server.aggregate.mean import Mean
from fedfuse.server.judge import Judge
from fedfuse.server.loop import Record, RunPlan, choose_clients, run
from fedfuse.wire.codec import decode
from fedfuse.wire.messages import encode_brief

SPEC = Spec("mlp", {"inputs": 3, "hidden": [4], "classes": 2})
SIZES = {"c0": 4, "c1": 6, "c2": 10, "c3": 12}
BENCH = Bench(population=4, classes=2, local=LocalSettings(batch_size=4, optimizer={"lr": 0.1}))


def federation() -> InProcess:
    draw = torch.Generator().manual_seed(1)
    rows = {c: Rows(torch.randn(n, 3, generator=draw), torch.arange(n) % 2) for c, n in SIZES.items()}
    return InProcess(Population.of(rows))


@dataclass(slots=True)
class Faulty:
    """An engine some of whose clients do not answer, or answer with garbage."""

    inner: InProcess
    silent: frozenset[str] = frozenset()
    garbled: frozenset[str] = frozenset()
    heard: list[Brief] = field(default_factory=list)
    terms: ClassVar[Terms] = Terms()

    @property
    def clients(self) -> tuple[str, ...]:
        return self.inner.clients

    def exchange(self, brief: Brief, work: Work, asked: tuple[str, ...]) -> Iterator[Envelope]:
        self.heard.append(brief)
        for envelope in self.inner.exchange(brief, work, asked):
            if envelope.client in self.silent:
                yield Envelope(envelope.client, None, dropped="the line is dead")
            elif envelope.client in self.garbled:
                yield Envelope(envelope.client, b"garbage")
            else:
                yield envelope


@dataclass(slots=True)
class Watching:
    """A judge that remembers what it was shown."""

    seen: list[tuple[Model, int, bool]] = field(default_factory=list)

    def score(self, model: Model, admission: Admission, last: bool) -> Mapping[str, Any]:
        self.seen.append((model, len(admission.cohort), last))
        return {"accuracy": 0.5}


def rounds(recipe: Recipe, engine: Engine, state: ServerState | None = None, **plan: Any) -> list[Record]:
    return list(run(recipe, engine, BENCH, None, state or start_of(SPEC), RunPlan(**plan)))


def test_a_record_tells_everything_a_reader_wants() -> None:
    judge, engine = Watching(), Faulty(federation(), silent=frozenset({"c1"}))
    recipe = find_method("scaffold").recipe()
    records = list(run(recipe, engine, BENCH, judge, start_of(SPEC), RunPlan(rounds=2)))
    facts = records[0].facts
    assert [r.facts["round"] for r in records] == [1, 2]
    assert list(facts["clients"]) == ["c0", "c2", "c3"]
    assert facts["clients"]["c2"]["num_examples"] == 10.0
    assert facts["clients"]["c2"]["steps"] == 3
    assert facts["dropped"] == [{"client": "c1", "reason": "the line is dead"}]
    assert facts["refused"] == []
    assert facts["reveals"] == ["mean gradient of the client's rows"]
    assert facts["bytes_down"] == 4 * len(encode_brief(engine.heard[0]))
    assert records[1].facts["bytes_down"] == 4 * len(encode_brief(engine.heard[1])) > facts["bytes_down"]
    assert facts["accuracy"] == 0.5
    assert [(count, last) for _, count, last in judge.seen] == [(3, False), (3, True)]
    assert judge.seen[1][0] is records[1].state.model


def test_bytes_down_counts_each_client_its_own_brief() -> None:
    engine = Faulty(federation())
    records = rounds(find_method("local").recipe(), engine, rounds=2)
    told = engine.heard[1]
    assert records[1].facts["bytes_down"] == sum(len(encode_brief(told.to(c))) for c in SIZES)


def test_a_run_that_stops_goes_on_to_the_same_bytes() -> None:
    recipe = find_method("scaffold").recipe()
    engine = federation()
    whole = rounds(recipe, engine, rounds=4)[-1].state
    half_engine = federation()
    half = rounds(recipe, half_engine, rounds=2)[-1].state
    again = InProcess(half_engine.population, memories=dict(half_engine.memories))
    resumed = rounds(recipe, again, half, rounds=4)
    assert [r.facts["round"] for r in resumed] == [3, 4]
    for mine, theirs in ((whole.memory, resumed[-1].state.memory), (mean(whole), mean(resumed[-1].state))):
        assert all(mine[n].equal(theirs[n]) for n in mine)


def mean(state: ServerState) -> Mapping[str, torch.Tensor]:
    return state.single.posterior.mean


def test_below_the_quorum_the_round_does_not_count() -> None:
    engine = Faulty(federation(), silent=frozenset({"c0"}), garbled=frozenset({"c1", "c2"}))
    going = run(Recipe(aggregate=Mean()), engine, BENCH, None, start_of(SPEC), RunPlan(rounds=1))
    with pytest.raises(QuorumLost) as why:
        next(going)
    assert "round 1: 1 of 4 clients were admitted and the quorum is 50%" in str(why.value)
    assert "c1: reply is" in str(why.value)
    assert "c0: the line is dead" in str(why.value)
    record = rounds(Recipe(aggregate=Mean()), engine, rules=Rules(quorum=0.25))[0]
    assert list(record.facts["clients"]) == ["c3"]


def test_nobody_at_all_is_never_a_quorum() -> None:
    engine = Faulty(federation(), silent=frozenset(SIZES))
    with pytest.raises(QuorumLost, match="0 of 4"):
        rounds(Recipe(aggregate=Mean()), engine, rules=Rules(quorum=0.0))


def test_enrolled_counts_reach_the_door() -> None:
    records = rounds(Recipe(aggregate=Mean()), federation(), enrolled={**SIZES, "c3": 11})
    assert [(r["client"], r["field"]) for r in records[0].facts["refused"]] == [("c3", "num_examples")]


def test_a_sample_is_seeded_without_replacement_and_in_client_order() -> None:
    clients = tuple(f"c{i}" for i in range(30))
    draws = [choose_clients(clients, 10, seed=0, round_=r) for r in range(20)]
    assert all(len(set(d)) == 10 and d == tuple(sorted(d, key=lambda c: int(c[1:]))) for d in draws)
    assert len(set(draws)) == 20
    assert draws == [choose_clients(clients, 10, seed=0, round_=r) for r in range(20)]
    assert set().union(*draws) == set(clients)
    assert choose_clients(clients, None, 0, 0) == choose_clients(clients, 99, 0, 0) == clients


def test_who_was_never_asked_still_begins_where_all_began() -> None:
    """Local training with sampling: a newcomer must not start from somebody else's model."""
    engine = Faulty(federation())
    records = rounds(find_method("local").recipe(), engine, rounds=4, per_round=2)
    begun: set[str] = set()
    for record, brief in zip(records, engine.heard, strict=True):
        asked = set(record.facts["clients"])
        for client in asked:
            first = all(brief.to(client).params[n].equal(t) for n, t in mean(start_of(SPEC)).items())
            assert first == (client not in begun)
        begun |= asked
    assert len(begun) > 2
    assert isinstance(records[-1].state.model, Apart)


def test_one_recipe_can_follow_another() -> None:
    recipe = find_method("fedavg").recipe().then(1, find_method("fedprox").recipe(mu=10.0))
    both = rounds(recipe, federation(), rounds=2)
    plain = rounds(find_method("fedavg").recipe(), federation(), rounds=2)
    assert all(mean(both[0].state)[n].equal(mean(plain[0].state)[n]) for n in mean(start_of(SPEC)))
    assert not all(mean(both[1].state)[n].equal(mean(plain[1].state)[n]) for n in mean(start_of(SPEC)))


def test_facts_of_a_round_do_not_leak_into_the_next() -> None:
    recipe = find_method("fednova").recipe().then(1, find_method("fedavg").recipe())
    records = rounds(recipe, federation(), rounds=2)
    assert "effective_steps" in records[0].state.facts
    assert not records[1].state.facts


def test_what_arrives_is_what_was_sent() -> None:
    came = federation().exchange(start_of(SPEC).brief(()), Work(BENCH.local), tuple(SIZES))
    sent = {e.client: as_bytes(e.payload) for e in came}
    record = rounds(Recipe(aggregate=Mean()), federation())[0]
    assert record.facts["bytes_up"] == sum(len(p) for p in sent.values() if isinstance(p, bytes))
    assert all(isinstance(p, bytes) and decode(p).header["num_examples"] == SIZES[c] for c, p in sent.items())


def test_what_a_client_says_of_itself_touches_nothing_of_ours() -> None:
    """Facts called `num_examples` and `own_accuracy` stood in the ledger in the place of ours."""
    said = {"num_examples": 1e9, "own_accuracy": 1.0, "loss": 0.5}
    network = start_of(SPEC).single
    update = update_of("c", network.posterior.mean, SPEC, 8.0, steps=3, facts=said)
    judge = Judge(Rows(torch.zeros(4, 3), torch.arange(4) % 2), 2, clients="every")
    told = judge.score(network, Admission(Cohort.of([update]), Spool(2**20)))["clients"]["c"]
    assert told == {"num_examples": 8.0, "steps": 3, "facts": said, "accuracy": 0.5}

"""Servers that train as a client, and servers that lend their rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fedfuse.core.inputs import InputForm
from fedfuse.core.model import Single
from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import find_method
from fedfuse.core.rows import Rows
from fedfuse.core.settings import LocalSettings
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench, ServerState
from fedfuse.engines.local import InProcess, Population
from fedfuse.engines.memo import Memo
from fedfuse.engines.pool import Pool
from fedfuse.errors import ConfigError, RecipeError
from fedfuse.nets.cost import pass_flops
from fedfuse.server.aggregate.mean import Mean
from fedfuse.server.loop import Record, RunPlan, run
from fedfuse.server.roster import ShareServerRows, WithServer

CLASSES = 3
SPEC = Spec("mlp", {"inputs": 4, "hidden": [5], "classes": CLASSES})
BENCH = Bench(classes=CLASSES, population=4, local=LocalSettings(batch_size=8, optimizer={"lr": 0.1}, epochs=2), seed=3)


def rows(n: int, seed: int) -> Rows:
    draw = torch.Generator().manual_seed(seed)
    return Rows(torch.randn(n, 4, generator=draw), torch.randint(CLASSES, (n,), generator=draw))


def people() -> Population:
    return Population.of({f"c{i}": rows(10 + i, i) for i in range(4)})


def start() -> ServerState:
    torch.manual_seed(0)
    return ServerState(0, Single.of(SPEC.build(), SPEC))


def federate(recipe: Recipe, server: Rows | None, rounds: int = 2, per_round: int | None = 2) -> list[Record]:
    population = people()
    plan = RunPlan(rounds, per_round, enrolled=population.sizes())
    return list(run(recipe, InProcess(population, seed=3), replace(BENCH, rows=server), None, start(), plan))


def weights(record: Record) -> dict[str, torch.Tensor]:
    return dict(record.state.single.posterior.mean)


def same(a: Record, b: Record) -> bool:
    return all(t.equal(weights(b)[n]) for n, t in weights(a).items())


def test_the_server_answers_in_every_round_beside_those_chosen() -> None:
    plain = federate(find_method("fedavg").recipe(), None)
    hybrid = federate(find_method("hybrid_fl").recipe(), rows(30, 9))
    for one, other in zip(plain, hybrid, strict=True):
        assert set(other.facts["clients"]) == {*one.facts["clients"], "server"}
        assert other.facts["clients"]["server"]["num_examples"] == 30
        assert not other.facts["refused"]
    assert not same(plain[-1], hybrid[-1])


def test_what_a_server_sends_itself_is_not_sent_and_its_work_is_its_own() -> None:
    plain = federate(find_method("fedavg").recipe(), None)
    known = replace(BENCH, rows=rows(30, 9), inputs=InputForm((4,)))
    engine, plan = InProcess(people(), seed=3), RunPlan(2, 2, enrolled=people().sizes())
    hybrid = list(run(find_method("hybrid_fl").recipe(), engine, known, None, start(), plan))
    for one, other in zip(plain, hybrid, strict=True):
        for key in ("bytes_up", "bytes_down"):
            assert other.facts[key] == pytest.approx(one.facts[key], rel=0.01), "headers differ by some names"
        passes = 2 * 30 * 3  # epochs, rows, and three passes of a row
        assert other.facts["server_flops"] == passes * pass_flops(SPEC, (4,))
        trained = sum(f["num_examples"] for c, f in other.facts["clients"].items() if c != "server")
        assert other.facts["flops"] == 2 * 3 * trained * pass_flops(SPEC, (4,))


def test_the_server_is_a_client_like_any_other() -> None:
    """Where everybody is asked, it does not matter whether a client lives in the engine or at the server."""
    everybody = {**{f"c{i}": rows(10 + i, i) for i in range(4)}, "server": rows(30, 9)}
    engine = InProcess(Population.of(everybody), seed=3)
    plan = RunPlan(1, enrolled={name: len(own) for name, own in everybody.items()})
    (plain,) = run(Recipe(aggregate=Mean()), engine, BENCH, None, start(), plan)
    (hybrid,) = federate(find_method("hybrid_fl").recipe(), rows(30, 9), rounds=1, per_round=None)
    assert same(plain, hybrid)


def test_a_client_may_not_bear_the_servers_name() -> None:
    engine = InProcess(Population.of({"server": rows(4, 0)}))
    with pytest.raises(ConfigError, match="a client is called 'server'.*rename the client"):
        WithServer()(engine, replace(BENCH, rows=rows(4, 1)))


@pytest.mark.parametrize("name", ["hybrid_fl", "data_sharing"])
def test_without_rows_they_say_so_before_training(name: str) -> None:
    with pytest.raises(RecipeError, match=f"recipe '{name}' learns on the server's own rows and there are none"):
        federate(find_method(name).recipe(), None)


def test_lent_rows_are_trained_on_and_counted() -> None:
    """As if every client had owned them from the start."""
    lent = rows(30, 9)
    own = people()
    merged = {
        c: Rows(torch.cat([r.x, lent.x]), torch.cat([r.y, lent.y])) for c in own.clients for r in [own.rows_of(c)]
    }
    engine = InProcess(Population.of(merged), seed=3)
    plain = list(run(Recipe(aggregate=Mean()), engine, BENCH, None, start(), RunPlan(2, 2)))
    shared = federate(find_method("data_sharing").recipe(), lent)
    assert same(plain[-1], shared[-1])
    assert not shared[0].facts["refused"]
    told = shared[0].facts
    assert told["reveals"] == ["30 labelled rows of the server, given to each of 4 clients"]
    assert told["bytes_down"] - shared[1].facts["bytes_down"] == 4 * (lent.x.nbytes + lent.y.nbytes)


def test_at_most_so_many_rows_are_lent_and_always_the_same() -> None:
    bench = replace(BENCH, rows=rows(30, 9))
    twice = [ShareServerRows(12)(InProcess(people()), bench) for _ in range(2)]
    assert [engine.terms.shared_rows for engine in twice] == [12, 12]
    assert twice[0].rows.x.equal(twice[1].rows.x)  # type: ignore[attr-defined]
    assert ShareServerRows(100)(InProcess(people()), bench).terms.shared_rows == 30
    assert find_method("data_sharing").recipe(most=12).reveals == (
        "up to 12 of the server's labelled rows, to every client",
    )


def test_rosters_stack() -> None:
    both = WithServer()(
        ShareServerRows()(InProcess(people()), replace(BENCH, rows=rows(6, 9))), replace(BENCH, rows=rows(6, 9))
    )
    terms = both.terms
    assert (terms.always, terms.shared_rows) == (("server",), 6)
    assert terms.claimable_examples({"c0": 10}) == {"c0": 16}


def test_a_liar_is_still_refused_above_what_it_owns_and_was_lent() -> None:
    population = people()
    plan = RunPlan(1, enrolled={**population.sizes(), "c1": 5})
    bench = replace(BENCH, rows=rows(30, 9))
    (record,) = run(find_method("data_sharing").recipe(), InProcess(population), bench, None, start(), plan)
    assert [r["client"] for r in record.facts["refused"]] == ["c1"]


def test_workers_and_the_memo_see_lent_rows_too(tmp_path_factory: pytest.TempPathFactory) -> None:
    bench, memo = replace(BENCH, rows=rows(30, 9)), Memo(tmp_path_factory.mktemp("memo"))
    ends = []
    with Pool(workers=0) as pool:
        for _ in range(2):
            engine = memo.wrap(pool.engine(people(), seed=3))
            ends += list(run(find_method("data_sharing").recipe(), engine, bench, None, start(), RunPlan(1)))
    assert ends[1].facts["remembered"] == 4
    assert same(ends[0], ends[1])

from __future__ import annotations

import gc
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import odd_parts
import pytest
import torch
from torch import nn

from builders import as_bytes, ask, initial, payloads
from fedfuse.core.messages import Brief, Envelope, Start
from fedfuse.core.model import Single
from fedfuse.core.posterior import Posterior
from fedfuse.core.recipe import Recipe
from fedfuse.core.seams import Work
from fedfuse.core.settings import LocalSettings
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench, ServerState
from fedfuse.engines import pool as pool_module
from fedfuse.engines.local import InProcess, LocalEngine, Population
from fedfuse.engines.pool import Pool
from fedfuse.engines.starting import main_if_a_file
from fedfuse.errors import ConfigError, FuseError
from fedfuse.methods.fedavg import fedavg
from fedfuse.methods.fedprox import fedprox
from fedfuse.methods.moon import moon
from fedfuse.methods.scaffold import scaffold
from fedfuse.server.loop import RunPlan, run
from fedfuse.wire.codec import decode


def is_alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def after_rounds(recipe: Recipe, engine: LocalEngine, brief: Brief) -> ServerState:
    start = ServerState(0, Single(brief.spec, Posterior(brief.params)))
    bench = Bench(population=len(engine.clients), classes=3, local=LocalSettings(batch_size=5, optimizer={"lr": 0.1}))
    return list(run(recipe, engine, bench, None, start, RunPlan(rounds=3, per_round=4)))[-1].state


@pytest.mark.parametrize("make", [fedavg, fedprox, scaffold, moon])
def test_the_number_of_workers_does_not_reach_the_bits(
    make: object, pool: Pool, population: Population, brief: Brief
) -> None:
    recipe = make()
    alone = InProcess(population, seed=2)
    apart = pool.engine(population, seed=2)
    one, two = after_rounds(recipe, alone, brief), after_rounds(recipe, apart, brief)
    assert all(torch.equal(t, two.single.posterior.mean[n]) for n, t in one.single.posterior.mean.items())
    assert {c: {n: t.tolist() for n, t in m.items()} for c, m in alone.memories.items()} == {
        c: {n: t.tolist() for n, t in apart.memories[c].items()} for c in alone.memories
    }


def test_one_worker_takes_the_longest_client_first_and_gives_the_same_bytes(
    population: Population, brief: Brief, work: Work
) -> None:
    order: list[str] = []
    with Pool(workers=1) as single:
        engine = single.engine(population, seed=5, on_client=lambda client, *_: order.append(client))
        assert payloads(engine, brief, work) == payloads(InProcess(population, seed=5), brief, work)
    assert order == ["site-3", "site-2", "site-11", "site-1", "site-10"]


def test_no_workers_means_this_process(population: Population) -> None:
    with Pool(workers=0) as pool:
        assert isinstance(pool.engine(population), InProcess)
    assert Pool().workers >= 1
    for wrong in (-1, 1.5, True, "two"):
        with pytest.raises(ConfigError, match="whole number"):
            Pool(workers=wrong)  # type: ignore[arg-type]


def test_workers_live_on_from_run_to_run_with_one_thread_each(
    pool: Pool, population: Population, brief: Brief, work: Work
) -> None:
    work = replace(work, evidence=(odd_parts.Whereabouts(),))
    other = Population(population.rows, {"x": torch.arange(9), "y": torch.arange(9, 12)})

    def pids(people: Population, seed: int) -> set[int]:
        seen = [
            decode(p).tensors["~where/pid"].tolist() for p in payloads(pool.engine(people, seed), brief, work).values()
        ]
        assert {threads for _, threads in seen} == {1}
        return {pid for pid, _ in seen}

    first = pids(population, 0)
    assert pids(other, 1) | pids(population, 2) <= first
    assert os.getpid() not in first
    assert len(first) == 2


def test_clients_that_start_elsewhere_get_their_own_network(
    pool: Pool, population: Population, brief: Brief, work: Work
) -> None:
    small = Spec("mlp", {"inputs": 64, "hidden": [4], "classes": 3})
    mine = Start(small, initial(small))
    brief = replace(brief, own={"site-2": mine, "site-10": mine})
    got = payloads(pool.engine(population), brief, work)
    assert got == payloads(InProcess(population), brief, work)
    assert decode(got["site-2"]).tensors.keys() == mine.params.keys()


def test_a_users_network_reaches_the_workers_as_it_is(pool: Pool, population: Population, work: Work) -> None:
    spec = Spec.of(odd_parts.Net(width=7, dropout=0.25))
    brief = Brief(0, spec, initial(spec), classes=3)
    assert payloads(pool.engine(population), brief, work) == payloads(InProcess(population), brief, work)


def test_what_a_worker_cannot_import_is_one_sentence(
    pool: Pool, population: Population, brief: Brief, work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = type("Gone", (nn.Linear,), {"__module__": "odd_parts", "__qualname__": "Gone"})
    monkeypatch.setattr(odd_parts, "Gone", gone, raising=False)  # here it can be imported, there it cannot
    spec = Spec.of(gone(3, 3))
    with pytest.raises(ConfigError, match="Gone.*workers=0"):
        ask(pool.engine(population), Brief(0, spec, initial(spec)), work)
    assert all(e.payload for e in ask(pool.engine(population), brief, work).values())  # the pool goes on


def test_what_cannot_be_pickled_is_one_sentence(pool: Pool, population: Population, brief: Brief, work: Work) -> None:
    nameless = replace(work, objective=lambda local, batch: local.predict(batch[0]).sum())
    with pytest.raises(ConfigError, match="sent .*workers=0"):
        ask(pool.engine(population), brief, nameless)
    assert all(e.payload for e in ask(pool.engine(population), brief, work).values())


def test_one_clients_failure_drops_it_and_no_other(
    pool: Pool, population: Population, brief: Brief, work: Work
) -> None:
    spoiled = replace(work, objective=odd_parts.Spoiled("site-2", RuntimeError))
    got = ask(pool.engine(population), brief, spoiled)
    assert got["site-2"].dropped == "RuntimeError: site-2 will not"
    assert {c: as_bytes(e.payload) for c, e in got.items()} == payloads(InProcess(population), brief, spoiled)


def test_what_the_user_asked_wrongly_is_the_same_error_here(
    pool: Pool, population: Population, brief: Brief, work: Work
) -> None:
    with pytest.raises(ConfigError, match=r"^site-2 will not$"):
        ask(pool.engine(population), brief, replace(work, objective=odd_parts.Spoiled("site-2", ConfigError)))
    assert all(e.payload for e in ask(pool.engine(population), brief, work).values())


def test_a_client_whose_worker_is_killed_is_tried_once_more(
    pool: Pool, population: Population, brief: Brief, work: Work, tmp_path: Path
) -> None:
    work = replace(work, settings=work.settings.model_copy(update={"kernel": "torch"}))  # which any objective has
    got = payloads(pool.engine(population), brief, replace(work, objective=odd_parts.Deadly("site-11", tmp_path, 1)))
    assert len(list(tmp_path.iterdir())) == 1
    assert got == payloads(InProcess(population), brief, work)


def test_a_client_whose_worker_is_killed_twice_is_dropped(
    pool: Pool, population: Population, brief: Brief, work: Work, tmp_path: Path
) -> None:
    work = replace(work, settings=work.settings.model_copy(update={"kernel": "torch"}))  # which any objective has
    got = ask(pool.engine(population), brief, replace(work, objective=odd_parts.Deadly("site-11", tmp_path, 9)))
    assert len(list(tmp_path.iterdir())) == 2
    assert got["site-11"] == Envelope("site-11", None, dropped="its worker died twice")
    good = payloads(InProcess(population), brief, work)
    assert {c: as_bytes(e.payload) for c, e in got.items()} == good | {"site-11": None}


def test_a_worker_killed_while_idle_is_replaced(pool: Pool, population: Population, brief: Brief, work: Work) -> None:
    ask(pool.engine(population), brief, work)
    for worker in pool._running:
        worker.process.kill()
        worker.process.join()
    assert payloads(pool.engine(population), brief, work) == payloads(InProcess(population), brief, work)


@pytest.mark.parametrize("how", ["close", "throw", "forget"])
def test_leaving_early_ends_the_work_at_once(
    how: str, pool: Pool, population: Population, brief: Brief, work: Work, tmp_path: Path
) -> None:
    ask(pool.engine(population), brief, work)  # both workers are up
    pids = [worker.process.pid for worker in pool._running]
    slow = odd_parts.Spoiled("site-3", RuntimeError, base=odd_parts.Slow(60.0, tmp_path))
    envelopes = pool.engine(population).exchange(brief, replace(work, objective=slow), population.clients)
    assert next(envelopes).client == "site-3"  # it fails at once, and both workers are busy with others
    began = time.perf_counter()
    if how == "close":
        envelopes.close()  # type: ignore[attr-defined]
    elif how == "throw":
        with pytest.raises(KeyboardInterrupt):
            envelopes.throw(KeyboardInterrupt)  # type: ignore[attr-defined]
    else:
        del envelopes
        gc.collect()
    assert time.perf_counter() - began < 30  # of the sixty that the clients would take, on a busy machine too
    assert not any(is_alive(pid) for pid in pids if pid)
    assert all(e.payload for e in ask(pool.engine(population), brief, work).values())


def test_one_exchange_at_a_time(pool: Pool, population: Population, brief: Brief, work: Work) -> None:
    first = pool.engine(population).exchange(brief, work, population.clients)
    next(first)
    with pytest.raises(FuseError, match="another exchange"):
        ask(pool.engine(population), brief, work)
    assert len(list(first)) == len(population.clients) - 1


def test_a_closed_pool_leaves_nothing(population: Population, brief: Brief, work: Work) -> None:
    with Pool(workers=1) as pool:
        engine = pool.engine(population)
        ask(engine, brief, work)
        pids = [worker.process.pid for worker in pool._running]
        mapped = pool.share_rows(population.rows)
        assert Path(mapped.x).exists()
        assert all(is_alive(pid) for pid in pids if pid)
    assert not Path(mapped.x).exists()
    assert not any(is_alive(pid) for pid in pids if pid)
    pool.close()
    with pytest.raises(FuseError, match="closed"):
        ask(engine, brief, work)


def test_a_forgotten_pool_leaves_nothing(population: Population, brief: Brief, work: Work) -> None:
    pool = Pool(workers=1)
    ask(pool.engine(population), brief, work)
    pids, mapped = [worker.process.pid for worker in pool._running], pool.share_rows(population.rows)
    del pool
    gc.collect()
    assert not Path(mapped.x).exists()
    assert not any(is_alive(pid) for pid in pids if pid)


def test_workers_that_do_not_start_are_one_sentence(
    population: Population, brief: Brief, work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "serve", odd_parts.stillborn)
    with Pool(workers=2) as pool, pytest.raises(FuseError, match="start .* workers=0"):
        ask(pool.engine(population), brief, work)


def test_an_empty_client_is_the_users_to_mend(pool: Pool, population: Population, brief: Brief, work: Work) -> None:
    empty = Population(population.rows, {**population.index, "nobody": torch.tensor([], dtype=torch.int64)})
    with pytest.raises(ConfigError, match="^nobody"):
        ask(pool.engine(empty), brief, work)


def test_a_main_module_without_a_file_is_not_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    main = sys.modules["__main__"]
    monkeypatch.setattr(main, "__file__", "<stdin>", raising=False)
    with main_if_a_file():
        assert not hasattr(main, "__file__")
    assert main.__file__ == "<stdin>"
    monkeypatch.setattr(main, "__file__", __file__)
    with main_if_a_file():
        assert main.__file__ == __file__

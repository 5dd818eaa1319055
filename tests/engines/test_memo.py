from __future__ import annotations

import logging
import multiprocessing
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import odd_parts
import pytest
import torch

from builders import as_bytes, ask, initial
from fedfuse.client.class_sums import LabelCounts
from fedfuse.core.messages import Brief, Envelope
from fedfuse.core.recipe import Recipe
from fedfuse.core.seams import Work
from fedfuse.core.settings import Decay
from fedfuse.core.spec import Spec
from fedfuse.engines.local import InProcess, LocalEngine, Population
from fedfuse.engines.memo import Memo, MemoEntry, without_evidence
from fedfuse.engines.pool import Pool
from fedfuse.errors import ConfigError
from fedfuse.methods.fedavg import fedavg
from fedfuse.methods.fednova import fednova
from fedfuse.methods.moon import moon
from fedfuse.methods.scaffold import ControlDelta, scaffold


@pytest.fixture
def memo(tmp_path: Path) -> Memo:
    return Memo(tmp_path / "memo")


def payloads(got: dict[str, Envelope]) -> dict[str, object]:
    return {client: as_bytes(e.payload) for client, e in got.items()}


def trained(got: dict[str, Envelope]) -> int:
    return sum(e.payload is not None and not e.remembered for e in got.values())


def listed(memories: dict[str, dict[str, torch.Tensor]]) -> dict[str, dict[str, list[float]]]:
    return {c: {n: t.tolist() for n, t in kept.items()} for c, kept in memories.items()}


def work_of(recipe: Recipe, work: Work) -> Work:
    return recipe.work(work.settings)


@pytest.mark.parametrize("make", [fedavg, scaffold, moon])
@pytest.mark.parametrize("where", ["here", "pool"])
def test_a_memo_changes_no_bit(
    make: Callable[[], Recipe],
    where: str,
    memo: Memo,
    pool: Pool,
    population: Population,
    brief: Brief,
    work: Work,
) -> None:
    def engine() -> LocalEngine:
        return pool.engine(population) if where == "pool" else InProcess(population)

    work, plain = work_of(make(), work), InProcess(population)
    for expected in (len(plain.clients), 0):  # the first run trains, the second remembers
        watched, plain.memories = memo.wrap(engine()), {}
        for round_ in range(2):
            now = replace(brief, round=round_)
            got = ask(watched, now, work)
            assert payloads(got) == payloads(ask(plain, now, work))
            assert trained(got) == expected
        assert listed(watched.memories) == listed(plain.memories)


def test_train_once_fuse_many(memo: Memo, population: Population, brief: Brief, work: Work) -> None:
    engines = {make.__name__: memo.wrap(InProcess(population)) for make in (fedavg, fednova, scaffold)}
    counts = {n: trained(ask(e, brief, work_of(globals()[n](), work))) for n, e in engines.items()}
    assert counts == {"fedavg": 5, "fednova": 0, "scaffold": 5}  # SCAFFOLD trains another objective


@pytest.mark.parametrize("evidence", [(LabelCounts(),), (ControlDelta(),), (LabelCounts(), ControlDelta())])
def test_evidence_is_brought_to_a_known_training(
    evidence: tuple[object, ...], memo: Memo, pool: Pool, population: Population, brief: Brief, work: Work
) -> None:
    ask(memo.wrap(InProcess(population)), brief, work)
    more = replace(work, evidence=evidence)
    plain = InProcess(population)
    expected = payloads(ask(plain, brief, more))
    for engine in (InProcess(population), pool.engine(population), InProcess(population)):
        later = memo.wrap(engine)
        got = ask(later, brief, more)
        assert trained(got) == 0
        assert payloads(got) == expected
        assert listed(later.memories) == listed(plain.memories)


def test_a_training_with_evidence_is_a_training(memo: Memo, population: Population, brief: Brief, work: Work) -> None:
    counted = ask(memo.wrap(InProcess(population)), brief, replace(work, evidence=(LabelCounts(), ControlDelta())))
    plain = payloads(ask(InProcess(population), brief, work))
    assert {c: without_evidence(as_bytes(e.payload)) for c, e in counted.items()} == plain
    got = ask(memo.wrap(InProcess(population)), brief, work)
    assert trained(got) == 0
    assert payloads(got) == plain


def test_a_rate_that_the_reply_does_not_tell_is_not_guessed(
    memo: Memo, population: Population, brief: Brief, work: Work
) -> None:
    cut = work.settings.model_copy(update={"max_steps": 2, "decay": Decay(gamma=0.5, every=1)})
    ask(memo.wrap(InProcess(population)), brief, replace(work, settings=cut))
    more = replace(work, settings=cut, evidence=(odd_parts.LastRate(),))
    got = ask(memo.wrap(InProcess(population)), brief, more)
    assert payloads(got) == payloads(ask(InProcess(population), brief, more))


def test_who_watches_hears_of_remembered_clients_too(
    memo: Memo, population: Population, brief: Brief, work: Work
) -> None:
    seen: list[tuple[str, bool]] = []
    for _ in range(2):
        engine = InProcess(population, on_client=lambda client, _, known: seen.append((client, known)))
        ask(memo.wrap(engine), brief, work)
    assert seen == [(c, known) for known in (False, True) for c in population.clients]


@pytest.mark.parametrize("odd", ["lambda", "prototype", "failure"])
def test_what_has_no_name_or_no_reply_is_not_kept(
    odd: str, memo: Memo, population: Population, brief: Brief, work: Work
) -> None:
    if odd == "lambda":
        work = replace(work, objective=lambda local, batch: local.predict(batch[0]).square().mean())
    elif odd == "prototype":
        spec = Spec.of(odd_parts.Net())
        brief = Brief(0, spec, initial(spec), classes=3)
    else:
        work = replace(work, objective=lambda local, batch: 1 / 0)
    for _ in range(2):
        got = ask(memo.wrap(InProcess(population)), brief, work)
        assert not any(e.remembered for e in got.values())
    assert memo.size() == 0


def entries(memo: Memo) -> list[Path]:
    return sorted(memo.folder.glob("*/*.safetensors"))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 1  # the last number of the reply
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def swap(path: Path) -> None:
    """Another program's file, sound as such."""
    path.write_bytes(Spec("mlp").to_text().encode())


@pytest.mark.parametrize("damage", [flip, truncate, empty, swap])
def test_a_damaged_entry_is_trained_anew_and_mended(
    damage: Callable[[Path], None], memo: Memo, population: Population, brief: Brief, work: Work
) -> None:
    good = payloads(ask(memo.wrap(InProcess(population)), brief, work))
    sound = {path: path.read_bytes() for path in entries(memo)}
    for path in entries(memo)[:2]:
        damage(path)
    got = ask(memo.wrap(InProcess(population)), brief, work)
    assert trained(got) == 2
    assert payloads(got) == good
    assert {path: path.read_bytes() for path in entries(memo)} == sound


def test_an_entry_removed_by_another_run_is_trained_anew(
    memo: Memo, population: Population, brief: Brief, work: Work
) -> None:
    ask(memo.wrap(InProcess(population)), brief, work)
    entries(memo)[0].unlink()
    assert trained(ask(memo.wrap(InProcess(population)), brief, work)) == 1


def test_two_processes_share_one_store(memo: Memo, tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    runs = [context.Process(target=odd_parts.share, args=(memo.folder, tmp_path / f"run-{i}")) for i in range(2)]
    for run in runs:
        run.start()
    for run in runs:
        run.join(60)
        assert run.exitcode == 0
        run.close()
    replies = [{p.name: p.read_bytes() for p in (tmp_path / f"run-{i}").iterdir()} for i in range(2)]
    assert replies[0] == replies[1]
    assert len(replies[0]) == 5
    assert all(memo.find(path.stem) for path in entries(memo))
    assert len(entries(memo)) == 5
    assert not list(memo.folder.glob("*/.*"))


def test_the_least_recently_used_go_first(tmp_path: Path) -> None:
    memo = Memo(tmp_path, limit=5000)
    keys = [f"{i:02x}" * 4 for i in range(4)]
    for age, key in enumerate(keys):
        memo.keep(key, MemoEntry(bytes([age]) * 1000))
        os.utime(memo._path(key), (time.time() - 100 + age,) * 2)
    assert memo.find(keys[0])  # used just now, so the second is the oldest
    memo.keep("ff" * 4, MemoEntry(b"x" * 1000))
    assert memo.size() <= 5000
    assert memo.find(keys[1]) is None
    assert memo.find(keys[0])
    assert memo.find("ff" * 4)


def test_a_store_counts_what_it_finds_and_what_others_write(tmp_path: Path) -> None:
    Memo(tmp_path).keep("aa11", MemoEntry(b"x" * 3000))
    memo = Memo(tmp_path, limit=7000)
    Memo(tmp_path).keep("bb22", MemoEntry(b"x" * 3000))
    assert memo.size() == sum(p.stat().st_size for p in entries(memo))
    memo.keep("cc33", MemoEntry(b"x" * 3000))
    assert memo.size() <= 7000
    assert memo.find("cc33")


def test_what_a_killed_writer_left_goes_after_a_day(memo: Memo) -> None:
    memo.keep("aa11", MemoEntry(b"reply", b"memory"))
    old, new = (memo.folder / "aa" / f".aa11.safetensors.{n}" for n in ("old", "new"))
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (0, 0))
    assert memo.size() > 0
    assert not old.exists()
    assert new.exists()
    assert memo.find("aa11") == MemoEntry(b"reply", b"memory")


def test_a_store_that_fails_ends_no_run(
    memo: Memo, population: Population, brief: Brief, work: Work, caplog: pytest.LogCaptureFixture
) -> None:
    memo.folder.rmdir()
    memo.folder.write_text("in the way")
    with caplog.at_level(logging.WARNING):
        got = ask(memo.wrap(InProcess(population)), brief, work)
    assert trained(got) == 5
    assert "was not kept" in caplog.text


def test_a_folder_that_cannot_be_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="memo .*folder"):
        Memo(tmp_path / "file" / "memo")


def test_memories_can_be_put_back(memo: Memo, population: Population, brief: Brief, work: Work) -> None:
    moving = work_of(scaffold(), work)
    engine = memo.wrap(InProcess(population))
    ask(engine, brief, moving)
    saved = dict(engine.memories)
    second = payloads(ask(engine, replace(brief, round=1), moving))
    again = memo.wrap(InProcess(population))
    again.memories = saved
    got = ask(again, replace(brief, round=1), moving)
    assert payloads(got) == second
    assert trained(got) == 0

"""Workers asked about rows give the bits that this process would have given."""

from __future__ import annotations

from collections.abc import Callable

import odd_parts
import pytest
import torch
from torch import Tensor

import builders
from fedfuse.core.messages import Brief
from fedfuse.core.model import Answering, Single
from fedfuse.core.rows import Rows
from fedfuse.core.seams import Work
from fedfuse.core.spec import Spec
from fedfuse.engines.local import Population
from fedfuse.engines.pool import Pool, WorkersAnswer
from fedfuse.nets.mixture import Mixture, TopLogit
from fedfuse.server.judge import Judge, ask_here, each_draw, logits_of

CHAIN = {"size": 8, "classes": 3, "maps": [2, 3], "hidden": [6]}


@pytest.fixture
def awake(pool: Pool, population: Population, brief: Brief, work: Work) -> Pool:
    """A pool whose workers have trained something."""
    list(pool.engine(population).exchange(brief, work, population.clients))
    assert pool.is_awake
    return pool


@pytest.fixture
def rows() -> Rows:
    return builders.rows(53, 1, 8, 8, seed=4)


def network(seed: int, spec: Spec | None = None) -> Single:
    return builders.start_of(spec or Spec("lenet", CHAIN), seed=seed).single


def mixture(_: int) -> Answering:
    other = Spec("mlp", {"inputs": 64, "hidden": [4], "classes": 3})
    return Mixture((network(0), network(1), network(2, other)), torch.ones(3), TopLogit(1))


def bayesian(seed: int) -> Answering:
    return network(seed, Spec("bayesian", {"of": {"factory": "lenet", "options": CHAIN}, "draws": 4}))


@pytest.mark.parametrize("make", [network, mixture, bayesian])
@pytest.mark.parametrize("models", [1, 3])
def test_who_asks_does_not_reach_the_bits(
    make: Callable[[int], Answering], models: int, awake: Pool, rows: Rows
) -> None:
    asked = [make(seed) for seed in range(models)]
    here, there = ask_here(each_draw, asked, rows, 8), WorkersAnswer(awake)(each_draw, asked, rows, 8)
    assert all(torch.equal(one, two) for one, two in zip(here, there, strict=True))
    assert here[0].shape[1:] == (53, 3)


def test_the_workers_do_it_all_of_them(awake: Pool, rows: Rows) -> None:
    [pids] = WorkersAnswer(awake)(odd_parts.process_id, [None], rows, 8)
    assert len(pids.unique()) == 2
    assert odd_parts.os.getpid() not in pids


def test_workers_are_not_started_for_it(rows: Rows) -> None:
    with Pool(workers=2) as asleep:
        [pids] = WorkersAnswer(asleep)(odd_parts.process_id, [None], rows, 8)
        assert pids.unique().tolist() == [odd_parts.os.getpid()]
        assert not asleep.is_awake


def test_a_network_that_fails_in_a_worker_fails_here(awake: Pool, rows: Rows) -> None:
    wrong = network(0, Spec("mlp", {"inputs": 9, "hidden": [4], "classes": 3}))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        WorkersAnswer(awake)(logits_of, [wrong], rows, 8)
    assert WorkersAnswer(awake)(logits_of, [network(0)], rows, 8)[0].shape == (1, 53, 3)


def test_what_cannot_be_sent_is_asked_here(awake: Pool, rows: Rows) -> None:
    [pids] = WorkersAnswer(awake)(lambda model, x: odd_parts.process_id(model, x), [None], rows, 8)
    assert pids.unique().tolist() == [odd_parts.os.getpid()]


def test_nobody_and_nothing(awake: Pool, rows: Rows) -> None:
    assert WorkersAnswer(awake)(logits_of, [], rows, 8) == []
    assert WorkersAnswer(awake)(logits_of, [network(0)], rows.take(torch.arange(3)), 8)[0].shape == (1, 3, 3)


def test_a_judge_scores_clients_through_it(rows: Rows) -> None:
    asked: list[int] = []

    def count(ask: object, models: list[Answering], about: Rows, batch: int) -> list[Tensor]:
        asked.append(len(models))
        return ask_here(ask, models, about, batch)  # type: ignore[arg-type]

    judge = Judge(rows, 3, ask=count)
    assert judge.evaluate(network(0)) == Judge(rows, 3).evaluate(network(0))
    assert asked == [1]

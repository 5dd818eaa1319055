"""Whom others cover: greedy covers against brute force, by classes and by answers."""

from __future__ import annotations

import itertools

import pytest
import torch

from fedfuse.core.inputs import InputForm
from fedfuse.core.messages import ClientUpdate, Cohort
from fedfuse.core.model import Single
from fedfuse.core.posterior import Posterior
from fedfuse.core.rows import Rows
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench
from fedfuse.nets.forward import AtLayer
from fedfuse.nets.mixture import Mixture, TopLogit
from fedfuse.server.aggregate.ensemble import CoverAnswers, CoverClasses, select_greedily

SPEC = Spec("mlp", {"inputs": 4, "hidden": [], "classes": 3})


def client(name: str, weight: torch.Tensor, counts: list[int] | None = None) -> ClientUpdate:
    mean = {"classifier.weight": weight, "classifier.bias": torch.zeros(3)}
    notes = {"counts/labels": torch.tensor(counts)} if counts else {}
    return ClientUpdate(name, Posterior(mean), 1.0, 1, SPEC, notes)


def mixture(cohort: Cohort, rule: TopLogit | AtLayer) -> Mixture:
    members = tuple(Single(u.spec, u.posterior) for u in cohort)
    return Mixture(members, torch.full((len(members),), 1 / len(members)), rule)


def test_greedy_adds_the_best_and_stops_when_it_is_enough() -> None:
    worth = {0: 0.2, 1: 0.5, 2: 0.3}
    kept = select_greedily(3, lambda chosen: sum(worth[i] for i in chosen), 0.7)
    assert kept.indices == [1, 2]
    assert kept.covered == pytest.approx([0.5, 0.8])
    everybody = select_greedily(3, lambda chosen: 0.0, 0.7)
    assert everybody.indices == [0, 1, 2], "who cannot be covered is kept"
    assert select_greedily(2, lambda chosen: 1.0, 1.0).indices == [0], "the first of equals"


def test_a_greedy_cover_is_near_the_best_one() -> None:
    """The score is submodular, so greedy reaches at least 1 − 1/e of the best set of its size."""
    draw = torch.Generator().manual_seed(0)
    for _ in range(20):
        counts = torch.randint(0, 50, (6, 5), generator=draw)
        cohort = Cohort.of([client(f"c{i}", torch.zeros(3, 4), row) for i, row in enumerate(counts.tolist())])
        kept = CoverClasses(1.0)(cohort, mixture(cohort, TopLogit(1)), Bench())
        held = counts[:, counts.amax(0) > 0].double()
        parts = held / held.amax(0)
        for size, covered in enumerate(kept.covered, 1):
            best = max(float(parts[list(s)].amax(0).mean()) for s in itertools.combinations(range(6), size))
            assert covered >= (1 - 1 / 2.718281828) * best
        assert kept.covered[-1] == pytest.approx(1.0)
        assert kept.covered == sorted(kept.covered)


def test_classes_nobody_holds_do_not_count() -> None:
    cohort = Cohort.of([client("a", torch.zeros(3, 4), [5, 0, 0]), client("b", torch.zeros(3, 4), [0, 7, 0])])
    kept = CoverClasses(0.9)(cohort, mixture(cohort, TopLogit(1)), Bench())
    assert kept.indices == [0, 1]
    assert kept.covered == [0.5, 1.0]


@pytest.mark.parametrize("rule", [TopLogit(1, scale=(1.0, 2.0, 1.0, 3.0)), TopLogit("all"), AtLayer(1)])
def test_those_kept_answer_as_everybody_would(rule: TopLogit | AtLayer) -> None:
    torch.manual_seed(2)
    cohort = Cohort.of([client(f"c{i}", torch.randn(3, 4) * (1 + 2 * (i == 1))) for i in range(4)])
    everybody = mixture(cohort, rule)
    rows = Rows(torch.randn(300, 4), torch.zeros(300, dtype=torch.int64))
    kept = CoverAnswers(0.9)(cohort, everybody, Bench(rows=rows))
    few = Mixture(
        tuple(everybody.members[i] for i in kept.indices),
        everybody.weights[kept.indices],
        rule
        if isinstance(rule, AtLayer)
        else TopLogit(rule.k, (), tuple(rule.scale[i] for i in kept.indices if rule.scale)),
    )
    same = few.logits(rows.x).argmax(-1) == everybody.logits(rows.x).argmax(-1)
    assert float(same.double().mean()) == pytest.approx(kept.covered[-1])
    assert kept.covered[-1] >= 0.9 or len(kept.indices) == 4


def test_a_twin_is_left_out() -> None:
    torch.manual_seed(0)
    one, other = torch.randn(3, 4), torch.randn(3, 4)
    cohort = Cohort.of([client("a", one), client("b", other), client("c", one.clone())])
    rows = Rows(torch.randn(200, 4), torch.zeros(200, dtype=torch.int64))
    kept = CoverAnswers(1.0)(cohort, mixture(cohort, TopLogit(1)), Bench(rows=rows))
    assert kept.indices == [0, 1]
    assert kept.covered[-1] == 1.0


def test_without_rows_the_networks_show_what_they_know() -> None:
    torch.manual_seed(0)
    cohort = Cohort.of([client(f"c{i}", torch.randn(3, 4)) for i in range(3)])
    kept = CoverAnswers(0.99, count=30)(cohort, mixture(cohort, TopLogit(1)), Bench(inputs=InputForm((4,))))
    assert kept.covered[-1] >= 0.99

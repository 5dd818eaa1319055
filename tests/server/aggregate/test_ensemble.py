"""Keeping networks: who answers, how they are calibrated, which of them cover the others, and what it costs."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from fedfuse.core.inputs import InputForm
from fedfuse.core.messages import ClientUpdate, Cohort
from fedfuse.core.model import Single
from fedfuse.core.posterior import Posterior
from fedfuse.core.recipe import Recipe
from fedfuse.core.rows import Rows
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench, ServerState
from fedfuse.errors import ConfigError, RecipeError
from fedfuse.nets.forward import AtLayer
from fedfuse.nets.mixture import ClassShares, MeanProbability, Mixture, OpenSetVote, TopLogit, calibration
from fedfuse.server.aggregate.ensemble import CoverAnswers, CoverClasses, KeepAll, select_greedily
from fedfuse.server.guards import Krum

SHALLOW = Spec("mlp", {"inputs": 6, "hidden": [5], "classes": 3})
DEEP = Spec("mlp", {"inputs": 6, "hidden": [5, 5, 5], "classes": 3})
BENCH = Bench(inputs=InputForm((6,)), classes=3)


def update(client: str, spec: Spec = SHALLOW, num_examples: float = 1.0, **notes: Tensor) -> ClientUpdate:
    torch.manual_seed(sum(map(ord, client)))
    named = {n.replace("__", "/"): t for n, t in notes.items()}
    return ClientUpdate(client, Posterior(spec.build().state_dict()), num_examples, 1, spec, named)


def state(spec: Spec = SHALLOW) -> ServerState:
    torch.manual_seed(0)
    return ServerState(0, Single.of(spec.build(), spec))


def kept(rule: KeepAll, cohort: Cohort, bench: Bench = BENCH) -> tuple[Mixture, ServerState]:
    after = rule(cohort, state(), bench)
    assert isinstance(after.model, Mixture)
    return after.model, after


def test_every_network_is_kept_with_tensors_of_its_own() -> None:
    cohort = Cohort.of([update("b", DEEP, 3.0), update("a")])
    mixture, after = kept(KeepAll(), cohort)
    assert [m.spec for m in mixture.members] == [SHALLOW, DEEP]
    assert mixture.weights.tolist() == [0.5, 0.5]
    assert mixture.combine == MeanProbability()
    x = torch.randn(4, 6)
    before = mixture.logits(x)
    cohort.updates[0].posterior.mean["fc1.weight"].zero_()
    assert mixture.logits(x).equal(before)
    assert after.start.spec == SHALLOW, "clients would begin where they began"
    assert kept(KeepAll(weights="examples"), cohort)[0].weights.tolist() == [0.25, 0.75]


def test_client_calibration_is_what_clients_brought() -> None:
    numbers = {"a": (1.0, 2.0), "b": (-3.0, 0.5)}
    cohort = Cohort.of(
        [
            update(c, logit_scale__shift=torch.tensor(s), logit_scale__scale=torch.tensor(v))
            for c, (s, v) in numbers.items()
        ]
    )
    rule = KeepAll(TopLogit(1), calibrate="zscore")
    assert rule.needs == {"logit_scale", "network"}
    assert kept(rule, cohort)[0].combine == TopLogit(1, shift=(1.0, -3.0), scale=(2.0, 0.5))


@pytest.mark.parametrize("kind", ["temperature", "zscore"])
def test_server_calibration_is_fitted_on_server_rows(kind: str) -> None:
    torch.manual_seed(3)
    rows = Rows(torch.randn(50, 6), torch.randint(3, (50,)))
    cohort = Cohort.of([update("a"), update("b", DEEP)])
    rule = KeepAll(TopLogit("all"), calibrate=kind, fitted="server")  # type: ignore[arg-type]
    assert rule.needs == {"server_rows", "network"}
    mixture, _ = kept(rule, cohort, replace(BENCH, rows=rows))
    expected = [calibration(kind, m.logits(rows.x), rows.y) for m in mixture.members]  # type: ignore[arg-type]
    assert isinstance(mixture.combine, TopLogit)
    assert mixture.combine.scale == pytest.approx([e.scale for e in expected], rel=1e-6)
    assert mixture.combine.shift == pytest.approx([e.shift for e in expected], abs=1e-6)


def test_covered_clients_are_left_out_with_their_numbers() -> None:
    counts = {"a": [9, 0, 0], "b": [9, 9, 0], "c": [0, 0, 9], "d": [3, 3, 3]}
    cohort = Cohort.of(
        [
            update(
                c,
                counts__labels=torch.tensor(n),
                logit_scale__shift=torch.tensor(float(i)),
                logit_scale__scale=torch.tensor(1.0 + i),
            )
            for i, (c, n) in enumerate(counts.items())
        ]
    )
    rule = KeepAll(TopLogit(1), cover=CoverClasses(1.0), calibrate="zscore")
    assert rule.needs == {"logit_scale", "counts", "network"}
    mixture, after = kept(rule, cohort)
    assert after.facts["kept"] == ["b", "c"]
    assert after.facts["covered"] == pytest.approx([2 / 3, 1.0])
    assert mixture.combine == TopLogit(1, shift=(1.0, 2.0), scale=(2.0, 3.0))
    assert after.facts["members"] == 2
    assert after.facts["clients"] == 4
    assert after.facts["cost"] == 0.5


def test_the_cost_of_choosing_early() -> None:
    cohort = Cohort.of([update(c, DEEP) for c in "abcd"])
    first, rest = 6 * 5, 5 * 5 + 5 * 5 + 5 * 3
    _, after = kept(KeepAll(AtLayer(1)), cohort)
    assert after.facts["cost"] == pytest.approx((4 * first + first + rest) / (4 * (first + rest)))
    assert kept(KeepAll(AtLayer("all")), cohort)[1].facts["cost"] == 1.0
    unseen = Spec.of(nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 3)))
    assert "cost" not in kept(KeepAll(), Cohort.of([update("a", unseen)]), Bench())[1].facts


def test_laws_follow_from_the_rule() -> None:
    assert {"one", "agree"} <= KeepAll().laws
    assert {"one", "agree"} <= KeepAll(TopLogit(1)).laws
    assert "agree" not in KeepAll(TopLogit("all")).laws
    assert "one" in KeepAll(AtLayer(2)).laws
    assert not {"one", "agree"} & KeepAll(OpenSetVote()).laws
    assert not {"one", "agree"} & KeepAll(TopLogit(1), calibrate="zscore").laws


def test_only_compared_logits_can_be_calibrated() -> None:
    with pytest.raises(RecipeError, match="AtLayer compares none"):
        KeepAll(AtLayer(1), calibrate="zscore")


@pytest.mark.parametrize("guard", [None, Krum()])
def test_nothing_goes_on_from_a_mixture(guard: Krum | None) -> None:
    recipe = Recipe(name="mine", aggregate=KeepAll(), guard=guard)
    assert recipe.result == "mixture"
    recipe.check(1, BENCH)
    with pytest.raises(RecipeError, match="cannot be trained further; use rounds = 1, let it follow"):
        recipe.check(2, BENCH)
    with pytest.raises(RecipeError, match="the model is a mixture, expected one network"):
        kept(KeepAll(), Cohort.of([update("a")]))[1].single  # noqa: B018 - reading it is the point


def test_votes_by_class_need_counts_or_guess_them_from_output_biases() -> None:
    sent = [update(c, counts__labels=torch.tensor(n)) for c, n in (("a", [4, 0, 1]), ("b", [2, 3, 0]))]
    rule = KeepAll(shares="counts")
    assert rule.needs == {"network", "counts"}
    assert kept(rule, Cohort.of(sent))[0].combine == ClassShares(((4.0, 0.0, 1.0), (2.0, 3.0, 0.0)))
    one, other = update("a", num_examples=10.0), update("b", num_examples=30.0)
    prior = torch.tensor([0.7, 0.2, 0.1])
    for u, p in ((one, prior), (other, prior.flip(0))):
        u.posterior.mean["classifier.bias"].copy_(p.log() + 3)  # any constant: a softmax does not see it
    guessed = kept(KeepAll(TopLogit(1), shares="biases"), Cohort.of([one, other]))[0].combine
    assert isinstance(guessed, TopLogit)
    assert torch.allclose(torch.tensor(guessed.counts), torch.tensor([[7.0, 2.0, 1.0], [3.0, 6.0, 21.0]]), atol=1e-4)
    assert not {"one", "agree"} & KeepAll(shares="counts").laws


def test_shares_that_cannot_be_are_refused() -> None:
    bare = Spec("mlp", {"inputs": 6, "hidden": [5], "classes": 3, "output_bias": False})
    with pytest.raises(ConfigError, match=r"a: its network has no output bias .*counts"):
        kept(KeepAll(shares="biases"), Cohort.of([update("a", bare)]))
    with pytest.raises(RecipeError, match="AtLayer takes neither"):
        KeepAll(AtLayer(1), shares="counts")


def test_whom_others_cover_is_left_out_of_the_shares_too() -> None:
    counts = {"a": [4, 4, 0], "b": [1, 0, 0], "c": [0, 0, 5]}
    cohort = Cohort.of([update(c, counts__labels=torch.tensor(n)) for c, n in counts.items()])
    mixture, after = kept(KeepAll(cover=CoverClasses(1.0), shares="counts"), cohort)
    assert after.facts["kept"] == ["a", "c"]
    assert mixture.combine == ClassShares(((4.0, 4.0, 0.0), (0.0, 0.0, 5.0)))


FLAT = Spec("mlp", {"inputs": 4, "hidden": [], "classes": 3})


def flat_client(name: str, weight: torch.Tensor, counts: list[int] | None = None) -> ClientUpdate:
    mean = {"classifier.weight": weight, "classifier.bias": torch.zeros(3)}
    notes = {"counts/labels": torch.tensor(counts)} if counts else {}
    return ClientUpdate(name, Posterior(mean), 1.0, 1, FLAT, notes)


def mixture_of(cohort: Cohort, rule: TopLogit | AtLayer) -> Mixture:
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
        cohort = Cohort.of([flat_client(f"c{i}", torch.zeros(3, 4), row) for i, row in enumerate(counts.tolist())])
        kept = CoverClasses(1.0)(cohort, mixture_of(cohort, TopLogit(1)), Bench())
        held = counts[:, counts.amax(0) > 0].double()
        parts = held / held.amax(0)
        for size, covered in enumerate(kept.covered, 1):
            best = max(float(parts[list(s)].amax(0).mean()) for s in itertools.combinations(range(6), size))
            assert covered >= (1 - 1 / 2.718281828) * best
        assert kept.covered[-1] == pytest.approx(1.0)
        assert kept.covered == sorted(kept.covered)


def test_classes_nobody_holds_do_not_count() -> None:
    cohort = Cohort.of([flat_client("a", torch.zeros(3, 4), [5, 0, 0]), flat_client("b", torch.zeros(3, 4), [0, 7, 0])])
    kept = CoverClasses(0.9)(cohort, mixture_of(cohort, TopLogit(1)), Bench())
    assert kept.indices == [0, 1]
    assert kept.covered == [0.5, 1.0]


@pytest.mark.parametrize("rule", [TopLogit(1, scale=(1.0, 2.0, 1.0, 3.0)), TopLogit("all"), AtLayer(1)])
def test_those_kept_answer_as_everybody_would(rule: TopLogit | AtLayer) -> None:
    torch.manual_seed(2)
    cohort = Cohort.of([flat_client(f"c{i}", torch.randn(3, 4) * (1 + 2 * (i == 1))) for i in range(4)])
    everybody = mixture_of(cohort, rule)
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
    cohort = Cohort.of([flat_client("a", one), flat_client("b", other), flat_client("c", one.clone())])
    rows = Rows(torch.randn(200, 4), torch.zeros(200, dtype=torch.int64))
    kept = CoverAnswers(1.0)(cohort, mixture_of(cohort, TopLogit(1)), Bench(rows=rows))
    assert kept.indices == [0, 1]
    assert kept.covered[-1] == 1.0


def test_without_rows_the_networks_show_what_they_know() -> None:
    torch.manual_seed(0)
    cohort = Cohort.of([flat_client(f"c{i}", torch.randn(3, 4)) for i in range(3)])
    kept = CoverAnswers(0.99, count=30)(cohort, mixture_of(cohort, TopLogit(1)), Bench(inputs=InputForm((4,))))
    assert kept.covered[-1] >= 0.99

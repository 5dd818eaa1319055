"""How members answer together: each rule against its formula, ties, and a closed table of names."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import asdict

import numpy as np
import pytest
import torch
from torch import Tensor

from fedfuse.errors import ConfigError
from fedfuse.nets.forward import AtLayer, Count, Route, largest
from fedfuse.nets.mixture import (
    COMBINES,
    ClassShares,
    MeanLogit,
    MeanProbability,
    OpenSetVote,
    Score,
    TopLogit,
    combine_named,
    find_disturbed,
    rule_for_members,
    standardize_answers,
)

ALIKE = torch.full((4,), 0.25, dtype=torch.float64)


@pytest.fixture
def logits() -> Tensor:
    """Four members, 50 inputs, three classes."""
    return torch.randn(4, 50, 3, generator=torch.Generator().manual_seed(0)) * 3


def test_the_ensemble_is_of_probabilities_not_of_logits(logits: Tensor) -> None:
    answer = MeanProbability()(ALIKE, logits)
    assert torch.allclose(answer.exp(), logits.softmax(-1).mean(0), atol=1e-6)
    assert not torch.allclose(answer.exp(), logits.mean(0).softmax(-1), atol=1e-2)


def test_mean_logits_weigh_members(logits: Tensor) -> None:
    weights = torch.tensor([0.1, 0.2, 0.3, 0.4])
    expected = sum(w * z for w, z in zip(weights.tolist(), logits, strict=True))
    assert torch.allclose(MeanLogit()(weights, logits), torch.as_tensor(expected), atol=1e-6)


def test_top_one_is_the_member_with_the_largest_logit_of_all(logits: Tensor) -> None:
    answer = TopLogit(1)(ALIKE, logits)
    for n in range(logits.shape[1]):
        best = int(logits[:, n].amax(-1).argmax())
        assert answer[n].equal(logits[best, n])
        assert int(answer[n].argmax()) == int(logits[:, n].flatten().argmax()) % 3, "eqs. 8 and 9 together"


@pytest.mark.parametrize("k", [1, 2, 3, 4, 9])
def test_top_k_adds_the_k_most_confident(logits: Tensor, k: int) -> None:
    answer = TopLogit(k)(ALIKE, logits)
    for n in range(logits.shape[1]):
        order = sorted(range(4), key=lambda j: -float(logits[j, n].max()))[:k]
        assert torch.allclose(answer[n], logits[order, n].sum(0), atol=1e-6)


def test_top_of_all_is_the_sum_of_logits(logits: Tensor) -> None:
    assert torch.allclose(TopLogit("all")(ALIKE, logits), logits.sum(0), atol=1e-6)
    assert TopLogit("all")(ALIKE, logits).equal(TopLogit(4)(ALIKE, logits))
    assert torch.allclose(TopLogit("all")(ALIKE, logits) / 4, MeanLogit()(ALIKE, logits), atol=1e-6)


@pytest.mark.parametrize("rule", [MeanProbability(), MeanLogit(), TopLogit(1), TopLogit(2), OpenSetVote(2)])
def test_the_order_of_clients_matters_only_for_ties(logits: Tensor, rule: TopLogit) -> None:
    whole = rule(ALIKE, logits)
    for order in itertools.islice(itertools.permutations(range(4)), 1, 24, 5):
        assert torch.allclose(rule(ALIKE, logits[list(order)]), whole, atol=1e-5)


def test_ties_go_to_the_lowest_client() -> None:
    z = torch.tensor([[[0.0, 2.0]], [[2.0, 0.0]], [[2.0, 1.0]]])
    assert TopLogit(1)(torch.ones(3), z).tolist() == [[0.0, 2.0]]
    assert TopLogit(2)(torch.ones(3), z).tolist() == [[2.0, 2.0]]
    assert TopLogit(1)(torch.ones(3), z.flip(0)).tolist() == [[2.0, 1.0]]
    assert largest(torch.zeros(50, 1), 3).nonzero()[:, 0].tolist() == [0, 1, 2]


def test_calibration_moves_logits_before_they_are_compared(logits: Tensor) -> None:
    shift, scale = (1.0, -2.0, 0.5, 0.0), (0.5, 2.0, 1.0, 4.0)
    moved = (logits - torch.tensor(shift)[:, None, None]) / torch.tensor(scale)[:, None, None]
    assert torch.allclose(TopLogit(2, shift, scale)(ALIKE, logits), TopLogit(2)(ALIKE, moved), atol=1e-5)
    halved = TopLogit(1, scale=(2.0,) * 4)(ALIKE, logits)
    assert torch.allclose(halved, TopLogit(1)(ALIKE, logits) / 2), "one scale for all changes no choice"


def test_per_member_numbers_follow_their_members(logits: Tensor) -> None:
    rule = TopLogit(1, shift=(1.0, 2.0, 3.0, 4.0), scale=(1.0, 2.0, 3.0, 4.0))
    some = rule_for_members(rule, [3, 1])
    assert some == TopLogit(1, (4.0, 2.0), (4.0, 2.0))
    assert rule_for_members(MeanProbability(), [0]) == MeanProbability()
    with pytest.raises(ConfigError, match="a shift for 4 members, expected 2"):
        rule(ALIKE[:2], logits[:2])


def test_the_first_layer_chooses_who_runs() -> None:
    rule = AtLayer(2)
    assert isinstance(rule, Route)
    assert not isinstance(TopLogit(1), Route)
    chosen = rule.choose(torch.tensor([[3.0, 1.0], [2.0, 1.0], [1.0, 2.0]]))
    assert chosen.T.tolist() == [[True, True, False], [True, False, True]]
    assert rule(torch.ones(2), torch.tensor([[[1.0, 2.0]], [[0.0, 0.0]]])).tolist() == [[1.0, 2.0]]


def test_the_open_set_vote_adds_probabilities_of_those_who_know(logits: Tensor) -> None:
    p = logits.softmax(-1)
    for voters in (1, 2, 4):
        answer = OpenSetVote(voters)(ALIKE, logits).exp()
        for n in range(logits.shape[1]):
            order = sorted(range(4), key=lambda j: float(p[j, n, -1]))[:voters]
            assert torch.allclose(answer[n], p[order, n, :-1].mean(0), atol=1e-6)
    assert OpenSetVote("all")(ALIKE, logits).equal(OpenSetVote(4)(ALIKE, logits))


def test_members_disturb_each_other_where_the_sum_overrules_the_surest(logits: Tensor) -> None:
    # the paper's own example, section 4.1: (4, −5) and (−2, 2); the sum still says 0, and so does the surest
    assert find_disturbed(torch.tensor([[[4.0, -5.0]], [[-2.0, 2.0]]])).tolist() == [False]
    assert find_disturbed(torch.tensor([[[4.0, 3.0]], [[-2.0, 2.0]]])).tolist() == [True]
    expected = [
        int(logits[:, n].sum(0).argmax()) != int(logits[int(logits[:, n].amax(-1).argmax()), n].argmax())
        for n in range(50)
    ]
    assert find_disturbed(logits).tolist() == expected


def test_gradients_flow_through_every_rule(logits: Tensor) -> None:
    for rule in (MeanProbability(), MeanLogit(), TopLogit(1), OpenSetVote(2)):
        z = logits.clone().requires_grad_()
        (slope,) = torch.autograd.grad(rule(ALIKE, z).square().sum(), [z])
        assert slope.isfinite().all()
        assert slope.abs().sum() > 0


def test_rules_are_found_by_name() -> None:
    assert repr(combine_named("MeanProbability", {})) == "MeanProbability()"
    assert combine_named("TopLogit", {"k": "all", "shift": [1], "scale": [2.0]}) == TopLogit("all", (1.0,), (2.0,))
    assert set(COMBINES) == {
        *(
            "MeanProbability",
            "MeanPrediction",
            "MeanLogit",
            "ClassShares",
            "TopLogit",
            "AtLayer",
            "Nearest",
            "OpenSetVote",
        ),
    }


@pytest.mark.parametrize("name", ["os.system", "builtins:exec", "meanprobability"])
def test_a_file_cannot_name_anything_else(name: str) -> None:
    with pytest.raises(ConfigError, match="no way to combine"):
        combine_named(name, {})


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("TopLogit", {"k": 0}),
        ("TopLogit", {"k": True}),
        ("TopLogit", {"k": "some"}),
        ("TopLogit", {"scale": [0.0]}),
        ("TopLogit", {"scale": [float("nan")]}),
        ("TopLogit", {"shift": "abc"}),
        ("AtLayer", {"k": -1}),
        ("OpenSetVote", {"voters": 1.5}),
    ],
)
def test_impossible_options_are_refused_in_one_sentence(name: str, options: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as caught:
        combine_named(name, options)
    assert "\n" not in str(caught.value)


def test_class_shares_are_the_equation() -> None:
    """p(c|x) ∝ Σ_j (n_jc / Σ_k n_kc) p_j(c|x), with numpy: a class one member never saw, one nobody did."""
    counts = ((30.0, 10.0, 0.0, 0.0), (10.0, 0.0, 5.0, 0.0))
    logits = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    n, p = np.array(counts), logits.softmax(-1).numpy()
    want = sum((n[j] / np.maximum(n.sum(0), 1e-12)) * p[j] for j in range(2))
    want /= want.sum(1, keepdims=True)
    found = ClassShares(counts)(torch.ones(2), logits).exp().numpy()
    assert np.allclose(found, want, atol=1e-10)
    assert found[:, 3].max() < 1e-10


def test_members_with_equal_shares_are_the_plain_ensemble() -> None:
    logits = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    alike = torch.full((3,), 1 / 3, dtype=torch.float64)
    equal = ClassShares(3 * ((7.0,) * 4,))
    assert torch.allclose(equal(alike, logits), MeanProbability()(alike, logits), atol=1e-12)


def test_shares_choose_the_member_that_knows_the_class() -> None:
    z = torch.tensor([[[5.0, 0.0]], [[4.0, 0.0]]])
    assert TopLogit(1)(torch.ones(2), z).tolist() == [[5.0, 0.0]]
    heard = TopLogit(1, counts=((1.0, 50.0), (99.0, 50.0)))(torch.ones(2), z)
    assert torch.allclose(heard, torch.tensor([[4 + math.log(0.99), math.log(0.5)]]))


@pytest.mark.parametrize("score", ["logit", "energy", "margin", "softmax"])
def test_scores_of_confidence_change_who_answers_and_not_what(score: Score) -> None:
    z = (
        torch.randn(4, 50, 3, generator=torch.Generator().manual_seed(2))
        * torch.tensor([1.0, 2.0, 3.0, 4.0])[:, None, None]
    )
    sorted_ = z.sort(-1, descending=True).values
    by_hand = {
        "logit": sorted_[..., 0],
        "energy": z.exp().sum(-1).log(),
        "margin": sorted_[..., 0] - sorted_[..., 1],
        "softmax": z.softmax(-1).amax(-1),
    }[score]
    who = by_hand.argmax(0)
    assert TopLogit(1, score=score)(torch.ones(4), z).equal(z[who, torch.arange(50)])
    assert TopLogit(1, score=score).choose_members(z).long().argmax(0).equal(who)


def test_rules_with_tables_travel_and_follow_their_members() -> None:
    rule = ClassShares(((1.0, 2.0), (3.0, 4.0), (5.0, 6.0)))
    again = combine_named("ClassShares", json.loads(json.dumps(asdict(rule))))
    assert again == rule
    assert rule_for_members(rule, [0, 2]) == ClassShares(((1.0, 2.0), (5.0, 6.0)))
    top = TopLogit(2, score="energy", counts=((1.0, 2.0), (3.0, 4.0)))
    assert combine_named("TopLogit", json.loads(json.dumps(asdict(top)))) == top
    assert rule_for_members(top, [1]) == TopLogit(2, score="energy", counts=((3.0, 4.0),))
    for bad in ("no", [[1.0], [1.0, 2.0]], [[-1.0]], [["x"]]):
        with pytest.raises(ConfigError, match="counts"):
            combine_named("ClassShares", {"counts": bad})
    with pytest.raises(ConfigError, match="3 × 2"):
        rule(torch.ones(2), torch.zeros(2, 1, 2))
    with pytest.raises(ConfigError, match="score is 'loud'"):
        combine_named("TopLogit", {"score": "loud"})


@pytest.mark.parametrize("k", [1, 2, "all"])
def test_standardized_answers_have_no_loudness(logits: Tensor, k: Count) -> None:
    rule, logits = TopLogit(k, standardized=True), logits.double()
    loud = logits * torch.tensor([1.0, 1e6, 1e-3, 5.0])[:, None, None] + 7.0
    assert torch.equal(rule.choose_members(loud), rule.choose_members(logits))
    assert torch.allclose(rule(torch.ones(len(logits)), loud), rule(torch.ones(len(logits)), logits), atol=1e-4)
    bound = math.sqrt(logits.shape[-1] - 1) + 1e-5
    assert float(standardize_answers(loud).abs().max()) <= bound
    assert torch.equal(standardize_answers(torch.full((2, 3), 5.0)), torch.zeros(2, 3)), "no preference says nothing"

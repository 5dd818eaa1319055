"""How members answer together: each rule against its formula, ties, and a closed table of names."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from fedfuse.errors import ConfigError
from fedfuse.nets.combine import (
    COMBINES,
    FirstLayer,
    MeanLogit,
    MeanProbability,
    OpenSetVote,
    Route,
    TopLogit,
    among,
    combine_named,
    disturbed,
    largest,
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
    some = among(rule, [3, 1])
    assert some == TopLogit(1, (4.0, 2.0), (4.0, 2.0))
    assert among(MeanProbability(), [0]) == MeanProbability()
    with pytest.raises(ConfigError, match="a shift for 4 members, expected 2"):
        rule(ALIKE[:2], logits[:2])


def test_the_first_layer_chooses_who_runs() -> None:
    rule = FirstLayer(2)
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
    assert disturbed(torch.tensor([[[4.0, -5.0]], [[-2.0, 2.0]]])).tolist() == [False]
    assert disturbed(torch.tensor([[[4.0, 3.0]], [[-2.0, 2.0]]])).tolist() == [True]
    expected = [
        int(logits[:, n].sum(0).argmax()) != int(logits[int(logits[:, n].amax(-1).argmax()), n].argmax())
        for n in range(50)
    ]
    assert disturbed(logits).tolist() == expected


def test_gradients_flow_through_every_rule(logits: Tensor) -> None:
    for rule in (MeanProbability(), MeanLogit(), TopLogit(1), OpenSetVote(2)):
        z = logits.clone().requires_grad_()
        (slope,) = torch.autograd.grad(rule(ALIKE, z).square().sum(), [z])
        assert slope.isfinite().all()
        assert slope.abs().sum() > 0


def test_rules_are_found_by_name() -> None:
    assert repr(combine_named("MeanProbability", {})) == "MeanProbability()"
    assert combine_named("TopLogit", {"k": "all", "shift": [1], "scale": [2.0]}) == TopLogit("all", (1.0,), (2.0,))
    assert set(COMBINES) == {"MeanProbability", "MeanLogit", "TopLogit", "FirstLayer", "OpenSetVote"}


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
        ("FirstLayer", {"k": -1}),
        ("OpenSetVote", {"voters": 1.5}),
    ],
)
def test_impossible_options_are_refused_in_one_sentence(name: str, options: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as caught:
        combine_named(name, options)
    assert "\n" not in str(caught.value)

"""Mixtures: each rule against its formula, ties and a closed table of names; calibration; regions of features."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar
from torch import Tensor
from torch.nn.functional import one_hot

from fedfuse.api import fuse, local_update, recipe
from fedfuse.core.model import Single
from fedfuse.core.rows import Rows
from fedfuse.core.spec import Spec
from fedfuse.errors import ConfigError
from fedfuse.linalg.ridge import Sums
from fedfuse.nets.forward import AtLayer, Count, Nearest, Route, largest
from fedfuse.nets.mixture import (
    COMBINES,
    DAMPING,
    ClassShares,
    FeatureRegion,
    MeanLogit,
    MeanProbability,
    Mixture,
    OpenSetVote,
    Score,
    TopLogit,
    calibration,
    combine_named,
    find_disturbed,
    fit_temperature,
    rule_for_members,
    standardize_answers,
)
from fedfuse.wire.files import load_model, save_model

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


def platt_loss(log_t: float, logits: Tensor, labels: Tensor) -> float:
    """Cross entropy of softmax(z / T) against Platt's targets."""
    n, classes = logits.shape
    target = torch.full((n, classes), 1 / (n + classes), dtype=torch.float64)
    target[range(n), labels] = (n + 1) / (n + classes)
    return float(-(target * (logits.double() / math.exp(log_t)).log_softmax(-1)).sum(-1).mean())


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("size", [0.1, 3.0, 50.0])
def test_the_temperature_is_the_likeliest(seed: int, size: float) -> None:
    draw = torch.Generator().manual_seed(seed)
    logits = size * torch.randn(60, 5, generator=draw)
    labels = torch.where(torch.rand(60, generator=draw) < 0.7, logits.argmax(-1), 0)
    found = minimize_scalar(
        platt_loss, bounds=(-7, 7), args=(logits, labels), method="bounded", options={"xatol": 1e-10}
    )
    assert math.log(fit_temperature(logits, labels)) == pytest.approx(found.x, abs=1e-5)


def test_scaling_logits_scales_the_temperature() -> None:
    draw = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(40, 3, generator=draw), torch.randint(3, (40,), generator=draw)
    labels[:25] = logits[:25].argmax(-1)
    assert fit_temperature(7 * logits, labels) == pytest.approx(7 * fit_temperature(logits, labels), rel=1e-6)


def test_rows_that_are_all_right_still_have_a_finite_temperature() -> None:
    """For margins m and n rows of two classes, softmax(m/T) = (n+1)/(n+2), so m/T = log(n+1)."""
    logits, labels = torch.tensor([[3.0, 0.0]] * 20), torch.zeros(20, dtype=torch.int64)
    assert fit_temperature(logits, labels) == pytest.approx(3 / math.log(21), rel=1e-9)
    nine = torch.cat([logits, torch.tensor([[900.0, 0.0]])])
    assert math.isfinite(fit_temperature(nine, torch.zeros(21, dtype=torch.int64)))


def test_a_network_that_says_nothing_keeps_its_scale() -> None:
    flat, labels = torch.zeros(9, 4), torch.zeros(9, dtype=torch.int64)
    assert fit_temperature(flat, labels) == 1.0
    assert calibration("zscore", flat, labels) == (0.0, 1.0)


def test_zscores_standardize_the_largest_logit() -> None:
    logits = 4 + 3 * torch.randn(500, 6, generator=torch.Generator().manual_seed(1))
    shift, scale = calibration("zscore", logits, torch.zeros(500, dtype=torch.int64))
    confidence = ((logits.double() - shift) / scale).amax(-1)
    assert float(confidence.mean()) == pytest.approx(0, abs=1e-9)
    assert float(confidence.std(correction=0)) == pytest.approx(1, abs=1e-9)
    assert calibration("temperature", logits, logits.argmax(-1)).shift == 0.0


MLP = Spec("mlp", {"inputs": 6, "hidden": [5, 4], "classes": 3})
WIDE = Spec("mlp", {"inputs": 6, "hidden": [9], "classes": 3})


def region_of(phi: Tensor, y: Tensor, damping: float = DAMPING) -> FeatureRegion:
    """The region of some features and labels."""
    return FeatureRegion.of(Sums.of(torch.cat([phi, torch.ones(len(phi), 1)], 1), one_hot(y, 3)), damping)


def test_the_distance_is_the_equation() -> None:
    draw = torch.Generator().manual_seed(0)
    phi, y = torch.randn(40, 4, generator=draw, dtype=torch.float64), torch.arange(40) % 2  # class 2 was never seen
    asked = torch.randn(7, 4, generator=draw, dtype=torch.float64)
    means = torch.stack([phi[y == c].mean(0) for c in (0, 1)])
    centred = phi - means[y]
    covariance = centred.T @ centred / 40
    covariance += DAMPING * covariance.diagonal().mean() * torch.eye(4)
    inverse = torch.linalg.inv(covariance)
    expected = torch.stack([((asked - m) @ inverse * (asked - m)).sum(1) for m in means]).amin(0) / 4
    assert torch.allclose(region_of(phi, y).distance(asked), expected, rtol=1e-12)


def test_features_that_never_vary_do_not_count_without_end() -> None:
    phi = torch.tensor([[0.0, 5.0], [2.0, 5.0], [4.0, 5.0]], dtype=torch.float64)
    near = region_of(phi, torch.zeros(3, dtype=torch.int64)).distance(torch.tensor([[2.0, 5.0], [2.0, 6.0]]))
    assert near[0] < 1e-20
    assert near[1].isfinite()
    with pytest.raises(ConfigError, match="count no row of any class"):
        FeatureRegion.of(Sums(torch.eye(3), torch.zeros(3, 3), torch.zeros(3), 0.0))


def features(member: Single, x: Tensor) -> Tensor:
    """What the last layer reads, by hand."""
    module = member.spec.build()
    module.load_state_dict(dict(member.posterior.mean))
    with torch.no_grad():
        return module[:-1](x)


def test_the_nearest_member_answers_and_a_file_remembers_where(tmp_path: Path) -> None:
    torch.manual_seed(1)
    members = tuple(Single.of(spec.build(), spec) for spec in (MLP, WIDE, MLP))
    rows = [torch.randn(30, 6) + 2 * i for i in range(3)]
    y = torch.arange(30) % 3
    regions = tuple(region_of(features(m, x).double(), y) for m, x in zip(members, rows, strict=True))
    mixture = Mixture(members, torch.ones(3), Nearest(), regions=regions)
    x = torch.cat(rows)
    distances = torch.stack([r.distance(features(m, x)) for m, r in zip(members, regions, strict=True)])
    best = distances.argmin(0)
    expected = torch.stack([members[int(j)].logits(x[i : i + 1])[0] for i, j in enumerate(best)])
    assert torch.allclose(mixture.logits(x), expected, atol=1e-5)
    assert len(best.unique()) > 1
    assert mixture.who_answers(x).int().argmax(0).equal(best)
    save_model(mixture, tmp_path / "m.safetensors")
    again, _ = load_model(tmp_path / "m.safetensors")
    assert isinstance(again, Mixture)
    assert again.logits(x).equal(mixture.logits(x))
    with pytest.raises(ConfigError, match="2 regions of features were given for 3 members"):
        Mixture(members, torch.ones(3), Nearest(), regions=regions[:2])


def test_a_choice_at_the_last_layer_is_ams_and_at_the_second_its_largest_output() -> None:
    torch.manual_seed(2)
    members = tuple(Single.of(MLP.build(), MLP) for _ in range(4))
    x = torch.randn(25, 6)
    logits = torch.stack([m.logits(x) for m in members])
    last = Mixture(members, torch.ones(4), AtLayer(1, 3))
    assert last.who_answers(x).int().argmax(0).equal(logits.amax(-1).argmax(0))
    for which in (2, "fc2"):
        second = Mixture(members, torch.ones(4), AtLayer(1, which)).confidence(x)
        mean = [m.posterior.mean for m in members]
        first = [(x @ w["fc1.weight"].T + w["fc1.bias"]).relu() for w in mean]
        by_hand = [(h @ w["fc2.weight"].T + w["fc2.bias"]).amax(1) for h, w in zip(first, mean, strict=True)]
        assert torch.allclose(second, torch.stack(by_hand), atol=1e-5)


@pytest.mark.parametrize(
    ("layer", "message"),
    [(7, "has 3 layers with weights, and members were to be chosen at layer 7"), ("fc3", "did you mean 'fc")],
)
def test_a_layer_that_is_not_there_is_named(layer: int | str, message: str) -> None:
    members = tuple(Single.of(MLP.build(), MLP) for _ in range(2))
    with pytest.raises(ConfigError, match=message):
        Mixture(members, torch.ones(2), AtLayer(1, layer)).logits(torch.zeros(1, 6))


@pytest.mark.parametrize("options", [{"score": "mahalanobis"}, {"layer": 2}])
def test_updates_of_different_networks_fuse_by_it(options: dict[str, object]) -> None:
    torch.manual_seed(3)
    how = recipe("ams", disturbance=False, **options)
    nets = [spec.build() for spec in (MLP, WIDE, MLP)]
    rows = [Rows(torch.randn(24, 6) + 3 * i, torch.arange(24) % 2 + (i > 0)) for i in range(3)]
    updates = [local_update(net, rows[i], how, client=f"c{i}", classes=3, epochs=2) for i, net in enumerate(nets)]
    fused = fuse(updates, how, model=nets)
    assert fused.logits(rows[0].x).shape == (24, 3)
    assert 1 / 3 < fused.facts["cost"] < 1.4

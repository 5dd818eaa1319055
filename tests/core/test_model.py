"""Single networks and mixtures answer logits."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from fedfuse.core.model import Apart, Single, outputs
from fedfuse.core.spec import Spec
from fedfuse.errors import ConfigError
from fedfuse.nets.forward import AtLayer
from fedfuse.nets.mixture import MeanProbability, Mixture, TopLogit

SHALLOW = Spec("mlp", {"inputs": 16, "hidden": [5], "classes": 3})
DEEP = Spec("mlp", {"inputs": 16, "hidden": [4, 6], "classes": 3})
LENET = Spec("lenet", {"size": 4, "classes": 3, "hidden": [5]})


def fresh(*specs: Spec, seed: int = 0) -> tuple[Single, ...]:
    torch.manual_seed(seed)
    return tuple(Single.of(s.build(), s) for s in specs)


def alike(count: int) -> torch.Tensor:
    return torch.full((count,), 1 / count, dtype=torch.float64)


def test_a_single_network_answers_as_its_module_does_in_evaluation_mode() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
    module(torch.randn(8, 3))  # moves the running statistics
    single = Single.of(module, Spec.of(module))
    x = torch.randn(5, 3)
    expected = module.eval()(x)
    assert single.logits(x).equal(expected)
    module[0].weight.data.zero_()
    assert single.logits(x).equal(expected), "a model's weights are its own"
    assert single.to("cpu").logits(x).equal(expected)


def test_a_mixture_answers_with_the_log_of_the_mean_probability() -> None:
    modules = [nn.Linear(3, 4) for _ in range(3)]
    weights = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    mixture = Mixture(tuple(Single.of(m, Spec.of(m)) for m in modules), weights, MeanProbability())
    x = torch.randn(6, 3)
    expected = sum(w * m(x).softmax(-1) for w, m in zip(weights.tolist(), modules, strict=True)).log()
    assert torch.allclose(mixture.logits(x), expected, atol=1e-6)


def test_vanishing_probabilities_stay_finite_in_log_space() -> None:
    logits = torch.tensor([[[200.0, -200.0]], [[210.0, -210.0]]])
    assert MeanProbability()(torch.tensor([0.5, 0.5]), logits).isfinite().all()


def test_members_of_any_architecture_answer_in_client_order() -> None:
    members = fresh(SHALLOW, LENET, DEEP, SHALLOW, LENET, SHALLOW)
    mixture = Mixture(members, alike(6), TopLogit(1))
    x = torch.randn(7, 1, 4, 4)
    expected = torch.stack([m.logits(x) for m in members])
    assert torch.allclose(mixture.answers(x), expected, atol=1e-6)
    assert torch.allclose(mixture.logits(x), TopLogit(1)(alike(6), expected), atol=1e-6)


def test_permuting_members_changes_nothing_but_ties() -> None:
    members, x = fresh(SHALLOW, DEEP, SHALLOW), torch.randn(20, 16)
    whole = Mixture(members, alike(3), TopLogit(1)).logits(x)
    for order in itertools.permutations(members):
        assert torch.allclose(Mixture(order, alike(3), TopLogit(1)).logits(x), whole, atol=1e-6)


@pytest.mark.parametrize("specs", [(SHALLOW,) * 4, (LENET,) * 2, (SHALLOW, LENET, SHALLOW)])
def test_chunks_change_no_answer(specs: tuple[Spec, ...]) -> None:
    members, x = fresh(*specs), torch.randn(33, 1, 4, 4)
    whole, small = Mixture(members, alike(len(specs)), TopLogit(1)), Mixture(members, alike(len(specs)), TopLogit(1), 1)
    assert small.chunk(x) == 1
    assert torch.allclose(small.logits(x), whole.logits(x), atol=1e-6)
    assert whole.logits(x[:0]).shape == (0, 3)


def test_the_memory_limit_bounds_what_is_alive_at_a_time() -> None:
    members = fresh(*(SHALLOW,) * 10)
    mixture = Mixture(members, alike(10), TopLogit(1), memory=100_000)
    x = torch.randn(5000, 16)
    alive = 10 * (5 + 3) + 3 * 10  # per input: ten members' two layers and everybody's logits, in floats
    assert mixture.chunk(x) == 100_000 // (8 * alive)
    assert Mixture(members, alike(10), TopLogit(1)).chunk(x) == 1000
    tight = Mixture(members, alike(10), TopLogit(1), memory=1000)
    assert tight._member_groups()[0].stack is None, "stacking copies weights, which must fit too"
    assert torch.allclose(tight.answers(x[:9]), mixture.answers(x[:9]), atol=1e-6)


def test_the_first_layer_decides_who_runs_to_the_end() -> None:
    members = fresh(SHALLOW, LENET, SHALLOW, DEEP, SHALLOW)
    x = torch.randn(40, 1, 4, 4)
    mixture = Mixture(members, alike(5), AtLayer(2))
    flat = x.flatten(1)
    confidence = []
    for m in members:
        mean = m.posterior.mean
        if m.spec is LENET:
            first = torch.nn.functional.conv2d(x, mean["conv1.weight"], mean["conv1.bias"], padding=1).flatten(1)
        else:
            first = flat @ mean["fc1.weight"].T + mean["fc1.bias"]
        confidence.append(first.amax(1))
    assert torch.allclose(mixture.confidence(x), torch.stack(confidence), atol=1e-5)
    best = torch.stack(confidence).topk(2, 0).indices
    every = torch.stack([m.logits(x) for m in members])
    expected = every.gather(0, best[..., None].expand(-1, -1, 3)).sum(0)
    assert torch.allclose(mixture.logits(x), expected, atol=1e-5)
    assert mixture.logits(x[:0]).shape == (0, 3)
    everybody = Mixture(members, alike(5), AtLayer("all")).logits(x)
    assert torch.allclose(everybody, every.sum(0), atol=1e-5)


def test_gradients_reach_inputs_through_a_mixture() -> None:
    members = fresh(SHALLOW, SHALLOW, LENET)
    for rule in (TopLogit(1), AtLayer(1), MeanProbability()):
        x = torch.zeros(4, 1, 4, 4, requires_grad=True)
        (slope,) = torch.autograd.grad(Mixture(members, alike(3), rule).logits(x).square().sum(), [x])
        assert slope.abs().sum() > 0


@pytest.mark.parametrize("rule", [TopLogit(1), TopLogit(2), TopLogit(1, (0.1, 0.2, 0.3, 0.0), (1.0, 2.0, 0.5, 1.0))])
def test_slopes_come_from_the_chosen_alone_and_are_those_of_everybody(rule: TopLogit) -> None:
    mixture = Mixture(fresh(SHALLOW, SHALLOW, LENET, SHALLOW), alike(4), rule)
    x = torch.randn(30, 1, 4, 4, requires_grad=True)
    economical, whole = mixture.logits(x), mixture.at_once(x)
    assert torch.allclose(economical, whole, atol=1e-5)
    slopes = [torch.autograd.grad(z.logsumexp(-1).sum(), [x])[0] for z in (economical, whole)]
    assert torch.allclose(*slopes, atol=1e-5)


def test_a_mixture_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="a mixture of no networks has no answer; give it at least one member"):
        Mixture((), torch.empty(0), MeanProbability())


def test_members_must_tell_the_same_classes_apart() -> None:
    wide = Spec("mlp", {"inputs": 16, "classes": 5})
    with pytest.raises(ConfigError, match="tell 3 and 5 classes apart"):
        Mixture(fresh(SHALLOW, wide), alike(2), MeanProbability())
    odd = [nn.Sequential(nn.Linear(4, n), nn.Unflatten(1, (1, n)), nn.Flatten(0, 1)) for n in (2, 2)]
    flat = [nn.Sequential(nn.Conv1d(1, 1, 4 - n)) for n in (0, 1)]  # no linear layer says how many classes there are
    assert len(Mixture(tuple(Single.of(m, Spec.of(m)) for m in odd), alike(2), MeanProbability()).members) == 2
    silent = Mixture(tuple(Single.of(m, Spec.of(m)) for m in flat), alike(2), MeanProbability())
    with pytest.raises(ConfigError, match=r"give \[1, 2\] logits"):
        silent.answers(torch.zeros(2, 1, 4))


def test_there_is_one_weight_per_member() -> None:
    with pytest.raises(ConfigError, match="3 weights were given for 2 members"):
        Mixture(fresh(SHALLOW, SHALLOW), alike(3), MeanProbability())


def test_parts_of_a_model() -> None:
    members = fresh(SHALLOW, DEEP)
    assert members[0].members == (members[0],)
    assert Mixture(members, alike(2), MeanProbability()).members == members
    assert Apart(members).members == members
    assert outputs(members[0]) == 3
    convolution = nn.Conv2d(1, 2, 3)
    assert outputs(Single.of(convolution, Spec.of(convolution))) is None


def test_a_network_of_ours_answers_alike_however_its_channels_lie() -> None:
    """Weights are laid out for speed; what is said differs by rounding alone."""
    for spec, shape in ((Spec("lenet"), (1, 28, 28)), (Spec("lenet", {"channels": 3, "size": 32}), (3, 32, 32))):
        x = torch.randn(5, *shape, generator=torch.Generator().manual_seed(0))
        module = spec.build().eval()
        with torch.no_grad():
            torch.testing.assert_close(Single.of(module, spec).logits(x), module(x), rtol=1e-5, atol=1e-5)

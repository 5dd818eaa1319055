"""Bayesian layers: what is drawn has the promised distribution, and what is kept stays what it was."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from fedfuse.core.model import Single
from fedfuse.core.params import Layout
from fedfuse.core.spec import Spec
from fedfuse.errors import ConfigError
from fedfuse.models import bayesian, lenet, resnet18
from fedfuse.models.bayes import (
    RELEASED_BOUNDS,
    BayesConv2d,
    Bayesian,
    BayesianLayers,
    BayesLinear,
    MeanField,
    build_bayesian,
    factors,
    mean_fields,
)

MLP = {"factory": "mlp", "options": {"inputs": 6, "hidden": [5], "classes": 3}}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


def batch(n: int = 7) -> Tensor:
    return torch.randn(n, 6, generator=torch.Generator().manual_seed(1))


class Branching(nn.Module):
    """A user's own network: its forward pass is no sequence, and a layer is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.again = self.first
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.again(self.first(x).relu()) + x)
        return out


# --- which layers, and what they keep


def test_the_last_layers_become_bayesian_and_keep_their_means() -> None:
    plain = net()
    before = copy.deepcopy(plain.state_dict())
    model = bayesian(plain, last=2, log_variance=-5.0)
    assert model.net is plain
    assert [name for name, _ in mean_fields(model)] == ["net.2", "net.4"]
    assert isinstance(plain[2], BayesLinear)
    after = model.state_dict()
    assert all(after[f"net.{name}"].equal(value) for name, value in before.items())
    new = {name for name in after if name.removeprefix("net.") not in before}
    assert new == {"net.2.log_variance", "net.4.log_variance"}
    assert all((after[name] == -5.0).all() and after[name].dtype == torch.float32 for name in new)


def test_layers_can_be_named_and_biases_can_be_gaussians_too() -> None:
    model = bayesian(net(), layers=["0", "4"], bias=True)
    assert [f.name for f in factors(model)] == ["net.0.weight", "net.0.bias", "net.4.weight", "net.4.bias"]
    without = bayesian(nn.Linear(3, 2, bias=False), bias=True)
    assert sorted(without.state_dict()) == ["net.log_variance", "net.weight"]


def test_a_users_own_network_and_one_that_is_a_single_layer() -> None:
    model = bayesian(Branching(), last=2)
    assert model.net.again is model.net.first  # a layer used twice stays one
    assert isinstance(model.net.first, BayesLinear)
    assert model.eval()(batch()).shape == (7, 3)
    one = bayesian(nn.Conv2d(1, 2, 3))
    assert isinstance(one.net, BayesConv2d)


def test_training_mode_and_dtype_are_kept() -> None:
    assert not bayesian(net().eval()).training
    partly = net()
    partly[0].eval()
    model = bayesian(partly, last=3)
    assert [part.training for part in (model, model.net, model.net[0], model.net[2])] == [True, True, False, True]
    assert bayesian(net().double(), bias=True).state_dict()["net.4.bias_log_variance"].dtype == torch.float64


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"last": 4}, r"last is 4, expected at most 3, as many linear layers and convolutions as Sequential has"),
        ({"last": 0}, "last is 0"),
        ({"last": True}, "last is True"),
        ({"draws": 0}, "draws is 0"),
        ({"layers": ["9"]}, r"no linear layer or convolution '9'; Sequential has 0, 2, 4"),
        ({"layers": ["1"]}, "no linear layer or convolution '1'"),
    ],
)
def test_what_cannot_be_is_said_in_one_sentence(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        bayesian(net(), **options)


def test_layers_whose_forward_pass_is_unknown_are_refused() -> None:
    with pytest.raises(ConfigError, match="'out_proj' is a NonDynamicallyQuantizableLinear"):
        bayesian(nn.MultiheadAttention(4, 2))
    with pytest.raises(ConfigError, match="'4' is a BayesLinear"):
        bayesian(bayesian(net()).net)


# --- what is drawn


def moments(layer: MeanField, x: Tensor, draws: int = 20_000) -> tuple[Tensor, Tensor]:
    """Mean and variance of a layer's output over drawn weights, the definition itself."""
    generator = torch.Generator().manual_seed(0)
    names, means, logs, _ = zip(*layer.factors(), strict=True)

    def output(*noise: Tensor) -> Tensor:
        drawn = {n: m + (v / 2).exp() * e for n, m, v, e in zip(names, means, logs, noise, strict=True)}
        return layer.affine(x, drawn["weight"], drawn.get("bias", layer.bias))

    noise = [torch.randn(draws, *m.shape, generator=generator, dtype=m.dtype) for m in means]
    out = vmap(output)(*noise)
    return out.mean(0), out.var(0)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("plain", "shape"),
    [
        (nn.Linear(4, 3), (2, 4)),
        (nn.Linear(4, 3, bias=False), (2, 4)),
        (nn.Conv2d(2, 3, 3, padding=1, stride=2, padding_mode="circular"), (2, 2, 5, 5)),
        (nn.Conv2d(4, 4, 2, groups=2, dilation=2), (2, 4, 4, 4)),
        (nn.Conv1d(2, 3, 2), (2, 2, 4)),
        (nn.Conv3d(1, 2, 2), (2, 1, 3, 3, 3)),
    ],
    ids=["linear", "no bias", "padded", "grouped", "1d", "3d"],
)
def test_outputs_are_drawn_as_drawing_weights_would(plain: nn.Module, shape: tuple[int, ...], bias: bool) -> None:
    """Local reparametrisation has the mean and the variance of every output that random weights give it."""
    torch.manual_seed(0)
    layer = bayesian(plain.double(), bias=bias).net
    assert isinstance(layer, MeanField)
    nn.init.uniform_(layer.log_variance, -3.0, 0.0)
    x = torch.randn(shape, dtype=torch.float64)
    with torch.no_grad():
        mean, variance = moments(layer, x)
        drawn = torch.stack([layer(x) for _ in range(4000)])
        torch.testing.assert_close(drawn.mean(0), mean, atol=0.12, rtol=0.02)
        torch.testing.assert_close(drawn.var(0), variance, atol=0.02, rtol=0.12)


def test_every_example_has_noise_of_its_own_and_its_gradient_is_finite_where_nothing_varies() -> None:
    layer = bayesian(nn.Linear(4, 3)).net
    same = torch.ones(2, 4)
    out = layer(same)
    assert not out[0].equal(out[1])
    layer(torch.zeros(2, 4)).sum().backward()
    assert layer.log_variance.grad.equal(torch.zeros(3, 4))


def test_without_noise_a_layer_is_the_plain_one_in_training_and_evaluation() -> None:
    plain, model = net(), bayesian(net(), last=3, noise=False)
    assert not model.noise
    for mode in (True, False):
        assert model.train(mode)(batch()).equal(plain(batch()))
    assert model(batch(), apart=True).shape == (1, 7, 3)


# --- how it answers


def test_probabilities_are_averaged_over_drawn_networks() -> None:
    model = bayesian(net(), last=2, draws=6).eval()
    with torch.no_grad():
        (stacked,) = model._draw_weights(model.seed, 6)
        assert stacked.keys() == {"2.weight", "4.weight"}
        each = []
        for draw in range(6):
            weights = {name: tensor[draw] for name, tensor in stacked.items()}
            each.append(functional_call(net(), weights, (batch(),), strict=False).softmax(-1))
        torch.testing.assert_close(model(batch()).exp(), torch.stack(each).mean(0))
        torch.testing.assert_close(model(batch(), apart=True).softmax(-1), torch.stack(each))


def test_drawn_networks_have_the_posteriors_moments() -> None:
    model = bayesian(nn.Linear(2, 1), log_variance=-1.0, draws=2)
    drawn = torch.cat([part["weight"] for part in model._draw_weights(0, 3000)])
    torch.testing.assert_close(drawn.mean(0), model.net.weight, atol=0.04, rtol=0)
    torch.testing.assert_close(drawn.var(0), torch.full((1, 2), math.exp(-1)), atol=0.03, rtol=0)


def test_an_answer_depends_on_the_row_and_the_seed_alone() -> None:
    torch.manual_seed(5)
    model = bayesian(net(), last=3, log_variance=0.0).eval()
    whole = model(batch())
    torch.manual_seed(6)
    torch.testing.assert_close(torch.cat([model(row[None]) for row in batch()]), whole)
    other = copy.deepcopy(model)
    other.seed = 1
    assert not other(batch()).equal(whole)
    assert torch.random.get_rng_state().equal(torch.manual_seed(6).get_state())  # nobody's stream was moved


@pytest.mark.parametrize("make", [net, lenet, Branching], ids=["sequence", "lenet", "branching"])
def test_what_does_not_vary_is_computed_once_and_nothing_changes(make: Any) -> None:
    class Whole(nn.Module):
        """The same network, not seen as a sequence."""

        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.inner(x)
            return out

    torch.manual_seed(0)
    model = bayesian(make(), draws=3).eval()
    hidden = Bayesian(Whole(model.net), 3).eval()

    def same_draws(seed: int, count: int) -> Iterator[dict[str, Tensor]]:
        return ({f"inner.{n}": t for n, t in drawn.items()} for drawn in model._draw_weights(seed, count))

    hidden._draw_weights = same_draws  # type: ignore[method-assign]
    x = batch() if make is not lenet else torch.randn(4, 1, 28, 28)
    torch.testing.assert_close(model(x), hidden(x))


def test_draws_are_asked_together_and_answer_as_one_by_one() -> None:
    class Counted(nn.Module):
        """A network whose passes are counted; one that reads a number off a tensor cannot be asked for many at once."""

        def __init__(self, reads: bool) -> None:
            super().__init__()
            self.inner, self.reads, self.passes = net(), reads, 0

        def forward(self, x: Tensor) -> Tensor:
            self.passes += 1
            out: Tensor = self.inner(x)
            return out * (2.0 if self.reads and float(out.sum()) > 1e9 else 1.0)

    answers = []
    for reads, passes in ((False, 2), (True, 14)):
        model = bayesian(Counted(reads), last=2, draws=12).eval()
        with torch.no_grad():
            answers.append(model(batch(), apart=True))
        assert (model.net.passes, len(answers[-1])) == (passes, 12)
    torch.testing.assert_close(*answers)


def test_asking_leaves_a_shared_layer_and_a_tied_weight_as_they_were() -> None:
    class Tied(nn.Module):
        """Two layers with one weight, and a layer that is used under two names."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.head = nn.Linear(4, 4), nn.Linear(4, 4)
            self.head.weight = self.first.weight
            self.again = self.first

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(self.again(x))
            return out

    model = bayesian(Tied(), layers=["head"], log_variance=0.0, draws=4).eval()
    before, x = dict(model.named_parameters()), torch.eye(4)
    with torch.no_grad():
        each = model(x, apart=True)
        (drawn,) = model._draw_weights(0, 4)
        w, first, head = drawn["head.weight"], model.net.first.bias, model.net.head.bias
        expected = torch.stack([(x @ one.T + first) @ one.T + head for one in w])
    torch.testing.assert_close(each, expected)  # one weight is drawn once, wherever it stands
    assert all(after is before[name] for name, after in model.named_parameters())


def test_the_first_draws_of_many_are_those_of_few_and_another_seed_has_others() -> None:
    model = bayesian(net(), last=3, draws=30).eval()
    many = model(batch(), apart=True)
    assert many[:10].equal(model(batch(), apart=True, draws=10))
    assert not many.equal(model(batch(), apart=True, seed=1))
    assert len(torch.unique(many[:, 0, 0])) == 30


def test_a_layers_first_deviation_follows_its_fan_in() -> None:
    model = bayesian(nn.Sequential(nn.Conv2d(3, 4, 5), nn.Flatten(), nn.Linear(16, 2)), last=2)
    sigma = [f.log_variance.mul(0.5).exp().unique().item() * f.fan_in**0.5 for f in factors(model)]
    assert sigma[0] == pytest.approx(sigma[1], rel=1e-5)
    assert [f.fan_in for f in factors(model)] == [75, 16]


def test_it_can_be_mapped_over_rows() -> None:
    model = bayesian(net(), last=1).eval()
    params = dict(model.named_parameters())
    mapped = vmap(lambda row: functional_call(model, params, (row[None],))[0], randomness="same")(batch())
    torch.testing.assert_close(mapped, model(batch()))


# --- as data


def test_the_factory_rebuilds_it_from_a_spec() -> None:
    spec = Spec("bayesian", {"of": MLP, "last": 2, "bias": True, "draws": 3})
    model = Spec.from_json(spec.to_json()).build()
    assert isinstance(model, Bayesian)
    assert model.draws == 3
    assert [f.name for f in factors(model)] == [
        f"net.{n}" for n in ("fc1.weight", "fc1.bias", "classifier.weight", "classifier.bias")
    ]
    assert isinstance(build_bayesian(MLP), Bayesian)


def test_a_wrapped_factory_is_trusted_no_more_than_a_bare_one() -> None:
    evil = {"factory": "bayesian", "options": {"of": {"factory": "os:system", "options": {"command": "true"}}}}
    deeper = {"factory": "bayesian", "options": {"of": evil}}
    listed = {"factory": "mlp", "options": {"hidden": [evil]}}
    for data in (evil, deeper, listed):
        with pytest.raises(ConfigError, match="'os:system' is not one of fedfuse's and was not named here"):
            Spec.from_json(data)
    for odd in ("os:system", 3, None, ["os:system"]):
        with pytest.raises(ConfigError):
            Spec.from_json({"factory": "bayesian", "options": {"of": odd}}).build()
    mine = {"factory": "torch.nn:Linear", "options": {"in_features": 2, "out_features": 1}}
    assert isinstance(
        Spec.from_json({"factory": "bayesian", "options": {"of": mine}}, {"torch.nn:Linear"}).build(), Bayesian
    )


def test_roles_tell_spreads_from_weights_and_norms_follow_their_layers() -> None:
    layout = bayesian(resnet18(widths=0.0625), last=4).layout
    assert set(layout.log_variances) == {
        f"net.{n}.weight"
        for n in ("stage4.0.shortcut.conv", "stage4.1.body.conv1", "stage4.1.body.conv2", "classifier")
    }
    assert {layout.roles[n] for n in layout.log_variances.values()} == {"log_variance"}
    plain = Layout.of(resnet18(widths=0.0625))
    for layer, twin in zip(plain.layers, layout.layers, strict=True):
        assert twin.name == f"net.{layer.name}"
        assert twin.followers == tuple(f"net.{n}" for n in layer.followers)
    assert layout.layer_of("net.classifier.log_variance") == "net.classifier"


# --- the dress


def start(spec: Spec) -> Single:
    torch.manual_seed(2)
    return Single.of(spec.build(), spec)


def test_a_dressed_network_has_the_same_means_and_rebuilds_itself() -> None:
    first = start(Spec.from_json(MLP))
    dressed = BayesianLayers(last=1, draws=4)(first, 3, seed=0)
    assert all(dressed.posterior.mean[f"net.{n}"].equal(t) for n, t in first.posterior.mean.items())
    again = Spec.from_json(dressed.spec.to_json())
    assert again == dressed.spec
    assert Single(again, dressed.posterior).logits(batch()).equal(dressed.logits(batch()))
    assert BayesianLayers(last=2)(dressed, 3, seed=1) is dressed


def test_a_users_module_is_dressed_as_it_is() -> None:
    module = Branching()
    dressed = BayesianLayers(last=1)(Single.of(module, Spec.of(module)), 3, seed=0)
    assert dressed.spec.prototype is not None
    assert isinstance(dressed.spec.build(), Bayesian)
    assert dressed.spec.foreign == {Spec.of(module).factory}
    assert not isinstance(module.last, MeanField)


def test_the_released_start_is_clamped_and_never_learns() -> None:
    first = start(Spec("mlp", {"inputs": 400, "hidden": [], "classes": 50}))
    made = [BayesianLayers(released=True)(first, 50, seed=s).posterior.mean for s in (0, 0, 1)]
    weight, spread = (made[0][f"net.classifier.{n}"] for n in ("weight", "log_variance"))
    assert spread.mean() == pytest.approx(-9, abs=1e-3)
    assert spread.std() == pytest.approx(0.001, rel=0.05)
    assert weight.std() == pytest.approx(400**-0.5, rel=0.05)
    assert not made[0]["net.classifier.bias"].any()
    assert made[0]["net.classifier.weight"].equal(made[1]["net.classifier.weight"])
    assert not made[0]["net.classifier.weight"].equal(made[2]["net.classifier.weight"])
    layer = bayesian(nn.Linear(3, 2), released=True).net
    assert layer.clamp_log_variance(layer.log_variance).eq(RELEASED_BOUNDS[0]).all()
    layer(torch.ones(1, 3)).sum().backward()
    assert not layer.log_variance.grad.any()


@pytest.mark.parametrize("names", [(), ("fc1",)])
def test_the_spec_says_which_layers(names: Sequence[str]) -> None:
    dressed = BayesianLayers(last=2, layers=tuple(names))(start(Spec.from_json(MLP)), 3, seed=0)
    assert len(dressed.spec.layout.log_variances) == (len(names) or 2)

"""Ridge: the pooled solution from sums, whatever the partition, and the features below it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sklearn.linear_model import Ridge
from torch import Tensor, nn

import fedfuse
from fedfuse.core.messages import ClientUpdate, Cohort
from fedfuse.core.model import Single
from fedfuse.core.posterior import Kron
from fedfuse.core.rows import Rows
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench, ServerState
from fedfuse.errors import ConfigError, RecipeError
from fedfuse.methods.ridge import FitHead, RandomFeatures

ROWS, CLASSES = 90, 3


def network(bias: bool = True) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, CLASSES, bias=bias)).double()


def data(seed: int = 0) -> Rows:
    draw = torch.Generator().manual_seed(seed)
    y = torch.randint(CLASSES, (ROWS,), generator=draw)
    return Rows(torch.randn(ROWS, 4, generator=draw) + y[:, None], y)


def features(net: nn.Module, rows: Rows) -> Tensor:
    with torch.no_grad():
        return torch.cat([net[:-1](rows.x.double()), torch.ones(len(rows), 1, dtype=torch.float64)], 1)


def fused(net: nn.Module, parts: list[Rows], recipe: Any = "refit", **options: Any) -> fedfuse.api.Fused:
    recipe = fedfuse.recipe(recipe, **options)
    sites = [fedfuse.local_update(net, part, recipe, client=f"s{i}", classes=CLASSES) for i, part in enumerate(parts)]
    # vouched for, as an operator does whose sites are of very different size: else the door refuses the largest
    return fedfuse.fuse(sites, recipe, start=net.state_dict(), model=net, num_examples=[len(part) for part in parts])


def split(rows: Rows, cuts: list[int]) -> list[Rows]:
    return [rows.take(torch.arange(a, b)) for a, b in pairwise([0, *sorted(set(cuts)), ROWS])]


@pytest.mark.parametrize("bias", [True, False])
def test_the_fused_layer_is_scikit_learns_on_the_pooled_rows(bias: bool) -> None:
    net, rows = network(bias), data()
    model = fused(net, split(rows, [10, 11, 60]), penalty=1e-3, temperature=1.0)
    phi = features(net, rows) if bias else features(net, rows)[:, :-1]
    scale = float((phi.mT @ phi).diagonal().mean())
    targets = torch.nn.functional.one_hot(rows.y, CLASSES).double()
    theirs = Ridge(alpha=1e-3 * scale, fit_intercept=False, solver="cholesky").fit(phi.numpy(), targets.numpy())
    weights = model.state_dict()
    ours = torch.cat([weights["2.weight"], weights["2.bias"][:, None]], 1) if bias else weights["2.weight"]
    assert np.allclose(ours.numpy(), theirs.coef_, rtol=1e-8, atol=1e-8)
    assert weights["0.weight"].equal(net.state_dict()["0.weight"])


@pytest.mark.parametrize("task", ["binary", "multilabel", "regression"])
@pytest.mark.parametrize("bias", [True, False])
def test_other_targets_than_classes_are_fitted_as_scikit_learn_fits_them(task: str, bias: bool) -> None:
    rows, labels = data(), torch.nn.functional.one_hot(data().y, CLASSES)[:, :2].float()
    y = {"binary": rows.y.clamp(max=1), "multilabel": labels, "regression": 7 + labels @ torch.randn(2, 2)}[task]
    net = nn.Sequential(*network()[:-1], nn.Linear(6, 1 if task == "binary" else 2, bias=bias).double())
    sites = [
        fedfuse.local_update(net, (rows.x[part], y[part]), fedfuse.recipe("refit"), client=f"s{i}", task=task)
        for i, part in enumerate((slice(0, 30), slice(30, ROWS)))
    ]
    model = fedfuse.fuse(sites, fedfuse.recipe("refit", penalty=1e-3), start=net.state_dict(), model=net)
    phi = features(net, rows) if bias else features(net, rows)[:, :-1]
    signs = y.reshape(ROWS, -1).double() if task == "regression" else 2 * y.reshape(ROWS, -1).double() - 1
    scale = 1e-3 * float((phi.mT @ phi).diagonal().mean())
    theirs = Ridge(alpha=scale, fit_intercept=False, solver="cholesky").fit(phi.numpy(), signs.numpy())
    sharpness = 1 if task == "regression" else 10
    assert np.allclose(model.logits(rows.x).numpy(), sharpness * phi.numpy() @ theirs.coef_.reshape(-1, phi.shape[1]).T)


def test_yes_or_no_has_the_odds_of_two_classes() -> None:
    rows, answers = data(), []
    for task, outputs in (("binary", 1), ("classification", 2)):
        net = nn.Sequential(*network()[:-1], nn.Linear(6, outputs).double())
        y = rows.y.clamp(max=1)
        site = fedfuse.local_update(net, (rows.x, y), fedfuse.recipe("refit"), task=task, classes=2)
        recipe = fedfuse.recipe("refit", penalty=1e-2)
        answers.append(fedfuse.fuse([site], recipe, start=net.state_dict(), model=net).logits(rows.x))
    assert torch.allclose(answers[0].sigmoid()[:, 0], answers[1].softmax(1)[:, 1])


@settings(max_examples=15, deadline=None)
@given(
    cuts=st.lists(st.integers(1, ROWS - 1), max_size=4),
    seed=st.integers(0, 2),
    head=st.sampled_from(["ridge", "gaussian"]),
    rule=st.sampled_from(["gcv", "evidence", 1e-4]),
)
@example(cuts=[1, 2, 3, 4], seed=0, head="ridge", rule="gcv")
def test_any_split_of_the_rows_and_any_order_of_clients_gives_the_same_network(
    cuts: list[int], seed: int, head: str, rule: Any
) -> None:
    net, rows = network(), data()
    shuffled = rows.take(torch.randperm(ROWS, generator=torch.Generator().manual_seed(seed)))
    whole = fused(net, [rows], head=head, penalty=rule).state_dict()
    apart = fused(net, split(shuffled, cuts), head=head, penalty=rule).state_dict()
    for name, tensor in whole.items():
        assert torch.allclose(tensor, apart[name], rtol=1e-9, atol=1e-9), name


def test_the_posterior_is_that_of_bayesian_linear_regression() -> None:
    net, rows = network(), data()
    model = fused(net, [rows], penalty=1e-2, temperature=0.5)
    phi = features(net, rows)
    gram = phi.mT @ phi
    penalty = 1e-2 * float(gram.diagonal().mean())
    inverse = torch.linalg.inv(gram + penalty * torch.eye(7, dtype=torch.float64))
    left = torch.nn.functional.one_hot(rows.y, CLASSES).double() - phi @ inverse @ (
        phi.mT @ torch.nn.functional.one_hot(rows.y, CLASSES).double()
    )
    noise = float(left.square().sum(0).mean()) / (ROWS - float((inverse @ gram).trace()))
    assert model.facts["noise"] == pytest.approx(noise, rel=1e-9)
    single = model.model
    assert isinstance(single, Single)
    assert isinstance(single.posterior.geometry, Kron)
    expected = torch.einsum("nd,de,ne->n", phi, inverse, phi) * noise / 0.5**2
    found = model.variance(rows.x)
    assert found.shape == (ROWS, CLASSES)
    assert torch.allclose(found, expected[:, None].expand_as(found), rtol=1e-8)


def test_it_learns_what_can_be_learnt_and_says_how_hard_it_pulled() -> None:
    net, rows = network(), data()
    model = fused(net, split(rows, [20, 50]))
    right = (model.module(network())(data(5).x.double()).argmax(-1) == data(5).y).double().mean()
    assert right > 0.6
    assert model.facts["rows"] == ROWS
    assert 0 < model.facts["freedom"] <= 7


def test_it_says_what_it_cannot_fit() -> None:
    net = network()
    spec = Spec.of(net)
    state = ServerState(0, Single.of(net, spec))
    with pytest.raises(ConfigError, match="layer '0' has 6 outputs and the task classification has 3"):
        FitHead("0").check_network({"": spec}, Bench(classes=CLASSES), 1)
    trained = ClientUpdate("a", state.single.posterior, 1.0, 5, spec)
    with pytest.raises(RecipeError, match="a has trained, and a layer can be fitted only to features all clients"):
        FitHead("")(Cohort.of([trained]), state, Bench())
    with pytest.raises(ConfigError, match="has no bias, which the gaussian head needs"):
        fused(network(bias=False), [data()], head="gaussian")


def test_a_small_convolutional_network_is_refitted_alike_by_both_kernels() -> None:
    """Its head reads flattened images, which compiled code lays out otherwise: the layer must be that of torch's."""
    torch.manual_seed(2)
    net = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(27, CLASSES))
    draw = torch.Generator().manual_seed(3)
    y = torch.randint(CLASSES, (120,), generator=draw)
    x = torch.randn(120, 1, 8, 8, generator=draw)
    x[torch.arange(120), 0, 2 * y, 3] += 4.0
    recipe, found = fedfuse.recipe("refit", penalty=1e-2), []
    for kernel in ("auto", "torch"):
        sites = [
            fedfuse.local_update(net, Rows(x[k::2], y[k::2]), recipe, client=f"s{k}", classes=CLASSES, kernel=kernel)
            for k in range(2)
        ]
        model = fedfuse.fuse(sites, recipe, start=net.state_dict(), model=net)
        found.append(model.state_dict()["4.weight"])
        assert float((model.module()(x).argmax(1) == y).float().mean()) > 0.8
    assert torch.allclose(*found, atol=1e-4)


def single(spec: Spec) -> Single:
    return Single.of(spec.build(), spec)


def test_pictures_get_convolutions_and_tables_cosines() -> None:
    pictures = RandomFeatures(100)(single(Spec("lenet", {"channels": 3, "size": 32})), 7, seed=5)
    assert pictures.spec == Spec(
        "random_convolution", {"channels": 3, "size": 32, "filters": 6, "classes": 7, "seed": 5}
    )
    table = RandomFeatures(100)(single(Spec("mlp", {"inputs": 13, "classes": 2})), 0, seed=5)
    assert table.spec == Spec("random_fourier", {"inputs": 13, "features": 100, "classes": 2, "seed": 5})
    assert RandomFeatures(3)(table, 2, seed=9) is table
    with pytest.raises(ConfigError, match="does not say what an input looks like"):
        RandomFeatures()(single(Spec.of(nn.Linear(3, 2))), 2, seed=0)


def test_files_need_no_start_where_it_follows_from_the_seed() -> None:
    draw = torch.Generator().manual_seed(0)
    rows = Rows(torch.rand(30, 1, 8, 8, generator=draw), torch.arange(30) % 3)
    spec, recipe = Spec("lenet", {"size": 8, "classes": 3}), fedfuse.recipe("ridge", features=32)
    sites = [
        fedfuse.local_update(spec, rows.take(part), recipe, client=c)
        for c, part in zip("ab", torch.arange(30).split(15), strict=True)
    ]
    model = fedfuse.fuse(sites, recipe)
    assert model.module()(rows.x).shape == (30, 3)
    other = fedfuse.local_update(spec, rows, recipe, client="c", seed=1)
    assert [r["client"] for r in fedfuse.fuse([*sites, other], recipe).refused] == ["c"]
    refit = fedfuse.recipe("refit")
    with pytest.raises(RecipeError, match="needs the weights the sites started from"):
        fedfuse.fuse([fedfuse.local_update(spec, rows, refit)], refit)

"""Regions of features: the distance by its equation, through a mixture, through files and through every door."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from fedfuse.api import fuse, local_update, recipe
from fedfuse.core.model import Single
from fedfuse.core.rows import Rows
from fedfuse.core.spec import Spec
from fedfuse.errors import ConfigError
from fedfuse.linalg.ridge import Sums
from fedfuse.nets.forward import AtLayer, Nearest
from fedfuse.nets.mixture import DAMPING, FeatureRegion, Mixture
from fedfuse.wire.files import load_model, save_model

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

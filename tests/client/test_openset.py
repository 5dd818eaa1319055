"""FedOV's objective, term by term, against values worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedfuse.core.messages import Brief
from fedfuse.core.rows import Rows
from fedfuse.core.settings import LocalSettings
from fedfuse.core.spec import Spec
from fedfuse.core.state import Local
from fedfuse.errors import RecipeError
from fedfuse.methods.fedov import OpenSet, make_outliers, with_mixed


def local(module: nn.Module, classes: int, rows: Rows) -> Local:
    brief = Brief(0, Spec.of(module), {n: t.clone() for n, t in module.state_dict().items()}, classes=classes)
    return Local("a", brief, rows, LocalSettings(), module, {}, seed=3)


def test_the_five_terms_by_hand() -> None:
    """Two classes and "unknown"; one row of each kind, logits chosen so that each term has a closed form."""
    own = torch.tensor([[math.log(2), 0.0, math.log(3)]])
    odd = torch.tensor([[0.0, 0.0, math.log(2)]])
    moved = torch.tensor([[0.0, 0.0, 0.0]])
    mixed = torch.tensor([[0.0, math.log(4), 0.0]])
    y = torch.tensor([0])
    closed = -math.log(2 / 6)  # the true class has 2 of 2 + 1 + 3
    without = -math.log(3 / 4)  # the true class removed: 3 of 1 + 3
    outlier, adversarial = -math.log(2 / 4), -math.log(1 / 3)
    blend = -math.log(1 / 6)
    loss = OpenSet(mix=0.5).loss(torch.cat([own, odd, moved]), mixed, y, torch.tensor([True]))
    assert float(loss) == pytest.approx(closed + without + outlier + adversarial + 0.5 * blend, rel=1e-6)
    alike = OpenSet(mix=0.5).loss(torch.cat([own, odd, moved]), mixed, y, torch.tensor([False]))
    assert float(alike) == pytest.approx(closed + without + outlier + adversarial, rel=1e-6)


def test_only_pairs_of_different_classes_are_mixed() -> None:
    z, mixed = torch.randn(12, 4), torch.randn(4, 4)
    y, differ = torch.tensor([0, 1, 2, 1]), torch.tensor([True, False, True, False])
    extra = OpenSet(mix=1.0).loss(z, mixed, y, differ) - OpenSet(mix=0.0).loss(z, mixed, y, differ)
    expected = F.cross_entropy(mixed[[0, 2]], torch.tensor([3, 3]))
    assert float(extra) == pytest.approx(float(expected), rel=1e-5)


def linear_unknown() -> nn.Sequential:
    """z_unknown = −Σ x, the others 0: the adversary's gradient has a known sign everywhere."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    with torch.no_grad():
        net[1].weight.zero_()
        net[1].weight[2] = -1.0
        net[1].bias.zero_()
    return net


def test_the_adversary_walks_against_the_unknown() -> None:
    rows = Rows(torch.rand(4, 1, 4, 4), torch.tensor([0, 1, 0, 1]))
    odd = torch.rand(4, 1, 4, 4)
    free = OpenSet(steps=5, stride=0.01, reach=1.0).move_outliers(local(linear_unknown(), 2, rows), odd)
    assert torch.allclose(free, odd + 0.05, atol=1e-6), "more brightness looks less unknown, five steps of it"
    held = OpenSet(steps=5, stride=0.01, reach=0.02).move_outliers(local(linear_unknown(), 2, rows), odd)
    assert torch.allclose(held, odd + 0.02, atol=1e-6)
    assert not free.requires_grad


def test_mixed_features_pass_through_the_later_layers() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    x, order = torch.randn(8, 4), torch.tensor([2, 0, 1])
    z, mixed = with_mixed(net, x, 3, order, 0.3)
    assert torch.allclose(z, net(x), atol=1e-6)
    h = net[1](net[0](x[:3]))  # what the last but one linear layer reads
    expected = net[4](net[3](net[2](0.3 * h + 0.7 * h[order])))
    assert torch.allclose(mixed, expected, atol=1e-6)


def test_one_pass_serves_batch_norms() -> None:
    """Rows, outliers and moved outliers share one batch, so a norm's statistics are of all of them."""
    net = nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(16, 3))
    seen: list[int] = []
    net[0].register_forward_hook(lambda m, args, out: seen.append(len(args[0])) if m.training else None)
    rows = Rows(torch.rand(6, 1, 4, 4), torch.arange(6) % 2)
    OpenSet()(local(net, 2, rows), (rows.x, rows.y))
    assert seen == [18]


def test_the_whole_loss_is_its_parts() -> None:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3))
    rows = Rows(torch.rand(5, 1, 4, 4), torch.tensor([0, 1, 1, 0, 1]))
    at_work, rule = local(net, 2, rows), OpenSet(mix=0.2)
    got = rule(at_work, (rows.x, rows.y))
    draw = at_work.stream("openset")
    odd = make_outliers(rows.x, draw)
    moved = rule.move_outliers(at_work, odd)
    order, share = torch.randperm(5, generator=draw), float(torch.rand((), generator=draw))
    h = net[2](net[1](rows.x.flatten(1)))
    mixed = net[3](share * h + (1 - share) * h[order])
    z = net(torch.cat([rows.x, odd, moved]))
    assert torch.allclose(got, rule.loss(z, mixed, rows.y, rows.y != rows.y[order]), rtol=1e-5)
    slopes: list[Tensor] = list(torch.autograd.grad(got, list(net.parameters())))
    assert all(s.isfinite().all() for s in slopes)


def test_a_network_without_the_output_is_refused() -> None:
    rows = Rows(torch.rand(4, 1, 4, 4), torch.tensor([0, 1, 2, 1]))
    with pytest.raises(RecipeError, match="a network with 3 outputs has none for the unknown, with 3 classes"):
        OpenSet()(local(linear_unknown(), 3, rows), (rows.x, rows.y))
    with pytest.raises(RecipeError, match="no linear layer"):
        with_mixed(nn.Conv2d(1, 1, 3), torch.zeros(1, 1, 3, 3), 1, torch.tensor([0]), 0.5)

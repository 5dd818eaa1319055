"""Channels: groups of axes move, shrink and grow together, for every network shipped and for odd ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedfuse.client.kfac import kronecker_factors
from fedfuse.core.params import Layout, Params
from fedfuse.core.posterior import Diag, Flat, Kron, Posterior
from fedfuse.core.rows import Rows
from fedfuse.core.spec import Spec
from fedfuse.errors import ConfigError
from fedfuse.linalg.factor import dense
from fedfuse.nets.channels import (
    EMPTY,
    Group,
    Location,
    carry_over,
    channel_groups,
    keep_channels,
    keep_units,
    move_posterior_units,
    move_units,
    permute_group,
    units_left_out,
)
from fedfuse.nets.kronecker import blocks_of
from odd_networks import Cumulative

SHIPPED: list[tuple[str, dict[str, Any], tuple[int, ...]]] = [
    ("mlp", {"inputs": 64, "hidden": [9, 7]}, (1, 8, 8)),
    ("lenet", {}, (1, 28, 28)),
    ("lenet", {"head": 12}, (1, 28, 28)),
    ("convnet_ams", {"widths": [4, 5, 6], "hidden": [8]}, (3, 32, 32)),
    ("convnet_feddu", {"widths": [4, 5, 6], "hidden": [8]}, (3, 32, 32)),
    ("vgg11", {"widths": 0.1, "hidden": [12, 11], "norm": True}, (3, 32, 32)),
    ("vgg11", {"widths": 0.1, "hidden": [12, 11], "norm": False}, (3, 32, 32)),
    ("vgg16", {"widths": 0.1, "hidden": [12, 11], "norm": True}, (3, 32, 32)),
    ("vgg16", {"widths": 0.1, "hidden": [12, 11], "norm": False}, (3, 32, 32)),
    ("resnet18", {"widths": 0.1}, (3, 8, 8)),
    ("resnet50", {"widths": 0.05, "bias": True}, (3, 8, 8)),
]


def drawn(spec: Spec, seed: int = 0) -> dict[str, Tensor]:
    """Weights and statistics among which no two units are alike."""
    draw = torch.Generator().manual_seed(seed)
    values = {}
    for name, t in spec.build().state_dict().items():
        noise = torch.rand(t.shape, generator=draw) if t.is_floating_point() else t
        positive = name.endswith("running_var") or (t.ndim == 1 and name.endswith("weight"))
        scale = (6 / max(1, t[0].numel())) ** 0.5 if t.ndim > 1 else 1.0
        values[name] = (noise + 0.5 if positive else (2 * noise - 1) * scale) if t.is_floating_point() else t
    return values


def inputs(shape: tuple[int, ...], rows: int = 3) -> Tensor:
    return torch.randn(rows, *shape, generator=torch.Generator().manual_seed(1))


def shuffled(group: Group, seed: int = 0) -> Tensor:
    draw, room = torch.Generator().manual_seed(seed), group.size // group.sections
    cycles = [torch.randperm(room, generator=draw) for _ in range(group.sections)]
    return torch.cat([k * room + c.roll(1)[c.argsort()] for k, c in enumerate(cycles)])  # everybody moves


def assert_same_function(spec: Spec, a: Params, b: Params, shape: tuple[int, ...], tolerance: float = 1e-5) -> None:
    x = inputs(shape)
    one, other = spec.forward(a, x), spec.forward(b, x)
    assert float((one - other).abs().max()) <= tolerance * max(1.0, float(one.abs().max()))


@pytest.mark.parametrize(("factory", "options", "shape"), SHIPPED)
def test_any_order_of_any_group_is_the_same_function(
    factory: str, options: dict[str, Any], shape: tuple[int, ...]
) -> None:
    spec = Spec(factory, options | ({"size": shape[-1], "channels": shape[0]} if factory != "mlp" else {}))
    weights, groups = drawn(spec), channel_groups(spec, shape)
    hidden = {n for n, r in spec.layout.roles.items() if r != "counter"} - {"classifier.bias", "classifier.logits.bias"}
    assert {p.tensor for g in groups for p in g.locations} == hidden
    for group in groups:
        moved = permute_group(weights, group, shuffled(group))
        assert any(not moved[n].equal(weights[n]) for n in weights)
        assert_same_function(spec, weights, moved, shape)
    every = move_units(weights, {group: shuffled(group) for group in groups})
    assert_same_function(spec, weights, every, shape)


@pytest.mark.parametrize(("factory", "options", "shape"), SHIPPED)
def test_a_removed_unit_is_one_nobody_reads(factory: str, options: dict[str, Any], shape: tuple[int, ...]) -> None:
    spec = Spec(factory, options | ({"size": shape[-1], "channels": shape[0]} if factory != "mlp" else {}))
    weights, groups = drawn(spec), channel_groups(spec, shape)
    units = {g: [u for u in range(g.size) if u % 3] or [0] for g in groups}
    deaf = dict(weights)
    for group in groups:
        gone = [u for u in range(group.size) if u not in units[group]]
        for place in group.readers:
            positions = [place.offset + u * place.per + k for u in gone for k in range(place.per)]
            deaf[place.tensor] = deaf[place.tensor].index_fill(place.axis, torch.tensor(positions, dtype=torch.long), 0)
    small, rest = keep_channels(spec, weights, units)
    x = inputs(shape)
    want = spec.forward(deaf, x)
    assert float((small.forward(rest, x) - want).abs().max()) <= 1e-5 * max(1.0, float(want.abs().max()))
    assert Spec.from_json(small.to_json()).shapes() == {n: (tuple(t.shape), t.dtype) for n, t in rest.items()}


def test_groups_are_in_the_networks_order_and_named_after_their_makers() -> None:
    groups = channel_groups(Spec("resnet18", {"widths": [2, 3, 4, 5]}), (3, 16, 16))
    assert [g.size for g in groups] == [2, 2, 2, 3, 3, 3, 4, 4, 4, 5, 5, 5]
    assert groups[0].name == "conv1"
    assert "stage1.1.body.conv2.weight" in {p.tensor for p in groups[0].makers}


def test_a_pruned_spec_has_groups_of_its_own_and_remembers_the_first_channels() -> None:
    spec = Spec("lenet")
    conv1, conv2, *_ = channel_groups(spec, (1, 28, 28))
    once, weights = keep_channels(spec, drawn(spec), {conv1: [0, 2, 5], conv2: [1, 3]})
    again = channel_groups(once, (1, 28, 28))
    assert [g.size for g in again] == [3, 2, 120, 84]
    twice, _ = keep_channels(once, weights, {again[0]: [1, 2]})
    assert twice.kept == {"conv1": (2, 5), "conv2": (1, 3)}


def test_growing_changes_nothing_and_keeping_undoes_it() -> None:
    spec = Spec("vgg11", {"widths": 0.1, "hidden": [12, 11], "norm": True, "dropout": 0.0})
    weights = drawn(spec)
    for group in channel_groups(spec, (3, 32, 32)):
        wide = move_units(weights, {group: [*range(group.size), EMPTY, EMPTY]})
        bigger = spec.with_shapes_of(wide)
        x = inputs((3, 32, 32))
        assert torch.allclose(bigger.forward(wide, x), spec.forward(weights, x), atol=1e-5)
        (same,) = (g for g in channel_groups(bigger, (3, 32, 32)) if g.name == group.name)
        back = keep_units(wide, same, range(group.size))
        assert all(back[n].equal(weights[n]) for n in weights)


def test_log_variances_move_with_their_means() -> None:
    inner = Spec("mlp", {"inputs": 4, "hidden": [5], "classes": 3})
    spec = Spec("bayesian", {"of": inner.to_json(), "last": 2, "bias": True})
    (group,) = channel_groups(spec, (4,))
    assert {(p.tensor, p.axis) for p in group.locations} == {
        *(("net.fc1.weight", 0), ("net.fc1.bias", 0), ("net.fc1.log_variance", 0), ("net.fc1.bias_log_variance", 0)),
        *(("net.classifier.weight", 1), ("net.classifier.log_variance", 1)),
    }
    weights, order = drawn(spec), torch.tensor([3, 1, 4, 0, 2])
    moved = permute_group(weights, group, order)
    assert moved["net.fc1.log_variance"].equal(weights["net.fc1.log_variance"][order])
    assert moved["net.classifier.log_variance"].equal(weights["net.classifier.log_variance"][:, order])
    wide = move_units(weights, {group: [*range(5), EMPTY]})
    assert float(wide["net.fc1.log_variance"][5].max()) == float(weights["net.fc1.log_variance"].min())


class Branches(nn.Module):
    """Two convolutions side by side, flattened into one linear layer, with a norm in between."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Conv2d(2, 3, 3), nn.Conv2d(2, 5, 3)
        self.norm = nn.BatchNorm2d(8)
        self.out = nn.Linear(8 * 4, 4)

    def forward(self, x: Tensor) -> Tensor:
        both = torch.cat([self.left(x), self.right(x)], 1)
        return self.out(self.norm(both).relu().flatten(1))


class Grouped(nn.Module):
    """A grouped, a depthwise and a plain convolution with GroupNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.grouped = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 12, 3, groups=2)
        self.norm = nn.GroupNorm(4, 12)
        self.deep, self.last = nn.Conv2d(12, 12, 1, groups=12), nn.Conv2d(12, 6, 1)
        self.out = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.grouped(self.first(x).relu())).relu()
        return self.out(self.last(self.deep(x).relu()).relu().mean((2, 3)))


class Sums(nn.Module):
    """A residual addition of a concatenation: two groups of which each stands in a part of a third layer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 3), nn.Linear(4, 2), nn.Linear(4, 5)
        self.norm, self.out = nn.LayerNorm(5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(torch.cat([self.a(x), self.b(x)], 1) + self.c(x)).relu())


class Twice(nn.Module):
    """One layer used twice, and its output beside itself."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.again, self.out = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(12, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.again(self.again(self.enter(x)).relu()).relu()
        return self.out(torch.cat([x, x], 1))


class BackToInput(nn.Module):
    """What is added to the input, or stands beside it, is the input's business."""

    def __init__(self) -> None:
        super().__init__()
        self.same, self.beside, self.out = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 4, 1), nn.Linear(7, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.cat([x + self.same(x), self.beside(x).relu()], 1).mean((2, 3)))


def test_concatenations_shift_what_comes_behind() -> None:
    spec = Spec.of(Branches())
    left, right = channel_groups(spec, (2, 4, 4))
    assert Location("out.weight", 1, per=4, offset=12, reads=True) in right.locations
    assert Location("norm.running_var", 0, offset=3) in right.locations
    small, rest = keep_channels(spec, drawn(spec), {left: [0, 2], right: [1, 4]})
    deaf = drawn(spec)
    gone = torch.tensor([p for u in (1, 3, 5, 6) for p in range(4 * u, 4 * u + 4)])
    deaf["out.weight"] = deaf["out.weight"].index_fill(1, gone, 0)
    x = inputs((2, 4, 4))
    assert torch.allclose(small.forward(rest, x), spec.forward(deaf, x), atol=1e-5)


@pytest.mark.parametrize(
    ("module", "shape", "sizes"),
    [
        (Branches(), (2, 4, 4), [(3, 1), (5, 1)]),
        (Grouped(), (3, 7, 7), [(8, 2), (12, 4), (6, 1)]),
        (Sums(), (4,), [(3, 1), (2, 1)]),
        (Twice(), (4,), [(6, 1)]),
        (BackToInput(), (3, 5, 5), [(4, 1)]),
        (nn.Sequential(nn.Conv1d(2, 4, 2), nn.PReLU(4), nn.Flatten(), nn.Linear(12, 2)), (2, 4), [(4, 1)]),
        (
            nn.Sequential(nn.Conv2d(1, 4, 2), nn.ConvTranspose2d(4, 3, 2), nn.Conv2d(3, 1, 1)),
            (1, 5, 5),
            [(4, 1), (3, 1)],
        ),
        (nn.Linear(4, 2), (4,), []),
    ],
    ids=["concat", "groups", "sums", "twice", "input", "conv1d", "transposed", "none"],
)
def test_odd_networks_are_followed(module: nn.Module, shape: tuple[int, ...], sizes: list[tuple[int, int]]) -> None:
    spec = Spec.of(module)
    groups, weights = channel_groups(spec, shape), drawn(Spec.of(module))
    assert [(g.size, g.sections) for g in groups] == sizes
    for group in groups:
        moved = permute_group(weights, group, shuffled(group))
        assert any(not moved[n].equal(weights[n]) for n in weights)
        assert_same_function(spec, weights, moved, shape)


def test_what_a_grouped_convolution_reads_is_removed_evenly() -> None:
    spec = Spec.of(Grouped())
    first, *_ = channel_groups(spec, (3, 7, 7))
    assert Location("grouped.weight", 1, blocks=2, reads=True) in first.locations
    deaf = weights = drawn(spec)
    deaf = {**weights, "grouped.weight": weights["grouped.weight"].clone()}
    deaf["grouped.weight"][:6, 1] = 0  # channel 1 of the first half
    deaf["grouped.weight"][6:, 3] = 0  # channel 7, the last of the second
    small, rest = keep_channels(spec, weights, {first: [0, 2, 3, 4, 5, 6]})
    x = inputs((3, 7, 7))
    assert torch.allclose(small.forward(rest, x), spec.forward(deaf, x), atol=1e-5)
    with pytest.raises(ConfigError, match="sections of 4 units"):
        keep_units(weights, first, [0, 1, 2, 5])
    with pytest.raises(ConfigError, match="cannot trade places"):
        permute_group(weights, first, [4, 1, 2, 3, 0, 5, 6, 7])


def test_a_place_tells_all_it_knows_of_each_unit() -> None:
    weights = drawn(Spec.of(Grouped()))
    rows = Location("grouped.weight", 1, blocks=2).rows(weights, 8)
    assert rows[5].equal(weights["grouped.weight"][6:, 1].flatten())
    assert Location("out.weight", 1, offset=2).rows(weights, 3)[1].equal(weights["out.weight"][:, 3])


class ByHand(Cumulative):
    """A network that says which groups it has: none."""

    channel_groups = ()


class Wrong(nn.Sequential):
    """A network that claims a group it does not have."""

    channel_groups = (Group("0", 6, (Location("0.weight", 0),)),)


def test_inputs_that_a_network_cannot_read_are_named() -> None:
    with pytest.raises(ConfigError, match=r"cannot be followed with an input of shape \(5,\)"):
        channel_groups(Spec.of(Cumulative()), (5,))


def test_groups_given_by_hand_are_taken_and_held_to() -> None:
    assert channel_groups(ByHand(), (4,)) == ()
    with pytest.raises(ConfigError, match="moving the units of '0' changes"):
        channel_groups(Wrong(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)), (4,))


def test_orders_that_are_none_are_refused() -> None:
    group = Group("fc1", 3, (Location("fc1.weight", 0),))
    net = {"fc1.weight": torch.eye(3)}
    for order in ([0, 1], [0, 1, 1], [0, 1, 3], [-2, 0, 1]):
        with pytest.raises(ConfigError, match="fc1"):
            permute_group(net, group, order)
    for units in ([], [1, 1], [-1], [3]):
        with pytest.raises(ConfigError, match="fc1"):
            keep_units(net, group, units)
    with pytest.raises(ConfigError, match="which the weights do not have"):
        permute_group({}, group, [2, 1, 0])
    with pytest.raises(ConfigError, match="of another network"):
        permute_group({"fc1.weight": torch.eye(2)}, group, [2, 1, 0])


class Upwards(nn.Module):
    """A transposed convolution between a convolution and a norm over two axes."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(2, 4, 2), nn.ConvTranspose2d(4, 3, 3, stride=2)
        self.norm, self.out = nn.BatchNorm2d(3), nn.Linear(3 * 5 * 5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(self.up(torch.relu(self.down(x)))).relu().flatten(1))


@pytest.mark.parametrize(
    ("spec", "shape"),
    [
        (Spec("lenet", {"size": 8, "hidden": [7]}), (1, 8, 8)),
        (Spec.of(Grouped()), (3, 7, 7)),
        (Spec.of(Upwards()), (2, 3, 3)),
    ],
    ids=["lenet", "groups", "transposed"],
)
def test_kronecker_factors_follow_their_units(spec: Spec, shape: tuple[int, ...]) -> None:
    """The factors of the moved network are the moved factors of the network."""
    groups = channel_groups(spec, shape)
    moves = {g: shuffled(g, 3) for g in groups}
    rows = Rows(inputs(shape, 6), torch.tensor([0, 1, 0, 1, 1, 0]))

    def factors(weights: Params) -> dict[str, tuple[Tensor, Tensor]]:
        net = spec.build().double().eval()
        net.load_state_dict({n: t.double() for n, t in weights.items()})
        found = kronecker_factors(net, blocks_of(spec), Rows(rows.x.double(), rows.y))
        return {n: (A[0], B[0]) if len(A) == 1 else (A, B) for n, (A, B) in found.items()}

    weights = drawn(spec)
    posterior = move_posterior_units(Posterior(weights, Kron(factors(weights))), moves, spec.layout)
    assert isinstance(posterior.geometry, Kron)
    again = factors(posterior.mean)
    assert set(again) == set(posterior.geometry.factors)
    for layer, (A, B) in posterior.geometry.factors.items():
        for moved, expected in zip((A, B), again[layer], strict=True):
            assert torch.allclose(dense(moved), dense(expected), rtol=1e-8, atol=1e-12)


def test_variances_follow_their_units_and_no_geometry_grows() -> None:
    group = Group("fc1", 2, (Location("fc1.weight", 0), Location("fc2.weight", 1, reads=True)))
    net = {"fc1.weight": torch.tensor([[1.0], [2.0]]), "fc2.weight": torch.tensor([[3.0, 4.0]])}
    posterior = Posterior(net, Diag({"fc2.weight": torch.tensor([[0.1, 0.2]])}))
    layout = Layout.guess(net)
    moved = move_posterior_units(posterior, {group: [1, 0]}, layout)
    assert isinstance(moved.geometry, Diag)
    assert moved.geometry.variance["fc2.weight"].equal(torch.tensor([[0.2, 0.1]]))
    with pytest.raises(ConfigError, match="cannot grow"):
        move_posterior_units(posterior, {group: [1, 0, -1]}, layout)
    plain = move_posterior_units(replace(posterior, geometry=Flat()), {group: [0]}, layout)
    assert plain.geometry == Flat()


class Twins(nn.Module):
    """Two branches that share their weights, and meet in a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.top = nn.Linear(4, 6), nn.Linear(4, 6), nn.Linear(6, 2)
        self.right.weight, self.right.bias = self.left.weight, self.left.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.top(self.left(x).relu() + self.right(-x).relu())


class Mirror(nn.Module):
    """What the embedding made, its own weight reads."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 4)
        self.outer.weight = self.inner.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.inner(x).relu()).relu().sum(1, keepdim=True)


def test_tied_weights_that_move_as_one_are_followed_exactly() -> None:
    torch.manual_seed(0)
    net, x = Twins(), torch.randn(5, 4)
    (group,) = channel_groups(Spec.of(net), (4,))
    weights = permute_group(dict(net.state_dict()), group, torch.arange(5, -1, -1))
    assert weights["left.weight"].equal(weights["right.weight"])
    assert not weights["left.weight"].equal(net.left.weight)
    assert torch.allclose(Spec.of(net).forward(weights, x), net(x), atol=1e-6)
    small, fewer = keep_channels(Spec.of(net), weights, {group: [0, 2]})
    assert small.layout.tied == Spec.of(net).layout.tied
    assert small.forward(fewer, x).shape == (5, 2)


def test_tied_weights_that_cannot_move_apart_are_named() -> None:
    assert channel_groups(Spec.of(Mirror()), (4,)) == ()
    assert units_left_out(Spec.of(Mirror()), (4,)) == ("inner.weight (bound to positions)",)


SHAPE = (1, 8, 8)
NETS = [
    Spec("lenet", {"size": 8, "maps": [6, 8], "hidden": [10], "classes": 3}),
    Spec("resnet18", {"channels": 1, "widths": 0.1, "classes": 3}),
]


def some(size: int, share: float, seed: int) -> list[int]:
    count = max(1, int(size * share))
    return sorted(torch.randperm(size, generator=torch.Generator().manual_seed(seed))[:count].tolist())


@pytest.mark.parametrize("spec", NETS, ids=lambda spec: spec.factory)
def test_it_is_the_same_surgery_once_or_twice(spec: Spec) -> None:
    params = dict(spec.build().state_dict())
    first = {g: some(g.size, 0.7, i) for i, g in enumerate(channel_groups(spec, SHAPE))}
    small, weights = keep_channels(spec, params, first)
    second = {g: some(g.size, 0.7, i) for i, g in enumerate(channel_groups(small, SHAPE))}
    smaller, expected = keep_channels(small, weights, second)
    for remembered, before in ((params, {}), (weights, small.kept), (expected, smaller.kept)):
        moved = carry_over(remembered, before, smaller, SHAPE)
        assert moved is not None
        assert all(moved[n].equal(t) for n, t in expected.items())


def test_what_was_not_there_before_cannot_be_carried() -> None:
    spec = NETS[0]
    params = dict(spec.build().state_dict())
    (conv, *_) = channel_groups(spec, SHAPE)
    small, weights = keep_channels(spec, params, {conv: [0, 1]})
    other, _ = keep_channels(spec, params, {conv: [1, 2]})
    assert carry_over(weights, small.kept, other, SHAPE) is None
    assert carry_over(weights, {}, other, SHAPE) is None
    assert carry_over({"elsewhere": torch.ones(1)}, {}, small, SHAPE) is None
    assert carry_over(params, {}, small, (9, 9)) is None

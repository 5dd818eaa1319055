"""Roles, layers and followers, read off modules and guessed from names."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor, nn

from fedfuse.core.params import Layout, squared_distance
from fedfuse.models import resnet18


@pytest.fixture
def resnet() -> nn.Module:
    return resnet18(widths=(2, 2, 4, 4), size=8)


def test_every_tensor_of_the_state_dict_has_a_role(resnet: nn.Module) -> None:
    assert set(Layout.of(resnet).roles) == set(resnet.state_dict())


def test_roles_follow_the_kind_of_module_not_the_name(resnet: nn.Module) -> None:
    roles = Layout.of(resnet).roles
    for path, part in resnet.named_modules():
        if isinstance(part, nn.BatchNorm2d):
            assert roles[f"{path}.weight"] == roles[f"{path}.bias"] == "norm"
            assert roles[f"{path}.running_mean"] == roles[f"{path}.running_var"] == "statistic"
            assert roles[f"{path}.num_batches_tracked"] == "counter"
        elif isinstance(part, nn.Conv2d | nn.Linear):
            assert roles[f"{path}.weight"] == "weight"


def test_a_norm_follows_the_convolution_whose_output_it_reads(resnet: nn.Module) -> None:
    """The oracle is a forward pass: the norm's input is the very tensor some convolution has just put out."""
    layout, made, reads = Layout.of(resnet), {}, {}
    paths = {id(part): path for path, part in resnet.named_modules()}

    def put_out(part: nn.Module, _: object, out: Tensor) -> None:
        made[id(out)] = (paths[id(part)], out)

    def take_in(part: nn.Module, args: tuple[Tensor]) -> None:
        reads[paths[id(part)]] = made[id(args[0])][0]

    for part in resnet.modules():
        if isinstance(part, nn.Conv2d):
            part.register_forward_hook(put_out)
        elif isinstance(part, nn.BatchNorm2d):
            part.register_forward_pre_hook(take_in)
    resnet(torch.zeros(2, 3, 8, 8))
    assert len(reads) == 20
    for norm, conv in reads.items():
        for leaf in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked"):
            assert layout.layer_of(f"{norm}.{leaf}") == conv


class Residual(nn.Module):
    """A residual network whose parts are registered, and so stand in its state dict, in any order one likes."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        parts = {
            "stem": nn.Conv2d(1, 2, 3, padding=1),
            "stem_norm": nn.BatchNorm2d(2),
            "up": nn.Conv2d(2, 4, 3, padding=1),
            "up_norm": nn.BatchNorm2d(4),
            "on": nn.Conv2d(4, 4, 3, padding=1, bias=False),
            "on_norm": nn.BatchNorm2d(4),
            "short": nn.Conv2d(2, 4, 1),
            "short_norm": nn.GroupNorm(2, 4),
            "fc": nn.Linear(4, 3),
        }
        for name in random.Random(seed).sample(list(parts), len(parts)):
            self.add_module(name, parts[name])

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem_norm(self.stem(x)).relu()
        body = self.on_norm(self.on(self.up_norm(self.up(x)).relu()))
        return self.fc((body + self.short_norm(self.short(x))).relu().mean((2, 3)))


class Untraceable(nn.Module):
    """Its path depends on the values it sees, which symbolic tracing cannot follow."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.fc = nn.Conv1d(1, 2, 3), nn.BatchNorm1d(2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm(self.conv(x)).mean(-1)
        return self.fc(out) if out.sum() > 0 else out


@pytest.mark.parametrize("seed", range(8))
def test_followers_come_from_the_data_flow_not_from_the_order_of_the_state_dict(seed: int) -> None:
    module = Residual(seed)
    layout = Layout.of(module)
    assert set(layout.roles) == set(module.state_dict())
    for name in module.state_dict():
        assert layout.layer_of(name) == name.partition(".")[0].removesuffix("_norm")
    assert layout.roles["short_norm.bias"] == "norm"


def test_a_network_that_cannot_be_traced_falls_back_on_the_order_of_registration() -> None:
    module = Untraceable()
    with pytest.raises(torch.fx.proxy.TraceError):
        torch.fx.symbolic_trace(module)
    layout = Layout.of(module)
    assert layout.layer_of("norm.running_var") == "conv"
    assert [(layer.name, layer.kind, layer.bias) for layer in layout.layers] == [
        ("conv", "conv", "conv.bias"),
        ("fc", "linear", "fc.bias"),
    ]


def test_layer_matrix_is_weight_beside_bias_and_splits_back() -> None:
    module = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(12, 4, bias=False))
    params = {n: t.detach() for n, t in module.state_dict().items()}
    conv, fc = Layout.of(module).layers
    matrix = conv.matrix(params)
    assert matrix.shape == (3, 19)
    assert matrix[1, -1] == params["0.bias"][1]
    patch = torch.randn(1, 2, 3, 3)
    assert torch.allclose(matrix @ torch.cat([patch.flatten(), torch.ones(1)]), module[0](patch).flatten(), atol=1e-6)
    for layer in (conv, fc):
        back = layer.split(layer.matrix(params).double(), params)
        assert all(back[n].equal(params[n]) and back[n].dtype == params[n].dtype for n in back)
        assert set(back) == {layer.weight, layer.bias} - {None}


def test_parameters_of_a_users_own_module_have_roles_too() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.shift = nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(3))
            self.register_buffer("seen", torch.zeros(3))
            self.register_buffer("hidden", torch.zeros(3), persistent=False)

    layout = Layout.of(Own())
    assert dict(layout.roles) == {"table": "weight", "shift": "bias", "seen": "statistic"}
    assert [(layer.name, layer.kind) for layer in layout.layers] == [("table", "other")]
    assert layout.layer_of("shift") is None


@pytest.mark.parametrize("order", [sorted, list, lambda names: sorted(names, reverse=True)])
def test_guessed_biases_stay_with_their_weight_whatever_the_order(order: object) -> None:
    state = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2), nn.Conv1d(2, 2, 1)).state_dict()
    layout = Layout.guess({n: state[n] for n in order(list(state))})  # type: ignore[operator]
    assert {layer.weight: (layer.bias, layer.kind, layer.followers) for layer in layout.layers} == {
        "0.weight": ("0.bias", "linear", ()),
        "1.weight": ("1.bias", "linear", ()),
        "2.weight": ("2.bias", "conv", ()),
    }


def test_guess_agrees_with_the_module_where_norms_stand_behind_their_layer() -> None:
    module = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(2, 2), nn.LayerNorm(2))
    exact, guessed = Layout.of(module), Layout.guess(module.state_dict())
    assert dict(guessed.roles) == dict(exact.roles)
    assert guessed.layers == exact.layers


def test_with_role_lists_names() -> None:
    layout = Layout.of(nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1)))
    assert layout.with_role("statistic", "counter") == ("1.running_mean", "1.running_var", "1.num_batches_tracked")


def test_squared_distance_sees_floating_tensors_only() -> None:
    a = {"w": torch.tensor([3.0]), "n": torch.tensor([9])}
    assert squared_distance(a, {"w": torch.tensor([1.0]), "n": torch.tensor([0])}) == 4.0


class Believing(nn.Module):
    """Somebody's own Bayesian layer, and a log-variance that is nobody's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.log_variance = nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(2, 3))
        self.bias, self.bias_log_variance = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))


def test_log_variances_stand_beside_the_means_they_belong_to() -> None:
    module = nn.Sequential(Believing(), nn.Linear(2, 2))
    module.register_parameter("log_variance", nn.Parameter(torch.zeros(4, 4)))  # beside no weight
    for layout in (Layout.of(module), Layout.guess(module.state_dict())):
        assert layout.roles["0.log_variance"] == layout.roles["0.bias_log_variance"] == "log_variance"
        assert layout.roles["log_variance"] == "weight"
        assert layout.log_variances == {"0.weight": "0.log_variance", "0.bias": "0.bias_log_variance"}
        assert layout.layer_of("0.log_variance") == layout.layer_of("0.weight") is not None
        first = next(layer for layer in layout.layers if layer.weight == "0.weight")
        assert first.matrix(module.state_dict()).shape[0] == 2
        assert not first.followers


def test_a_layout_can_be_a_part_of_a_larger_one(resnet: nn.Module) -> None:
    outer = nn.Module()
    outer.net = resnet
    inner = Layout.of(resnet).under("net")
    assert inner.roles == Layout.of(outer).roles
    assert [layer.weight for layer in inner.layers] == [layer.weight for layer in Layout.of(outer).layers]
    assert Layout.of(nn.Linear(2, 1)).under("net").layers[0].name == "net"


def test_biases_and_norms_follow_transposed_recurrent_and_attending_layers() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.up, self.norm = nn.Conv2d(1, 4, 1), nn.ConvTranspose2d(4, 3, 2), nn.BatchNorm2d(3)
            self.cell, self.after = nn.LSTM(3, 5, batch_first=True), nn.LayerNorm(5)
            self.attend, self.last = nn.MultiheadAttention(5, 1, batch_first=True), nn.LayerNorm(5)
            self.embed, self.scale = nn.Embedding(7, 5), nn.LayerNorm(5)

        def forward(self, x: Tensor) -> Tensor:
            h = self.norm(self.up(self.first(x))).flatten(2).transpose(1, 2)
            h = self.after(self.cell(h)[0])
            h = self.last(self.attend(h, h, h)[0])
            return h + self.scale(self.embed.weight[:1])

    net = Odd()
    layout = Layout.of(net)
    layers = {layer.weight: layer for layer in layout.layers}
    assert (layers["up.weight"].bias, layers["up.weight"].kind) == ("up.bias", "transposed")
    assert layout.layer_of("norm.running_var") == "up.weight"
    assert layers["cell.weight_ih_l0"].bias == "cell.bias_ih_l0"
    assert layers["cell.weight_hh_l0"].followers == ("after.weight", "after.bias")
    assert layers["attend.in_proj_weight"].bias == "attend.in_proj_bias"
    assert layout.layer_of("last.weight") == "attend.out_proj"
    assert layout.layer_of("scale.weight") == "embed.weight"
    guessed = {layer.weight: layer for layer in Layout.guess(net.state_dict()).layers}
    assert guessed["up.weight"].bias == "up.bias"
    assert guessed["up.weight"].followers[:2] == ("norm.weight", "norm.bias")
    assert guessed["cell.weight_ih_l0"].bias == "cell.bias_ih_l0"
    assert guessed["cell.weight_hh_l0"].bias == "cell.bias_hh_l0"
    assert guessed["attend.in_proj_weight"].bias == "attend.in_proj_bias"
    assert all(role != "norm" for name, role in Layout.guess(net.state_dict()).roles.items() if ".bias_" in name)

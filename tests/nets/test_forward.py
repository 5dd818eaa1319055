"""Networks that run together give what each gives alone, and their cost is counted right."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fedfuse.core.params import Params
from fedfuse.core.spec import Spec
from fedfuse.errors import ConfigError
from fedfuse.nets.forward import Program, Stack, cost_of, layer_output


def members(spec: Spec, count: int = 3, seed: int = 0) -> list[Params]:
    torch.manual_seed(seed)
    return [{n: t.clone() for n, t in spec.build().state_dict().items()} for _ in range(count)]


def each(spec: Spec, params: list[Params], x: Tensor) -> Tensor:
    return torch.stack([spec.forward(p, x) for p in params])


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        ({"inputs": 12, "hidden": [], "classes": 3}, (12,)),
        ({"inputs": 12, "hidden": [5], "classes": 3}, (3, 2, 2)),
        ({"inputs": 12, "hidden": [5, 7, 4], "classes": 2}, (12,)),
        ({"inputs": 12, "hidden": [5], "classes": 2, "head": 6}, (12,)),
    ],
)
def test_the_stacked_network_is_its_members(options: dict[str, object], shape: tuple[int, ...]) -> None:
    spec = Spec("mlp", options)
    params, x = members(spec), torch.randn(9, *shape)
    stack = Stack.of(spec, params)
    assert stack is not None
    assert stack.fits(x)
    assert torch.allclose(stack(x), each(spec, params, x), atol=1e-6)
    assert stack(x[:0]).shape == (3, 0, options["classes"])


def test_algorithm_1_of_the_paper_by_block_matrices() -> None:
    """W⁰ stacked, later layers block-diagonal, the last one read block by block: the members' logits side by side."""
    spec = Spec("mlp", {"inputs": 6, "hidden": [4, 5], "classes": 3})
    params, x = members(spec, 4), torch.randn(8, 6)
    layers = [layer.name for layer in spec.layout.layers]
    first = torch.cat([p[f"{layers[0]}.weight"] for p in params])
    h = (x @ first.T + torch.cat([p[f"{layers[0]}.bias"] for p in params])).relu()
    for name in layers[1:]:
        diagonal = torch.block_diag(*[p[f"{name}.weight"] for p in params])
        h = h @ diagonal.T + torch.cat([p[f"{name}.bias"] for p in params])
        h = h if name == layers[-1] else h.relu()
    concatenated = h.view(8, 4, 3).transpose(0, 1)
    stack = Stack.of(spec, params)
    assert stack is not None
    assert torch.allclose(stack(x), concatenated, atol=1e-6)
    assert torch.allclose(each(spec, params, x), concatenated, atol=1e-6)


def test_dark_pixels_are_left_out_without_changing_answers_or_gradients() -> None:
    spec = Spec("mlp", {"inputs": 20, "hidden": [5], "classes": 3})
    params, x = members(spec), torch.randn(7, 20)
    x[:, 3:15] = 0.0
    stack = Stack.of(spec, params)
    assert stack is not None
    assert torch.allclose(stack(x), each(spec, params, x), atol=1e-6)
    free, plain = x.clone().requires_grad_(), x.clone().requires_grad_()
    (mine,) = torch.autograd.grad(stack(free).square().sum(), [free])
    (theirs,) = torch.autograd.grad(each(spec, params, plain).square().sum(), [plain])
    assert torch.allclose(mine, theirs, atol=1e-5), "a dark pixel has a gradient too"
    assert stack(torch.zeros(2, 20)).isfinite().all()


def test_other_functions_and_missing_biases_stack_too() -> None:
    module = nn.Sequential(
        nn.Linear(4, 6, bias=False), nn.Tanh(), nn.Dropout(0.5), nn.Sequential(nn.Linear(6, 3), nn.LeakyReLU(0.3))
    )
    spec = Spec.of(module)
    params, x = members(spec), torch.randn(5, 4)
    stack = Stack.of(spec, params)
    assert stack is not None
    assert torch.allclose(stack(x), each(spec, params, x), atol=1e-6)
    assert not stack.fits(torch.randn(5, 2, 4)), "without a flatten, only rows of features are one product"


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + 1


@pytest.mark.parametrize(
    "spec",
    [
        Spec("lenet", {"size": 8}),
        Spec.of(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))),
        Spec.of(Own()),
        Spec.of(nn.Sequential(nn.ReLU(), nn.Linear(4, 3))),
    ],
)
def test_other_networks_are_not_stacked(spec: Spec) -> None:
    assert Program.of(spec) is None
    assert Stack.of(spec, members(spec)) is None


def test_costs_are_counted() -> None:
    lenet = Spec("lenet")  # 28×28: convolutions at 24×24 and 8×8, then 256-120-84-10
    convolutions = 24 * 24 * 6 * 25 + 8 * 8 * 16 * 6 * 25
    cost = cost_of(lenet, (1, 28, 28))
    assert cost.products == convolutions + 256 * 120 + 120 * 84 + 84 * 10
    assert cost.outputs == 10
    assert cost.floats == 16 * (28 * 28 + 24 * 24), "the first convolution holds most, with its channels in sixteens"


def test_the_first_layer_is_seen_without_running_the_rest() -> None:
    module = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    spec = Spec.of(module)
    ran: list[bool] = []
    hook = spec.skeleton()[3].register_forward_hook(lambda *_: ran.append(True))  # type: ignore[index]
    params, x = members(spec, 1)[0], torch.randn(5, 4)
    expected = x @ params["1.weight"].T + params["1.bias"]
    assert torch.allclose(layer_output(spec, params, x), expected, atol=1e-6)
    hook.remove()
    assert not ran
    convolution = layer_output(Spec("lenet"), members(Spec("lenet"), 1)[0], torch.zeros(2, 1, 28, 28))
    assert convolution.shape == (2, 6, 24, 24)
    with pytest.raises(ConfigError, match="no layer with weights"):
        layer_output(Spec.of(nn.Sequential(nn.ReLU())), {}, x)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_stacks_of_any_dtype_read_plain_floats(dtype: torch.dtype) -> None:
    spec = Spec.of(nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3)).to(dtype))
    params, x = members(spec), torch.randn(5, 6)
    stack = Stack.of(spec, params)
    assert stack is not None
    assert torch.allclose(stack(x), each(spec, params, x), atol=1e-6 if dtype == torch.float64 else 2e-2)


def test_the_first_layer_of_tied_weights_answers() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net[1].weight = net[0].weight
    x = torch.randn(3, 4)
    assert layer_output(Spec.of(net), net.state_dict(), x).equal(net[0](x))

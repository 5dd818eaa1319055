"""Which networks are chains of layers the kernels know."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from plain_training import rows, seeded, step_error
from torch import Tensor, nn

from fedfuse.core.spec import Spec
from fedfuse.kernels.chain.description import Activation, Conv, Flatten, Linear, PoolLayer, Uncovered, shape_after
from fedfuse.kernels.chain.trace import chain_of


class Written(nn.Module):
    """A network as a tutorial writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 6, 3), nn.Conv2d(6, 8, 3)
        self.pool = nn.MaxPool2d(2, 2)
        self.fc1, self.fc2 = nn.Linear(8 * 4, 12), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(F.relu(self.conv1(x)))
        x = F.max_pool2d(torch.relu(self.conv2(x)), 2)
        x = self.flat(x)
        return self.fc2(torch.tanh(self.fc1(x)))  # type: ignore[no-any-return]

    def flat(self, x: Tensor) -> Tensor:
        return x.view(x.size(0), -1)


class ByShape(Written):
    def flat(self, x: Tensor) -> Tensor:
        return x.reshape(x.shape[0], -1)


class ByNumber(Written):
    def flat(self, x: Tensor) -> Tensor:
        return x.view(-1, 32)


class ByFunction(Written):
    def flat(self, x: Tensor) -> Tensor:
        return torch.flatten(x, 1)


@pytest.mark.parametrize("kind", [Written, ByShape, ByNumber, ByFunction])
def test_what_users_write_is_followed(kind: type[nn.Module]) -> None:
    assert chain_of(kind(), (1, 14, 14)) == (
        *(Conv("conv1", 6, 3, 1, 0, True), PoolLayer("max", 2, 2), Activation("relu")),
        *(Conv("conv2", 8, 3, 1, 0, True), PoolLayer("max", 2, 2), Activation("relu")),
        *(Flatten(), Linear("fc1", 12, True), Activation("tanh"), Linear("fc2", 3, True)),
    )
    assert step_error(seeded(kind), rows((1, 14, 14), 20), 20) < 5e-5


@pytest.mark.parametrize("name", ["lenet", "mlp", "convnet_ams", "convnet_feddu", "vgg11"])
def test_networks_of_ours_are_chains(name: str) -> None:
    options = {"inputs": 3072} if name == "mlp" else {"channels": 3, "size": 32}
    net = Spec(name, options).build().train()
    layers = chain_of(net, (3, 32, 32))
    shape: tuple[int, ...] = (3, 32, 32)
    for layer in layers:
        shape = shape_after(layer, shape)
    assert shape == (10,)


class Added(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc(x)


class Branching(Added):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) if x.sum() > 0 else x


class Twice(Added):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.relu(self.fc(x)))  # type: ignore[no-any-return]


class Counting(Added):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.fc(x)  # type: ignore[no-any-return]


class Buffered(Added):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.fc(x)  # type: ignore[no-any-return]


class Mixing(Added):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x).view(-1, 2)  # type: ignore[no-any-return]


def hooked() -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 3))
    net[0].register_forward_hook(lambda *_: None)
    return net


UNCOVERED: list[tuple[Callable[[], nn.Module], tuple[int, ...], str]] = [
    (Added, (4,), "reads more than the one before it: add"),
    (Branching, (4,), "cannot be traced"),
    (Twice, (4,), "a layer used twice"),
    (Counting, (4,), "changes the network's attributes"),
    (Buffered, (4,), "the buffer 'calls'"),
    (Mixing, (4,), "view"),
    (hooked, (4,), "hooks"),
    (lambda: nn.Sequential(nn.Linear(4, 3), nn.GELU()), (4,), "GELU '1'"),
    (lambda: nn.Sequential(nn.Linear(4, 3), nn.Softmax(1)), (4,), "Softmax '1'"),
    (lambda: nn.Sequential(nn.Conv2d(4, 4, 3, groups=2)), (4, 8, 8), "groups=2"),
    (lambda: nn.Sequential(nn.Conv2d(4, 4, 3, dilation=2)), (4, 8, 8), "dilation"),
    (lambda: nn.Sequential(nn.Conv2d(4, 4, (3, 1))), (4, 8, 8), "kernel_size"),
    (lambda: nn.Sequential(nn.Conv2d(4, 4, 3, padding="same")), (4, 8, 8), "padding='same'"),
    (lambda: nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular")), (4, 8, 8), "circular"),
    (lambda: nn.Sequential(nn.MaxPool2d(2, ceil_mode=True)), (4, 8, 8), "ceil_mode"),
    (lambda: nn.Sequential(nn.AvgPool2d(3, padding=1)), (4, 8, 8), "mean pooling"),
    (lambda: nn.Sequential(nn.AdaptiveAvgPool2d(3)), (4, 8, 8), "adaptive pooling"),
    (lambda: nn.Sequential(nn.BatchNorm2d(4, affine=False)), (4, 8, 8), "BatchNorm2d '0'"),
    (lambda: nn.Sequential(nn.BatchNorm2d(4, momentum=None)), (4, 8, 8), "BatchNorm2d '0'"),
    (lambda: nn.Sequential(nn.Linear(8, 3)), (4, 8, 8), "Linear '0' on inputs of shape"),
    (lambda: nn.Sequential(nn.MaxPool2d(9)), (4, 8, 8), "leaves no pixel"),
    (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)), (4,), ""),
]


@pytest.mark.parametrize(("make", "shape", "word"), UNCOVERED)
def test_the_first_part_that_is_not_known_is_named(
    make: Callable[[], nn.Module], shape: tuple[int, ...], word: str
) -> None:
    net = make().train()
    before = {n: t.clone() for n, t in net.state_dict().items()}
    with pytest.raises(Uncovered) as told:
        chain_of(net, shape)
    assert word in str(told.value)
    assert str(told.value)
    assert getattr(net, "calls", 0) == 0
    assert all(t.equal(before[n]) for n, t in net.state_dict().items())  # to look at it changed nothing


def test_dropout_at_rest_is_no_layer() -> None:
    net = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5), nn.Identity(), nn.Dropout(0.0)).eval()
    assert chain_of(net, (4,)) == (Linear("0", 3, True),)

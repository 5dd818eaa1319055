"""Whether images lie with their channels last: only where a trial shows that nothing changes by it."""

from __future__ import annotations

import own_networks as own
import torch
from own_networks import CLASSES, IMAGE, OWN
from torch import Tensor, nn

from fedfuse.core.spec import Spec
from fedfuse.training.epochs import suits_channels_last

IMAGES = ("viewed", "reshaped", "backbone", "transposed", "functional")


def test_a_network_that_asks_how_tensors_lie_finds_them_as_written() -> None:
    suits = {name: suits_channels_last(Spec.of(OWN[name].make()), IMAGE, torch.float32, "cpu") for name in IMAGES}
    assert suits == {"viewed": False, "reshaped": True, "backbone": True, "transposed": True, "functional": False}
    assert suits_channels_last(Spec("lenet", {"size": 8}), IMAGE, torch.float32, "cpu")


def test_the_trial_moves_nobodys_draws_and_leaves_no_trace() -> None:
    net = own.Backbone()
    before, spec = {n: t.clone() for n, t in net.state_dict().items()}, Spec.of(net)
    stirred = torch.random.get_rng_state()
    assert suits_channels_last(spec, IMAGE, torch.float32, "cpu")
    assert torch.random.get_rng_state().equal(stirred)
    assert all(t.equal(before[n]) for n, t in spec.skeleton().state_dict().items())


class Shy(nn.Module):
    """Answers otherwise where channels come last, and says so nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(1, 4, 3), nn.Linear(144, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(x)
        return self.fc(h.as_strided((len(h), 144), (144, 1)))


def test_a_network_that_answers_otherwise_with_channels_last_is_left_as_it_is() -> None:
    assert not suits_channels_last(Spec.of(Shy()), IMAGE, torch.float32, "cpu")


class Drawing(nn.Module):
    """Draws while it trains, in an order that follows how its tensors lie."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.drop, self.fc = nn.Conv2d(1, 4, 3), nn.Dropout(0.5), nn.Linear(144, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.drop(self.conv(x)).flatten(1))


def test_dropout_is_no_reason_to_lie_otherwise() -> None:
    assert suits_channels_last(Spec.of(Drawing()), IMAGE, torch.float32, "cpu")


def test_networks_without_images_are_not_asked() -> None:
    assert not suits_channels_last(Spec.of(own.Tied()), (6,), torch.float32, "cpu")
    assert not suits_channels_last(Spec("mlp", {"inputs": 64}), IMAGE, torch.float32, "cpu")

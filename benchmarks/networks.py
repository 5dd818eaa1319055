"""Networks as users write them: torch alone, so that peers in environments of their own train the very same."""

from __future__ import annotations

from torch import nn


def own_lenet() -> nn.Module:
    """LeNet as a user writes it: ReLU before pooling, padding in the first convolution."""
    return nn.Sequential(
        *(nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
    )


def plain_lenet() -> nn.Module:
    """The same without padding: the network of the papers."""
    return nn.Sequential(
        *(nn.Conv2d(1, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(256, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
    )


def own_mlp() -> nn.Module:
    """One hidden layer of a hundred."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 10))


OWN = {"plain_lenet": plain_lenet, "own_lenet": own_lenet, "own_mlp": own_mlp}

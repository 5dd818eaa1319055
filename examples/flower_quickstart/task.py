"""The task of both apps: a small CNN, and digits of which every client has only some."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

CLIENTS = 5


class Net(nn.Module):
    """Two convolutions and two linear layers for 8×8 images."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 16, 3, padding=1)
        self.fc1, self.fc2 = nn.Linear(16 * 2 * 2, 32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of a batch."""
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


def load_rows() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training images and labels, then those for testing: every fifth."""
    digits = load_digits()
    x, y = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16, torch.tensor(digits.target)
    held_out = torch.arange(len(y)) % 5 == 0
    return x[~held_out], y[~held_out], x[held_out], y[held_out]


def load_part(part: int) -> tuple[Tensor, Tensor]:
    """One client's images and labels: mostly two of the ten digits, and few of all."""
    x, y, _, _ = load_rows()
    place = torch.arange(len(y))
    mine = torch.where(place % 10 == 0, place // 10 % CLIENTS == part, y // 2 == part)
    return x[mine], y[mine]


def fit(model: nn.Module, x: Tensor, y: Tensor, *, epochs: int, lr: float, batch_size: int) -> float:
    """Train as anybody would; the last batch's loss."""
    optimizer, loss = torch.optim.SGD(model.parameters(), lr=lr), torch.zeros(())
    for _ in range(epochs):
        for index in torch.randperm(len(y)).split(batch_size):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x[index]), y[index])
            loss.backward()
            optimizer.step()
    return loss.item()


@torch.no_grad()
def score(model: nn.Module, x: Tensor, y: Tensor) -> tuple[float, float]:
    """Mean loss and accuracy."""
    logits = model.eval()(x)
    return float(F.cross_entropy(logits, y)), float((logits.argmax(1) == y).double().mean())

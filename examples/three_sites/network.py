"""The sites' own network: nothing in it knows of fedfuse."""

from __future__ import annotations

from torch import Tensor, nn


class Net(nn.Module):
    """Two convolutions and two linear layers for 8×8 digits."""

    def __init__(self) -> None:
        super().__init__()
        self.see = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.ReLU()
        )
        self.think = nn.Sequential(nn.Flatten(), nn.Linear(16 * 4 * 4, 32), nn.ReLU(), nn.Linear(32, 10))

    def forward(self, x: Tensor) -> Tensor:
        """Logits of ten digits."""
        return self.think(self.see(x))

"""Networks as users write them: none is fedfuse's own, and each has a habit that a library may trip over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES = 3


class Viewed(nn.Module):
    """Lays images flat by `view`, which asks how a tensor lies in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.fc = nn.Linear(4 * 36, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.conv(x))
        return self.fc(h.view(h.size(0), -1))


class Reshaped(Viewed):
    """The same by `flatten`, which does not ask."""

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(F.relu(self.conv(x)).flatten(1))


class Backbone(nn.Module):
    """A frozen backbone with a norm, and a head that trains."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(2))
        self.backbone.requires_grad_(False)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x).flatten(1))


class Tied(nn.Module):
    """One weight under two names, in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again = nn.Linear(6, 6), nn.Linear(6, 6)
        self.again.weight = self.first.weight
        self.fc = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(F.relu(self.again(F.relu(self.first(x)))))


class TiedTokens(nn.Module):
    """An embedding whose weight also reads the answer, as language models have it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(CLASSES, 5)
        self.mix = nn.Linear(5, 5)
        self.out = nn.Linear(5, CLASSES, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.relu(self.mix(self.embed(x).mean(1))))


class InTuple(nn.Module):
    """Gives features beside its logits."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.fc = nn.Linear(6, 5), nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = F.relu(self.body(x))
        return self.fc(h), h


class InDict(InTuple):
    """Gives a table."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        logits, features = super().forward(x)
        return {"features": features, "logits": logits}


@dataclass
class Said:
    """What some libraries give."""

    features: Tensor
    logits: Tensor


class InObject(InTuple):
    """Gives an object with attributes."""

    def forward(self, x: Tensor) -> Said:  # type: ignore[override]
        logits, features = super().forward(x)
        return Said(features, logits)


class InList(InTuple):
    """Gives a list, the logits last."""

    def forward(self, x: Tensor) -> list[Tensor]:  # type: ignore[override]
        return list(reversed(super().forward(x)))


class Attention(nn.Module):
    """Self-attention over the rows of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)
        self.fc = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = x.flatten(1, 2)
        return self.fc(self.attend(h, h, h)[0].mean(1))


class Encoder(nn.Module):
    """A transformer's layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.1, batch_first=True)
        self.fc = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.layer(x.flatten(1, 2)).mean(1))


class Recurrent(nn.Module):
    """An LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 5, batch_first=True)
        self.fc = nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.lstm(x.flatten(1, 2))[0][:, -1])


class Branches(nn.Module):
    """Two branches that meet in a concatenation."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Conv2d(1, 3, 3, padding=1), nn.Conv2d(1, 2, 5, padding=2)
        self.norm = nn.GroupNorm(1, 5)
        self.fc = nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(torch.cat([self.left(x), self.right(x)], 1))
        return self.fc(F.relu(h).mean((2, 3)))


class Functional(nn.Module):
    """A bare parameter used by a function of torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(3, 1, 3, 3) / 3)
        self.fc = nn.Linear(3, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(F.relu(F.conv2d(x, self.kernel)).mean((2, 3)))


class Tokens(nn.Module):
    """Reads whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 5)
        self.fc = nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(F.relu(self.embed(x).mean(1)))


class Transposed(nn.Module):
    """Convolves the other way round."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(1, 4, 3, stride=2), nn.ConvTranspose2d(4, 2, 3, stride=2)
        self.fc = nn.Linear(2, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(F.relu(self.up(F.relu(self.down(x)))).mean((2, 3)))


class Counting(nn.Module):
    """Buffers of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, CLASSES)
        self.register_buffer("seen", torch.zeros(CLASSES, dtype=torch.bool))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int32))
        self.register_buffer("small", torch.arange(3, dtype=torch.uint8))
        self.register_buffer("narrow", torch.ones(2, dtype=torch.float16))

    def forward(self, x: Tensor) -> Tensor:
        z = self.fc(x)
        if self.training:
            self.calls += 1
            self.seen |= torch.zeros(CLASSES, dtype=torch.bool).index_fill(0, z.detach().argmax(1), True)
        return z * self.narrow.float().mean()


class Complex(nn.Module):
    """A buffer no message carries."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, CLASSES)
        self.register_buffer("wave", torch.ones(2, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) * self.wave.abs().mean()


def lazy() -> nn.Module:
    """A network whose first layer found its width by itself."""
    net = nn.Sequential(nn.Flatten(), nn.LazyLinear(5), nn.ReLU(), nn.Dropout(0.3), nn.Linear(5, CLASSES))
    net(torch.zeros(1, 1, 8, 8))
    return net


def narrow(dtype: torch.dtype) -> nn.Module:
    """A convolutional network of few digits."""
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, CLASSES))
    return net.to(dtype)


class Own(NamedTuple):
    """A network and what it reads."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    tokens: int = 0
    output: int | str | None = None


IMAGE = (1, 8, 8)
OWN: dict[str, Own] = {
    "viewed": Own(Viewed, IMAGE),
    "reshaped": Own(Reshaped, IMAGE),
    "backbone": Own(Backbone, IMAGE),
    "tied": Own(Tied, (6,)),
    "tied tokens": Own(TiedTokens, (4,), tokens=CLASSES),
    "tuple": Own(InTuple, (6,), output=0),
    "dict": Own(InDict, (6,), output="logits"),
    "object": Own(InObject, (6,), output="logits"),
    "list": Own(InList, (6,), output=-1),
    "attention": Own(Attention, IMAGE),
    "encoder": Own(Encoder, IMAGE),
    "recurrent": Own(Recurrent, IMAGE),
    "branches": Own(Branches, IMAGE),
    "functional": Own(Functional, IMAGE),
    "tokens": Own(Tokens, (4,), tokens=9),
    "transposed": Own(Transposed, IMAGE),
    "counting": Own(Counting, (6,)),
    "lazy": Own(lazy, IMAGE),
    "bfloat16": Own(lambda: narrow(torch.bfloat16), IMAGE),
    "float16": Own(lambda: narrow(torch.float16), IMAGE),
    "float64": Own(lambda: narrow(torch.float64), IMAGE),
}

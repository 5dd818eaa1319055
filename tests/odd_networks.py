"""Networks as other people write them: concatenations, recurrence, attention, bare operations, written-out sizes."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Beside(nn.Module):
    """Branches of these widths side by side, read by a convolution, or flattened and read by a linear layer."""

    def __init__(self, *widths: int, flat: bool = False, norm: bool = False) -> None:
        super().__init__()
        total, self.flat = sum(widths), flat
        self.branches = nn.ModuleList(nn.Conv2d(2, w, 3, padding=1) for w in widths)
        self.norm = nn.BatchNorm2d(total) if norm else nn.Identity()
        self.next = nn.Linear(total * 16, 5) if flat else nn.Conv2d(total, 5, 3)
        self.out = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(torch.cat([branch(x).relu() for branch in self.branches], 1))
        return self.out(self.next(x.flatten(1)).relu() if self.flat else self.next(x).relu().mean((2, 3)))


class Recurrent(nn.Module):
    """A linear layer, a recurrent one of any kind, and a linear one that reads its last answer."""

    def __init__(self, kind: Any = nn.LSTM, **options: Any) -> None:
        super().__init__()
        self.enter, self.cell = nn.Linear(3, 4), kind(4, 5, batch_first=True, **options)
        self.out = nn.Linear(10 if options.get("bidirectional") else 5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.cell(self.enter(x).relu())[0][:, -1])


class Normed(nn.Module):
    """A convolution behind a GroupNorm."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.conv, self.norm, self.out = nn.Conv2d(2, 6, 3), nn.GroupNorm(groups, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(self.conv(x)).relu().mean((2, 3)))


class Bare(nn.Module):
    """A convolution without a module."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel, self.shift = nn.Parameter(torch.randn(6, 2, 3, 3)), nn.Parameter(torch.randn(6))
        self.out = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.conv2d(x, self.kernel, self.shift).relu().mean((2, 3)))


class WrittenOut(nn.Module):
    """A flatten whose size its author wrote down."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.Conv2d(2, 6, 3), nn.Conv2d(6, 5, 3, padding=1), nn.Linear(20, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.second(self.first(x).relu()).relu().view(-1, 20))


class Multiplied(nn.Module):
    """A depthwise convolution that makes two channels of each."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.deep = nn.Conv2d(2, 4, 3), nn.Conv2d(4, 8, 3, groups=4, padding=1)
        self.point, self.out = nn.Conv2d(8, 5, 1), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.point(self.deep(self.first(x).relu()).relu()).relu().mean((2, 3)))


class Squeezed(nn.Module):
    """Squeeze and excite; the size of its gate written out or not."""

    def __init__(self, written: bool = False) -> None:
        super().__init__()
        self.written, self.conv = written, nn.Conv2d(2, 6, 3)
        self.squeeze, self.excite, self.out = nn.Linear(6, 3), nn.Linear(3, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x).relu()
        gate = self.excite(self.squeeze(x.mean((2, 3))).relu()).sigmoid()
        gate = gate.view(-1, 6, 1, 1) if self.written else gate[:, :, None, None]
        return self.out((x * gate).mean((2, 3)))


class Encoder(nn.Module):
    """torch's own transformer encoder, norms before or after."""

    def __init__(self, norm_first: bool = False) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 4, 12, 0.0, batch_first=True, norm_first=norm_first)
        self.enter = nn.Linear(4, 8)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.body(self.enter(x)).mean(1))


class Vision(nn.Module):
    """A vision transformer's block as it is usually written: a class token, positions, one layer for q, k and v."""

    def __init__(self, heads: int = 3) -> None:
        super().__init__()
        width, self.heads = 4 * heads, heads
        self.token, self.positions = nn.Parameter(torch.randn(1, 1, width)), nn.Parameter(torch.randn(1, 6, width))
        self.enter, self.norm, self.qkv = nn.Linear(4, width), nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.join, self.up, self.down = nn.Linear(width, width), nn.Linear(width, 7), nn.Linear(7, width)
        self.out = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(len(x), -1, -1), self.enter(x)], 1) + self.positions
        rows, length, width = x.shape
        qkv = self.qkv(self.norm(x)).reshape(rows, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(rows, length, width)
        x = x + self.join(mixed)
        return self.out((x + self.down(F.gelu(self.up(x))))[:, 0])


class Language(nn.Module):
    """Masked attention by hand over tokens, with the embedding's weight as its output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.read = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
        self.q, self.k, self.v, self.join = (nn.Linear(8, 8) for _ in range(4))
        self.read.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        rows, length, width = h.shape
        q, k, v = (part(h).view(rows, length, 4, 2).transpose(1, 2) for part in (self.q, self.k, self.v))
        later = torch.triu(torch.ones(length, length, dtype=torch.bool), 1)
        mixed = (q @ k.transpose(-1, -2) / 2).masked_fill(later, float("-inf")).softmax(-1) @ v
        return self.read((h + self.join(mixed.transpose(1, 2).contiguous().view(rows, length, width))).mean(1))


class Padded(nn.Module):
    """A residual shortcut that widens by zeros around its channels."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow, self.wide = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 8, 3, padding=1)
        self.norm, self.out = nn.BatchNorm2d(8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.narrow(x).relu()
        x = F.pad(x, (0, 0, 0, 0, 2, 2)) + self.norm(self.wide(x))
        return self.out(x.relu().mean((2, 3)))


class Gated(nn.Module):
    """Two halves of a layer multiplied, twice: by hand and by torch."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.out = nn.Linear(4, 12), nn.Linear(6, 5), nn.Linear(5, 8), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        one, other = self.a(x).chunk(2, -1)
        return self.out(F.glu(self.c(self.b(F.silu(one) * other).relu())))


class Decoder(nn.Module):
    """A vector laid out as a picture, then a transposed convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.up, self.out = nn.Linear(3, 16), nn.ConvTranspose2d(4, 5, 2), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.up(self.enter(x).view(-1, 4, 2, 2)).relu().mean((2, 3)))


class Cumulative(nn.Module):
    """Sums up its units in order, so that the order matters."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.hidden, self.out = nn.Linear(4, 6), nn.Linear(6, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.hidden(self.enter(x).cumsum(1)).relu())


class Odd(NamedTuple):
    """A network, the shape of one input, and the sizes and sections of its groups."""

    module: nn.Module
    shape: tuple[int, ...]
    sizes: list[tuple[int, int]]


ODD: dict[str, Odd] = {
    "6+5": Odd(Beside(6, 5), (2, 4, 4), [(6, 1), (5, 1), (5, 1)]),
    "6+4+4": Odd(Beside(6, 4, 4), (2, 4, 4), [(6, 1), (4, 1), (4, 1), (5, 1)]),
    "64+32": Odd(Beside(64, 32), (2, 4, 4), [(64, 1), (32, 1), (5, 1)]),
    "6+5, norm": Odd(Beside(6, 5, norm=True), (2, 4, 4), [(6, 1), (5, 1), (5, 1)]),
    "6+5, flat": Odd(Beside(6, 5, flat=True), (2, 4, 4), [(6, 1), (5, 1), (5, 1)]),
    "6+4+4, flat": Odd(Beside(6, 4, 4, flat=True, norm=True), (2, 4, 4), [(6, 1), (4, 1), (4, 1), (5, 1)]),
    "lstm": Odd(Recurrent(), (3, 3), [(4, 1), (5, 1)]),
    "lstm, two ways": Odd(Recurrent(num_layers=2, bidirectional=True), (3, 3), [(4, 1), *4 * [(5, 1)]]),
    "gru": Odd(Recurrent(nn.GRU), (3, 3), [(4, 1), (5, 1)]),
    "rnn": Odd(Recurrent(nn.RNN), (3, 3), [(4, 1), (5, 1)]),
    "GroupNorm(C, C)": Odd(Normed(6), (2, 4, 4), [(6, 1)]),
    "GroupNorm(1, C)": Odd(Normed(1), (2, 4, 4), [(6, 1)]),
    "GroupNorm(2, C)": Odd(Normed(2), (2, 4, 4), [(6, 2)]),
    "bare": Odd(Bare(), (2, 4, 4), [(6, 1)]),
    "written out": Odd(WrittenOut(), (2, 4, 4), [(6, 1), (5, 1)]),
    "multiplied": Odd(Multiplied(), (2, 4, 4), [(4, 1), (5, 1)]),
    "squeezed": Odd(Squeezed(), (2, 4, 4), [(6, 1), (3, 1)]),
    "squeezed, written": Odd(Squeezed(True), (2, 4, 4), [(6, 1), (3, 1)]),
    "encoder": Odd(Encoder(), (5, 4), [(8, 1), (4, 1), (12, 1), (4, 1), (12, 1)]),
    "encoder, norms first": Odd(Encoder(True), (5, 4), [(8, 1), (4, 1), (12, 1), (4, 1), (12, 1)]),
    "vision, 3 heads": Odd(Vision(), (5, 4), [(12, 1), (3, 1), (7, 1)]),
    "vision, 2 heads": Odd(Vision(2), (5, 4), [(8, 1), (2, 1), (7, 1)]),
    "language": Odd(Language(), (5,), [(4, 1), (8, 1)]),
    "padded": Odd(Padded(), (3, 4, 4), [(4, 1), (2, 1), (2, 1)]),
    "gated": Odd(Gated(), (4,), [(6, 1), (5, 1), (4, 1)]),
    "decoder": Odd(Decoder(), (3,), [(4, 1), (5, 1)]),
}

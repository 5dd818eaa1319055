"""Diao, Li and He, Towards Addressing Label Skews in One-Shot Federated Learning, ICLR 2023 (FedOV).

Every client's network gets an output for "unknown" and learns to use it, on rows destroyed in several ways; then the
networks vote, each on the inputs it knows:

    client   CE of rows, destroyed rows, attacked destroyed rows and mixed features                 `OpenSet`
    server   every network is kept; votes are class probabilities of those least in the unknown     `OpenSetVote`

The objective comes first, then the ways to destroy a row (`make_outliers`), then the method.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeVar

import torch
import torch.nn.functional as F
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor, nn

from fedfuse.core.model import Single, outputs
from fedfuse.core.posterior import Posterior
from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import method
from fedfuse.core.seams import TRAINING_PASSES, Batch, Effort
from fedfuse.core.state import Local
from fedfuse.core.torch_utils import forward_hooks, in_full
from fedfuse.errors import RecipeError, error_text
from fedfuse.nets.cost import layer_costs
from fedfuse.nets.head import UnknownClass
from fedfuse.nets.mixture import OpenSetVote
from fedfuse.server.aggregate.ensemble import KeepAll
from fedfuse.server.steps.distill import InputSource, distillation

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class OpenSet:
    """Cross entropy with an unknown class, and four ways of showing what is unknown (FedOV; the last output is it).

    CE(z(x), y) + CE(z(o), unknown) + CE(z(x) without the true class, unknown) + CE(z(a), unknown)
    + mix · CE(z of mixed features, unknown), where o are the batch's rows `make_outliers`, a is o moved by `steps`
    steps of size `stride` along the sign of the gradient that makes it look known, at most `reach` away, and features
    of two rows of different classes are mixed where the last but one linear layer reads them, β ~ U(0, 1).
    Everything passes the network in one batch, as batch norms need.

    Attributes:
        steps: adversarial steps.
        stride: their size.
        reach: how far they may lead, per pixel or feature.
        mix: weight of the mixed features' term.
    """

    steps: int = 5
    stride: float = 0.002
    reach: float = 0.5
    mix: float = 0.01
    needs_classes: ClassVar[bool] = True
    needs_numbers: ClassVar[bool] = True

    def __call__(self, local: Local, batch: Batch) -> Tensor:
        """The five terms."""
        x, y = batch
        draw = local.once("openset", _checked_stream)
        outliers = make_outliers(x, draw)
        shown = torch.cat([x, outliers, self.move_outliers(local, outliers)])
        order, share = torch.randperm(len(x), generator=draw).to(y.device), float(torch.rand((), generator=draw))
        z, mixed = with_mixed(local.module, shown, len(x), order, share)
        return self.loss(z, mixed, y, y != y[order])

    def passes(self, effort: Effort) -> float:
        """Three batches are trained on, mixed features in the last layers; a step of moving goes forward and back."""
        costs = layer_costs(effort.spec, effort.shape)
        linear = [path for path, m in effort.spec.skeleton().named_modules() if isinstance(m, nn.Linear)]
        last = sum(costs[path].products for path in _mixing_layers(linear) if path in costs)
        share = last / max(1, sum(cost.products for cost in costs.values()))
        return (3 + share) * TRAINING_PASSES + 2 * self.steps

    def loss(self, z: Tensor, mixed: Tensor, y: Tensor, differ: Tensor) -> Tensor:
        """The five terms, from the logits of rows, outliers and moved outliers in turn, and of mixed features."""
        own, outliers, moved = z.chunk(3)
        unknown = torch.full_like(y, z.shape[1] - 1)
        others = own.scatter(1, y[:, None], -torch.inf)
        total = F.cross_entropy(own, y) + F.cross_entropy(others, unknown)
        total = total + F.cross_entropy(outliers, unknown) + F.cross_entropy(moved, unknown)
        if not self.mix or not differ.any():
            return total
        return total + self.mix * F.cross_entropy(mixed[differ], unknown[differ])

    def move_outliers(self, local: Local, outliers: Tensor) -> Tensor:
        """Outliers moved to where the network, as it is in evaluation, takes them least for unknown."""
        now = outliers
        local.module.eval()
        for _ in range(self.steps):
            now = now.detach().requires_grad_()
            z = local.predict(now)
            loss = F.cross_entropy(z, torch.full((len(z),), z.shape[1] - 1, device=z.device))
            (slope,) = torch.autograd.grad(loss, [now])
            now = (now + self.stride * slope.sign()).clamp(outliers - self.reach, outliers + self.reach)
        local.module.train()
        return now.detach()


def _checked_stream(local: Local) -> torch.Generator:
    """The round's random stream, after a check that there is an output for the unknown class."""
    if not local.rows.x.is_floating_point():
        raise RecipeError(
            "outliers are inputs moved along a slope and these rows are whole numbers, which have none; "
            "choose a method without an unknown class"
        )
    have, classes = outputs(Single(local.brief.spec, Posterior(local.brief.params))), local.brief.classes
    if classes and have != classes + 1:
        raise RecipeError(
            f"a network with {have} outputs has none for the unknown, with {classes} classes; "
            "let the recipe dress it with UnknownClass"
        )
    return local.stream("openset")


def with_mixed(module: nn.Module, x: Tensor, count: int, order: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """A network's logits, and those of share · h + (1 − share) · h[order] for the first `count` rows' features h.

    Features are what the last but one linear layer reads (the last, where there are only two); the mixed ones join
    the batch there, so that one forward pass serves both.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
        >>> z, mixed = with_mixed(net, torch.eye(2), 2, torch.tensor([1, 0]), 1.0)
        >>> bool(torch.allclose(z, mixed))
        True
    """
    linear = [m for m in module.modules() if isinstance(m, nn.Linear)]
    if not linear:
        raise RecipeError("the network has no linear layer, so it has no features to mix; give it a linear classifier")
    layer = _mixing_layers(linear)[0]

    def join(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        h = args[0][:count]
        return (torch.cat([args[0], share * h + (1 - share) * h[order]]),)

    try:
        with forward_hooks([(layer, join)], before=True):
            out = in_full(module(x))
    except RuntimeError as why:  # a sum with what bypasses the layer, say
        raise RecipeError(
            f"mixed features cannot join the batch where the network's last linear layers are ({error_text(why)}); "
            "choose a method without an unknown class, or a network that is one layer after another at its end"
        ) from why
    return out[: len(x)], out[len(x) :]


def _mixing_layers(linear: list[T]) -> list[T]:
    """Of all linear layers those that mixed features pass: the last two, the last where there are only two."""
    return linear[-2:] if len(linear) > 2 else linear[-1:]


Corruption = Callable[[Tensor, torch.Generator], Tensor]


def make_outliers(x: Tensor, generator: torch.Generator) -> Tensor:
    """Every row destroyed in its own way; the generator decides how.

    Example:
        >>> make_outliers(torch.rand(6, 3, 8, 8), torch.Generator().manual_seed(0)).shape
        torch.Size([6, 3, 8, 8])
    """
    if x.ndim not in (2, 4) or (x.ndim == 4 and min(x.shape[2:]) < 4):
        raise RecipeError(
            f"outliers are made of features or of images of at least 4×4 pixels, and the rows are "
            f"{'×'.join(map(str, x.shape[1:]))}; use a method without outliers"
        )
    ways = IMAGE_CORRUPTIONS if x.ndim == 4 else FEATURE_CORRUPTIONS
    way = torch.randint(len(ways), (len(x),), generator=generator).to(x.device)
    out = x.clone()
    for kind, destroy in enumerate(ways):
        mine = (way == kind).nonzero()[:, 0]
        if len(mine):
            out[mine] = destroy(x[mine], generator)
    return out


def tight_crop(x: Tensor, generator: torch.Generator) -> Tensor:
    """A window of a tenth to a third of the image's area, at a random place, blown up to the whole."""
    _, _, height, width = x.shape
    tall, wide = _box(len(x), (0.1, 0.33), (3 / 4, 4 / 3), generator)
    down, right = ((1 - side) * (2 * _draw(len(x), generator) - 1) for side in (tall, wide))
    zero = torch.zeros_like(tall)
    theta = torch.stack([torch.stack([wide, zero, right], 1), torch.stack([zero, tall, down], 1)], 1).to(x)
    grid = F.affine_grid(theta, [len(x), 1, height, width], align_corners=False)
    return F.grid_sample(x, grid, mode="bilinear", padding_mode="border", align_corners=False)


def blur(x: Tensor, generator: torch.Generator) -> Tensor:
    """A mean over 3 to 9 pixels along one axis and 1 to 5 along the other.

    The published blur is Gaussian with a standard deviation of 10 pixels or more, which over so few pixels is flat.
    """
    long = torch.randint(1, 5, (len(x),), generator=generator)
    short = torch.randint(0, 3, (len(x),), generator=generator)
    flat = torch.rand(len(x), generator=generator) < 0.5
    rows = _running_mean(x, torch.where(flat, short, long))
    return _running_mean(rows.transpose(2, 3), torch.where(flat, long, short)).transpose(2, 3)


def erase(x: Tensor, generator: torch.Generator) -> Tensor:
    """A rectangle of a third to a half of the image's area set to zero."""
    _, _, height, width = x.shape
    tall, wide = _box(len(x), (0.33, 0.5), (0.3, 3.3), generator)
    gone = _band(height, tall, generator)[:, :, None] & _band(width, wide, generator)[:, None, :]
    return x.masked_fill(gone[:, None].to(x.device), 0.0)


def cut_and_paste(x: Tensor, generator: torch.Generator) -> Tensor:
    """Half of the image pasted over another half, or its two halves swapped; across or along."""
    n, _, height, width = x.shape
    kind = torch.randint(6, (n,), generator=generator)  # 0, 1, 2 along the width, 3, 4, 5 along the height
    across, swap = kind < 3, kind % 3 == 2
    columns = torch.where((across & swap)[:, None], _swap_halves(width), _paste_half(n, width, generator))
    rows = torch.where((~across & swap)[:, None], _swap_halves(height), _paste_half(n, height, generator))
    columns = torch.where(across[:, None], columns, torch.arange(width))
    rows = torch.where(across[:, None], torch.arange(height), rows)
    return _gather_pixels(x, rows[:, :, None].expand(n, height, width), columns[:, None, :].expand(n, height, width))


def rotate_quarters(x: Tensor, generator: torch.Generator) -> Tensor:
    """Two squares side by side, each as high as half the image, turned by one to three quarter turns."""
    n, _, height, width = x.shape
    half = min(height, width) // 2
    top = torch.randint(height - half + 1, (n, 1, 1), generator=generator)
    turns = torch.randint(1, 4, (n, 1, 1), generator=generator)
    i, j = torch.arange(height)[None, :, None], torch.arange(width)[None, None, :]
    left = (j // half) * half
    a, b = i - top, j - left  # within a square
    inside = (a >= 0) & (a < half) & (j < 2 * half)
    row, column = a.expand(n, height, width), b.expand(n, height, width)
    for turn in range(1, 4):
        again = turns >= turn
        row, column = torch.where(again, column, row), torch.where(again, half - 1 - row, column)
    return _gather_pixels(x, torch.where(inside, row + top, i), torch.where(inside, column + left, j))


def erase_features(x: Tensor, generator: torch.Generator) -> Tensor:
    """A third to a half of the features set to zero, at random places."""
    share = 1 / 3 + _draw(len(x), generator) / 6
    rank = torch.rand(x.shape, generator=generator).argsort(1)
    return x.masked_fill((rank < (share * x.shape[1]).ceil()[:, None]).to(x.device), 0.0)


def shuffle_features(x: Tensor, generator: torch.Generator) -> Tensor:
    """Half of the features, at random places, moved round one place among themselves."""
    columns = torch.rand(x.shape, generator=generator).argsort(1)[:, : max(2, x.shape[1] // 2)].to(x.device)
    return x.scatter(1, columns, x.gather(1, columns.roll(1, 1)))


IMAGE_CORRUPTIONS: tuple[Corruption, ...] = (
    tight_crop,
    blur,
    erase,
    cut_and_paste,
    rotate_quarters,
    cut_and_paste,
    rotate_quarters,
)
FEATURE_CORRUPTIONS: tuple[Corruption, ...] = (erase_features, shuffle_features)


def _draw(n: int, generator: torch.Generator) -> Tensor:
    return torch.rand(n, generator=generator)


def _box(
    n: int, area: tuple[float, float], ratio: tuple[float, float], generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Heights and widths of n boxes as shares of the image, of random area and shape."""
    size = area[0] + (area[1] - area[0]) * _draw(n, generator)
    low, high = (math.log(r) for r in ratio)
    shape = (low + (high - low) * _draw(n, generator)).exp()
    return (size / shape).sqrt().clamp(max=1), (size * shape).sqrt().clamp(max=1)


def _band(length: int, share: Tensor, generator: torch.Generator) -> Tensor:
    """For each image which positions lie in an interval of this share of the length, at a random place."""
    size = (share * length).round().clamp(1, length)
    begin = (_draw(len(share), generator) * (length - size + 1)).floor()
    at = torch.arange(length)
    return (at >= begin[:, None]) & (at < (begin + size)[:, None])


def _swap_halves(length: int) -> Tensor:
    """Where each position of two swapped halves comes from."""
    half = length // 2
    return torch.cat([torch.arange(length - half, length), torch.arange(length - half)])


def _paste_half(n: int, length: int, generator: torch.Generator) -> Tensor:
    """Where each position comes from when one half is pasted over another at least a quarter of the length away."""
    half = length // 2
    far = (half + 1) // 2
    begin = torch.randint(half, (n,), generator=generator)
    below, above = (begin - far + 1).clamp(min=0), (half - begin - far).clamp(min=0)  # how many places there are
    choice = (_draw(n, generator) * (below + above).clamp(min=1)).long()
    source = torch.where(choice < below, choice, begin + far + choice - below).clamp(max=length - half)
    at = torch.arange(length)
    inside = (at >= begin[:, None]) & (at < (begin + half)[:, None])
    return torch.where(inside, at + (source - begin)[:, None], at)


def _running_mean(x: Tensor, radius: Tensor) -> Tensor:
    """The mean over 2r + 1 neighbours along the last axis, each image with its own r; edges are mirrored."""
    n, channels, height, width = x.shape
    reach = min(int(radius.max()), width - 1) if n else 0
    radius = radius.clamp(max=reach)
    sums = F.pad(F.pad(x, (reach, reach, 0, 0), mode="reflect").cumsum(-1), (1, 0))
    at = torch.arange(width) + reach
    ends = (at + radius[:, None] + 1, at - radius[:, None])
    high, low = (e.to(x.device)[:, None, None].expand(n, channels, height, width) for e in ends)
    return (sums.gather(-1, high) - sums.gather(-1, low)) / (2 * radius.to(x) + 1).view(n, 1, 1, 1)


def _gather_pixels(x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Each pixel from the row and column named for it (n, height, width)."""
    n, channels, height, width = x.shape
    at = (rows * width + columns).view(n, 1, height * width).to(x.device)
    return x.flatten(2).gather(2, at.expand(n, channels, -1)).view_as(x)


@method("fedov", paper="https://openreview.net/forum?id=rzrqh85f4Sc", family="predictions")
def fedov(
    voters: PositiveInt | Literal["all"] = "all",
    steps: NonNegativeInt = 5,
    stride: PositiveFloat = 0.002,
    reach: PositiveFloat = 0.5,
    mix: NonNegativeFloat = 0.01,
    distill: InputSource = "none",
    inputs: PositiveInt = 2000,
    temperature: PositiveFloat = 20.0,
    epochs: PositiveInt = 100,
    lr: PositiveFloat = 1e-3,
) -> Recipe:
    """Networks with an output for "unknown", trained on destroyed rows too, vote on what they know.

    Every client's network gets one output more. An input's votes are the class probabilities of the networks that
    least take it for unknown.

    Args:
        voters: how many networks vote on an input, or "all".
        steps: adversarial steps that make outliers harder.
        stride: the size of such a step.
        reach: how far the steps may move a pixel.
        mix: weight of the term of mixed features.
        distill: the inputs on which one network learns from all: "server" rows, "unlabelled" inputs, "impressions" or
            "generated" ones made of the networks themselves; "none" keeps all networks.
        inputs: how many "impressions" are made.
        temperature: of distillation.
        epochs: of distillation.
        lr: of distillation, by Adam.
    """
    return Recipe(
        objective=OpenSet(steps, stride, reach, mix),
        prepare_model=UnknownClass(),
        aggregate=KeepAll(OpenSetVote(voters)),
        steps=distillation(distill, inputs, temperature, epochs, lr),
    )

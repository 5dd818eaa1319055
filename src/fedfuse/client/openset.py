"""FedOV's local training: a network that knows what it does not know."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedfuse.client.outliers import make_outliers
from fedfuse.core.effort import TRAINING_PASSES, Effort
from fedfuse.core.hooks import forward_hooks
from fedfuse.core.model import Single, outputs
from fedfuse.core.posterior import Posterior
from fedfuse.core.precision import in_full
from fedfuse.core.seams import Batch
from fedfuse.core.state import Local
from fedfuse.errors import RecipeError, error_text
from fedfuse.nets.cost import layer_costs

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

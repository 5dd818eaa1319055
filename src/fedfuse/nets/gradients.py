"""How much the loss would fall for each weight: squared gradients, of weights that are masked too."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedfuse.core.precision import answer_in_full, in_full
from fedfuse.core.rows import Rows
from fedfuse.core.spec import Spec
from fedfuse.tasks import CLASSIFICATION, Task


def maskable(spec: Spec) -> tuple[str, ...]:
    """The weights that masks may hold at zero: those of linear layers and convolutions that train, and under one name.

    Example:
        >>> maskable(Spec("mlp", {"inputs": 4, "hidden": [3], "classes": 2}))
        ('fc1.weight', 'classifier.weight')
    """
    own = frozenset(spec.layout.trainable).difference(*spec.layout.tied)
    return tuple(layer.weight for layer in spec.layout.layers if layer.is_plain and layer.weight in own)


def is_every_nth(round_: int, every: int) -> bool:
    """Whether a round, counted from 0, is the every-th, the 2·every-th, …, counted from 1.

    Example:
        >>> [is_every_nth(r, 2) for r in range(4)]
        [False, True, False, True]
    """
    return (round_ + 1) % every == 0


def squared_gradients(
    module: nn.Module,
    names: tuple[str, ...],
    rows: Rows,
    *,
    batch: int,
    batches: int,
    generator: torch.Generator,
    task: Task = CLASSIFICATION,
) -> dict[str, Tensor]:
    """Mean over some batches of (∂L/∂w)², for the named weights, in evaluation mode."""
    module.eval()
    params = dict(module.named_parameters())
    total = {n: torch.zeros_like(in_full(params[n].detach())) for n in names}
    order = torch.randperm(len(rows), generator=generator).to(rows.y.device).split(batch)[:batches]
    with torch.enable_grad():
        for index in order:
            some = rows.take(index)
            loss = task.loss(answer_in_full(module, some.x), some.y)
            slopes = torch.autograd.grad(loss, [params[n] for n in names], materialize_grads=True)
            for name, slope in zip(names, slopes, strict=True):
                total[name] += in_full(slope.detach()).square() / len(order)
    return total

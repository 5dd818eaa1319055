"""How much the loss would fall for each weight: squared gradients, of weights that are masked too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedfuse.core.messages import Brief, Flaw, Form
from fedfuse.core.params import Params
from fedfuse.core.posterior import Geometry
from fedfuse.core.precision import answer_in_full, full_dtype, in_full
from fedfuse.core.rows import Rows
from fedfuse.core.spec import Spec
from fedfuse.core.state import Local, filed
from fedfuse.wire.codec import forms_of


def maskable(spec: Spec) -> tuple[str, ...]:
    """The weights that masks may hold at zero: those of linear layers and convolutions that train, and under one name.

    Example:
        >>> maskable(Spec("mlp", {"inputs": 4, "hidden": [3], "classes": 2}))
        ('fc1.weight', 'classifier.weight')
    """
    own = frozenset(spec.layout.trainable).difference(*spec.layout.tied)
    return tuple(layer.weight for layer in spec.layout.layers if layer.kind != "other" and layer.weight in own)


def squared_gradients(
    module: nn.Module, names: tuple[str, ...], rows: Rows, *, batch: int, batches: int, generator: torch.Generator
) -> dict[str, Tensor]:
    """Mean over some batches of (∂L/∂w)², for the named weights, in evaluation mode."""
    module.eval()
    params = dict(module.named_parameters())
    total = {n: torch.zeros_like(in_full(params[n].detach())) for n in names}
    order = torch.randperm(len(rows), generator=generator).to(rows.y.device).split(batch)[:batches]
    with torch.enable_grad():
        for index in order:
            some = rows.take(index)
            loss = F.cross_entropy(answer_in_full(module, some.x), some.y)
            slopes = torch.autograd.grad(loss, [params[n] for n in names], materialize_grads=True)
            for name, slope in zip(names, slopes, strict=True):
                total[name] += in_full(slope.detach()).square() / len(order)
    return total


@dataclass(frozen=True, slots=True)
class SquaredGradients:
    """The mean squared gradient of every weight that can be masked, in the rounds that reconfigure.

    Attributes:
        every: they come in rounds every, 2·every, …, counted from 1.
        batches: batches of the client's own size it is a mean over.
    """

    every: int = 50
    batches: int = 5
    name: ClassVar[str] = "gradients"
    reveals: ClassVar[str] = "squared gradients of its rows, now and then"

    def is_due(self, round_: int) -> bool:
        """Whether a round, counted from 0, brings them."""
        return (round_ + 1) % self.every == 0

    def __call__(self, local: Local) -> Params:
        """One tensor per weight."""
        if not self.is_due(local.brief.round):
            return {}
        names, size = maskable(local.brief.spec), local.settings.batch_size
        draw = local.stream(self.name)
        found = squared_gradients(local.module, names, local.rows, batch=size, batches=self.batches, generator=draw)
        return filed(self.name, {n: t.cpu() for n, t in found.items()})

    def expects(self, brief: Brief) -> Mapping[str, Form]:
        """A tensor of the weight's shape, in float32 at least, for each; nothing in other rounds."""
        if not self.is_due(brief.round):
            return {}
        forms = forms_of(brief.params)
        wanted = {n: Form(forms[n].shape, full_dtype(forms[n].dtype)) for n in maskable(brief.spec)}
        return {f"{self.name}/{n}": form for n, form in wanted.items()}

    def check(self, notes: Params, mass: float) -> Flaw | None:  # noqa: ARG002 - the seam's signature
        """Squares are not negative."""
        for name in notes:
            if name.startswith(f"{self.name}/") and (notes[name] < 0).any():
                return Flaw(name, float(notes[name].min()), "squares, numbers ≥ 0")
        return None

    def geometry(self, notes: Params) -> Geometry | None:  # noqa: ARG002 - the seam's signature
        """Says nothing about the posterior."""
        return None

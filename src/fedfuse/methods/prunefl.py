"""Jiang et al., Model Pruning Enables Efficient Federated Learning on Edge Devices, TNNLS 2022.

A mask keeps the weights that lower the loss most per unit of round time. A weight's worth is its squared gradient g_j²,
its price t_j the time it adds to a round; a trade keeps the set of largest Σ g_j² / (c + Σ t_j).

    before round 1   the server trains and trades on its own rows until the density settles      `PruneFirst`
    client           w_k ← mask ⊙ (w_k − η g_k), τ times                                         `Masked`
                     g_k² of every weight, in the rounds that trade                              `SquaredGradients`
    server           w ← Σ f_k w_k, and in those rounds a trade by Σ f_k g_k²                    `Reconfigure`
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field, NonNegativeFloat, PositiveInt

from fedfuse.core.messages import Brief, Flaw, Form
from fedfuse.core.params import Params
from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import method
from fedfuse.core.seams import TRAINING_PASSES, Effort, PlainEvidence
from fedfuse.core.state import Local, with_kind
from fedfuse.core.torch_utils import full_dtype
from fedfuse.nets.curvature import is_every_nth, maskable, squared_gradients
from fedfuse.server.aggregate.mean import Mean
from fedfuse.server.steps.mask import Exchange, PruneFirst, Reconfigure
from fedfuse.training.pulls import Masked
from fedfuse.wire.codec import forms_of


@dataclass(frozen=True, slots=True)
class SquaredGradients(PlainEvidence):
    """The mean squared gradient of every weight that can be masked, in the rounds that reconfigure.

    Attributes:
        every: they come in rounds every, 2·every, …, counted from 1.
        batches: batches of the client's own size it is a mean over.
    """

    every: int = 50
    batches: int = 5
    name: ClassVar[str] = "gradients"
    reveals: ClassVar[str] = "squared gradients of its rows, now and then"
    room: ClassVar[float] = 10.0  # networks that know their rows by heart have gradients of any size

    def is_due(self, round_: int) -> bool:
        """Whether a round, counted from 0, brings them."""
        return is_every_nth(round_, self.every)

    def __call__(self, local: Local) -> Params:
        """One tensor per weight."""
        if not self.is_due(local.brief.round):
            return {}
        names, size = maskable(local.brief.spec), local.settings.batch_size
        found = squared_gradients(
            local.module,
            names,
            local.rows,
            batch=size,
            batches=self.batches,
            generator=local.stream(self.name),
            task=local.task,
        )
        return with_kind(self.name, {n: t.cpu() for n, t in found.items()})

    def passes(self, effort: Effort) -> float:
        """A gradient of some batches, in the rounds that bring them."""
        rows = min(effort.rows, self.batches * effort.settings.batch_size)
        return TRAINING_PASSES * rows / effort.rows if self.is_due(effort.round) else 0.0

    def expects(self, brief: Brief) -> Mapping[str, Form]:
        """A tensor of the weight's shape, in float32 at least, for each; nothing in other rounds."""
        if not self.is_due(brief.round):
            return {}
        forms = forms_of(brief.params)
        wanted = {n: Form(forms[n].shape, full_dtype(forms[n].dtype)) for n in maskable(brief.spec)}
        return {f"{self.name}/{n}": form for n, form in wanted.items()}

    def check(self, notes: Params, num_examples: float) -> Flaw | None:  # noqa: ARG002 - the seam's signature
        """Squares are not negative."""
        for name in notes:
            if name.startswith(f"{self.name}/") and (notes[name] < 0).any():
                return Flaw(name, float(notes[name].min()), "squares, numbers ≥ 0")
        return None

    def influence(self, notes: Params) -> Mapping[str, float]:
        """The mean square of each tensor: masks follow their sum over clients."""
        return {n: float(notes[n].double().mean()) for n in notes if n.startswith(f"{self.name}/")}


@method("prunefl", paper="arXiv:1909.12326", family="pruned")
def prunefl(
    every: PositiveInt = 50,
    drop: Annotated[float, Field(gt=0, lt=1)] = 0.3,
    half_life: PositiveInt = 10_000,
    overhead: NonNegativeFloat = 0.1,
    steps: PositiveInt = 50,
    change: Annotated[float, Field(gt=0, lt=1)] = 0.1,
    patience: PositiveInt = 5,
    most: PositiveInt = 50,
    batches: PositiveInt = 5,
) -> Recipe:
    """FedAvg of a masked network whose weights are traded for those worth more per unit of round time.

    First, before any client trains, the server finds a small network on its own rows; then, every so many rounds, the
    mask is traded by everybody's squared gradients. The masks are unstructured: messages shrink as a sparse encoding
    would, training gets no faster.

    Args:
        every: rounds between two trades, in which clients send squared gradients.
        drop: the share of each layer's weights, the smallest, that each trade puts in doubt.
        half_life: rounds after which only half as many are put in doubt.
        overhead: the part of a round's time that pruning cannot save, as a share of the whole network's.
        steps: of the server's training between two trades of the first stage.
        change: a smaller relative change of the density counts as none.
        patience: so many of those in a row end the first stage.
        most: trades of the first stage, at most.
        batches: batches a squared gradient is a mean over.
    """
    trade, gradients = Exchange(drop, overhead), SquaredGradients(every, batches)
    return Recipe(
        project=Masked(),
        evidence=(gradients,),
        aggregate=Mean(),
        steps=(Reconfigure(every, trade, half_life),),
        publishes=("mask",),
        before_first_round=PruneFirst(steps, trade, change, patience, most, batches),
    )

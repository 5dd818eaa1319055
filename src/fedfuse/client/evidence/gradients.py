"""How much the loss would fall for each weight: squared gradients, of weights that are masked too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from fedfuse.core.effort import TRAINING_PASSES, Effort
from fedfuse.core.messages import Brief, Flaw, Form
from fedfuse.core.params import Params
from fedfuse.core.precision import full_dtype
from fedfuse.core.seams import PlainEvidence
from fedfuse.core.state import Local, with_kind
from fedfuse.nets.gradients import is_every_nth, maskable, squared_gradients
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

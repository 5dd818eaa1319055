"""Means and deviations of hidden units: what a merged network must be brought back to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from fedfuse.core.effort import Effort
from fedfuse.core.messages import Brief, Flaw, Form
from fedfuse.core.params import Layer, Params
from fedfuse.core.seams import PlainEvidence
from fedfuse.core.state import Local
from fedfuse.nets.units import UnitStatistics, layers_in_turn, rescalable_layers, unit_statistics
from fedfuse.wire.codec import forms_of


@dataclass(frozen=True, slots=True)
class UnitEvidence(PlainEvidence):
    """Mean or standard deviation of hidden units before their activation, over the client's rows and positions.

    They travel under the name of the unit's bias and have its shape, so an alignment moves them with their units.

    Attributes:
        what: which of the two; both are found in one pass.
        round: the round, counted from 0, whose replies bring those of every layer; None brings, whenever it is asked,
            those of the one layer whose turn it is.
    """

    what: Literal["mean", "std"] = "mean"
    round: int | None = None
    room: ClassVar[float] = 10.0  # a unit may be silent on one client's rows and busy on another's

    @property
    def name(self) -> str:
        """One kind of notes for means, one for deviations."""
        return f"unit_{self.what}"

    @property
    def reveals(self) -> str:
        """One number per unit."""
        words = "mean" if self.what == "mean" else "standard deviation"
        return f"the {words} of every hidden unit over the client's rows"

    def __call__(self, local: Local) -> Params:
        """A number per unit."""
        layers = self._layers(local.brief)
        found = local.once(f"units/{self.round}", lambda at: _measure(at, layers))
        return {f"{self.name}/{bias}": getattr(both, self.what).cpu() for bias, both in found.items()}

    def passes(self, effort: Effort) -> float:
        """A pass forward for both, counted with the means."""
        return 1.0 if self.what == "mean" and self.round in (None, effort.round) else 0.0

    def expects(self, brief: Brief) -> Mapping[str, Form]:
        """A number per unit, under the name of its bias."""
        forms = forms_of(brief.params)
        biases = [layer.bias for layer in self._layers(brief) if layer.bias is not None]
        return {f"{self.name}/{bias}": Form(forms[bias].shape, torch.float64) for bias in biases}

    def check(self, notes: Params, num_examples: float) -> Flaw | None:  # noqa: ARG002 - the seam's signature
        """A deviation is not negative."""
        for name, values in notes.items():
            if name.startswith("unit_std/") and float(least := values.min()) < 0:
                return Flaw(name, float(least), "numbers ≥ 0")
        return None

    def influence(self, notes: Params) -> Mapping[str, float]:
        """How large they are: means and deviations are averaged over clients."""
        own = [values for name, values in notes.items() if name.startswith(f"{self.name}/")]
        return {self.name: float(torch.cat(own).square().mean().sqrt())} if own else {}

    def _layers(self, brief: Brief) -> list[Layer]:
        if self.round is None:
            return layers_in_turn(brief.spec, brief.memory)[:1]
        return rescalable_layers(brief.spec) if brief.round == self.round else []


def _measure(local: Local, layers: list[Layer]) -> dict[str, UnitStatistics]:
    """By the layers' biases."""
    if not layers:
        return {}
    found = unit_statistics(local.brief.spec, local.module.state_dict(), layers, local.rows.x)
    return {layer.bias: found[layer.name] for layer in layers if layer.bias is not None}

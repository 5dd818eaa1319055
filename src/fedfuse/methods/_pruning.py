"""Options that methods which prune share: when, how much, and which filters stay."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from pydantic import PositiveFloat, PositiveInt

from fedfuse.client.class_sums import LabelCounts
from fedfuse.core.messages import Brief, Flaw, Form
from fedfuse.core.params import Params
from fedfuse.core.seams import TRAINING_PASSES, CurvatureEvidence, Effort, Evidence
from fedfuse.core.settings import Settings
from fedfuse.core.state import Local, live_names
from fedfuse.nets.curvature import CurvatureProbe
from fedfuse.server.steps.prune import ExpectedRate, FixedRate, LayerRule, Prune, ScoreRule, Share, SpectralRate
from fedfuse.wire.codec import forms_of


@dataclass(frozen=True, slots=True)
class CurvatureSpectrum(CurvatureEvidence):
    """The spectrum of the client's Hessian at its trained weights, in one round only: it costs some dozen gradients.

    Attributes:
        round: the round, counted from 0, whose replies bring it.
        look: how closely the Hessian is looked at.
    """

    round: int = 0
    probe: CurvatureProbe = field(default_factory=CurvatureProbe)
    name: ClassVar[str] = "spectrum"
    reveals: ClassVar[str] = "the eigenvalues of the curvature of its loss, once"
    room: ClassVar[float] = 20.0  # networks that know their rows by heart have curvatures of any size

    def __call__(self, local: Local) -> Params:
        """Ritz values, their weights, and the Lipschitz estimate."""
        if local.brief.round != self.round:
            return {}
        seen = self.probe(local.module, local.anchor, local.rows, local.stream(self.name), local.task)
        return {
            "spectrum/values": seen.spectrum.values.double(),
            "spectrum/weights": seen.spectrum.weights.double(),
            "spectrum/lipschitz": torch.tensor(seen.lipschitz, dtype=torch.float64),
        }

    def passes(self, effort: Effort) -> float:
        """In its round, Hessian-vector products of some rows, each the gradient of a gradient: twice its work."""
        if effort.round != self.round:
            return 0.0
        products = self.probe.steps * self.probe.probes
        return 2 * TRAINING_PASSES * products * min(effort.rows, self.probe.rows) / effort.rows

    def expects(self, brief: Brief) -> Mapping[str, Form]:
        """A row of numbers per probe, and one number; nothing in other rounds."""
        if brief.round != self.round:
            return {}
        forms = forms_of(brief.params)
        size = sum(math.prod(forms[n].shape) for n in live_names(brief))
        row = Form((self.probe.probes, self.probe.num_values(size)), torch.float64)
        return {"spectrum/values": row, "spectrum/weights": row, "spectrum/lipschitz": Form((), torch.float64)}

    def check(self, notes: Params, num_examples: float) -> Flaw | None:  # noqa: ARG002 - the seam's signature
        """Values ascend, weights are a distribution, and a Lipschitz constant is not negative."""
        if "spectrum/values" not in notes:
            return None
        values, weights = notes["spectrum/values"], notes["spectrum/weights"]
        if (values.diff() < 0).any():
            return Flaw("spectrum/values", "out of order", "eigenvalues in ascending order")
        if (weights < 0).any() or ((weights.sum(1) - 1).abs() > 1e-6).any():
            return Flaw("spectrum/weights", weights.sum(1).tolist(), "weights ≥ 0 that sum to 1")
        if notes["spectrum/lipschitz"] < 0:
            return Flaw("spectrum/lipschitz", float(notes["spectrum/lipschitz"]), "a number ≥ 0")
        return None

    def influence(self, notes: Params) -> Mapping[str, float]:
        """The Lipschitz estimate and the largest eigenvalue, which set the share of weights that may go."""
        if "spectrum/values" not in notes:
            return {}
        largest = float(notes["spectrum/values"].abs().max())
        return {"spectrum/lipschitz": float(notes["spectrum/lipschitz"]), "spectrum/values": largest}


_PROBE = CurvatureProbe()


class Rates(Settings):
    """When a network is pruned, and how much of it.

    Args:
        at: it happens at the end of this round, counted from 1.
        rule: how a rate is read off a spectrum: plateau (the released rule's plateau, the paper's side of it), gap
            (the paper's eigen-gap of 4 Lipschitz constants), or fixed, which needs no spectrum.
        rate: the share of all weights that may go, where the rule is fixed.
        lanczos: Hessian-vector products per probe.
        probes: random vectors the spectrum is seen from.
        sample: rows of the loss whose Hessian is looked at.
        eps: ε of eq. 6, which keeps the weight of a client with everybody's labels finite.
    """

    at: PositiveInt = 30
    rule: Literal["plateau", "gap", "fixed"] = "plateau"
    rate: Share = 0.6
    lanczos: PositiveInt = _PROBE.steps
    probes: PositiveInt = _PROBE.probes
    sample: PositiveInt = _PROBE.rows
    eps: PositiveFloat = 1e-4

    @property
    def evidence(self) -> tuple[Evidence, ...]:
        """What clients must send for it."""
        return () if self.rule == "fixed" else (LabelCounts(), CurvatureSpectrum(self.at - 1, self._probe))

    def expected_rate(self) -> ExpectedRate:
        """How the rate is found."""
        return FixedRate(self.rate) if self.rule == "fixed" else SpectralRate(self.rule, self._probe, self.eps)

    @property
    def _probe(self) -> CurvatureProbe:
        return CurvatureProbe(self.lanczos, self.probes, self.sample)


class FilterRanking(Settings):
    """Which filters stay.

    Args:
        images: server rows whose feature maps are ranked.
        tolerance: of a feature map's rank, relative to its largest singular value; by default that of rounding.
        by: a filter's score: the mean "rank" of its feature maps, the mean "magnitude" of its weights, or "random".
        inner: leave alone the channels in which a residual network adds several convolutions' outputs.
        renorm: estimate BatchNorm's running statistics anew on the server's rows, where it has any.
    """

    images: PositiveInt = 500
    tolerance: PositiveFloat | None = None
    by: ScoreRule = "rank"
    inner: bool = True
    renorm: bool = True

    def step(self, round_: int, rate: ExpectedRate, layer_rule: LayerRule) -> Prune:
        """The step that removes filters at the end of this round."""
        return Prune(round_, rate, layer_rule, **dict(self))


RATES, RANKING = Rates(), FilterRanking()

"""Options that methods which prune share: when, how much, and which filters stay."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveFloat, PositiveInt

from fedfuse.client.evidence.counts import LabelCounts
from fedfuse.client.evidence.spectrum import CurvatureSpectrum
from fedfuse.core.seams import Evidence
from fedfuse.core.settings import Settings
from fedfuse.nets.curvature import CurvatureProbe
from fedfuse.server.steps.prune import LayerRule, Prune, ScoreRule, Share
from fedfuse.server.steps.rates import ExpectedRate, FixedRate, SpectralRate

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

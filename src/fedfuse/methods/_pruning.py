"""Options that methods which prune share: when, how much, and which filters stay."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveFloat, PositiveInt

from fedfuse.client.evidence.counts import LabelCounts
from fedfuse.client.evidence.spectrum import CurvatureSpectrum
from fedfuse.core.seams import Evidence
from fedfuse.core.settings import Settings
from fedfuse.nets.curvature import Look
from fedfuse.server.steps.prune import Share
from fedfuse.server.steps.rates import ExpectedRate, FixedRate, SpectralRate

_LOOK = Look()


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
    lanczos: PositiveInt = _LOOK.steps
    probes: PositiveInt = _LOOK.probes
    sample: PositiveInt = _LOOK.rows
    eps: PositiveFloat = 1e-4

    @property
    def evidence(self) -> tuple[Evidence, ...]:
        """What clients must send for it."""
        return () if self.rule == "fixed" else (LabelCounts(), CurvatureSpectrum(self.at - 1, self._look))

    def expected(self) -> ExpectedRate:
        """How the rate is found."""
        return FixedRate(self.rate) if self.rule == "fixed" else SpectralRate(self.rule, self._look, self.eps)

    @property
    def _look(self) -> Look:
        return Look(self.lanczos, self.probes, self.sample)


class Ranking(Settings):
    """Which filters stay.

    Args:
        images: server rows whose feature maps are ranked.
        tolerance: of a feature map's rank, relative to its largest singular value; by default that of rounding.
    """

    images: PositiveInt = 500
    tolerance: PositiveFloat | None = None


RATES, RANKING = Rates(), Ranking()

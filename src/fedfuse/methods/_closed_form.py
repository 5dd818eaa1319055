"""Options that methods share which fit a head in closed form: from which sums, how, and with what noise."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, NonNegativeFloat, PositiveFloat

from fedfuse.client.evidence.moments import Moments, Precision
from fedfuse.client.evidence.private_moments import Counts, PrivateMoments
from fedfuse.core.settings import Settings
from fedfuse.linalg.ridge import Rule
from fedfuse.server.aggregate.closed_form import FitHead, Head


class HeadFit(Settings):
    """How a linear layer is fitted to sums of what it reads.

    Args:
        penalty: λ in units of ΣG's mean eigenvalue; "gcv" (generalized cross-validation) and "evidence" (marginal
            likelihood) choose it from the sums.
        head: ridge, or gaussian for linear discriminant analysis from the same sums.
        temperature: what answers are divided by to be logits; by default 0.1 for ridge and 1 for gaussian. Numbers are
            no logits and stay as they are.
        layer: the linear layer that is fitted; by default the last.
        precision: "network" computes features as the network does, "float64" in float64, at about twice the time.
        epsilon: add noise that makes each client's sums (ε, δ)-differentially private in any one row; none by default.
        delta: its δ.
        clip: the length that features are shortened to before they are summed, where there is noise.
        counts: class counts are noised, or public by agreement.
        reproducible: draw the noise from the seed, for simulations alone; else from the operating system.
    """

    penalty: NonNegativeFloat | Rule = "gcv"
    head: Head = "ridge"
    temperature: PositiveFloat | None = None
    layer: str = ""
    precision: Precision = "network"
    epsilon: PositiveFloat | None = None
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    clip: PositiveFloat = 1.0
    counts: Counts = "noised"
    reproducible: bool = False

    @property
    def moments(self) -> Moments:
        """The sums, without noise."""
        return Moments(self.layer, self.precision)

    @property
    def evidence(self) -> Moments | PrivateMoments:
        """The sums that clients send."""
        if self.epsilon is None:
            return self.moments
        return PrivateMoments(self.epsilon, self.delta, self.clip, self.counts, self.reproducible, self.moments)

    def fit(self) -> FitHead:
        """How they become a head."""
        sent = self.evidence
        noise = sent.sigma * self.clip**2 if isinstance(sent, PrivateMoments) else 0.0
        return FitHead(self.layer, self.penalty, self.head, self.temperature, noise)


USUAL = HeadFit()

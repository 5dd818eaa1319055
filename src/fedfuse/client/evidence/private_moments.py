"""Sums with noise: moments that tell nearly the same whether any one row is another."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, TypeAlias

import torch
from torch import Tensor

from fedfuse.client.evidence.moments import Moments
from fedfuse.core.effort import Effort
from fedfuse.core.messages import Brief, Flaw, Form
from fedfuse.core.params import Params
from fedfuse.core.privacy import Release, gaussian_sigma
from fedfuse.core.seams import PlainEvidence
from fedfuse.core.state import Local
from fedfuse.linalg.psd import pack, unpack
from fedfuse.linalg.ridge import Sums
from fedfuse.nets.head import KIND, moment_notes, sums_in

Counts: TypeAlias = Literal["noised", "public"]

_SQUARED_SENSITIVITY: dict[Counts, float] = {"noised": 6.0, "public": 4.5}
_SLACK = 1e-6
_FAR = 8.0  # deviations by which a noise's length exceeds its usual one with a probability below 1e-14


@dataclass(frozen=True, slots=True)
class PrivateMoments(PlainEvidence):
    """`Moments` of clipped rows with Gaussian noise: (ε, δ)-differentially private in any one row of the client.

    Every row's features are shortened to the length `clip` and measured in it, so that ‖φ‖ ≤ 1. What is released is
    the triangle of Σ φφᵀ, the table Σ φtᵀ, and the class counts, with noise of the analytic Gaussian mechanism; the
    constant's sums follow from the table, and the number of rows is told as it is. Neighbours therefore are clients
    with as many rows of which one is another. It changes the release by at most √6: two each by the triangle, the
    table and the counts, squared. Where counts are public by agreement, the other row has the same class: √4.5.

    Attributes:
        epsilon: ε of one exchange.
        delta: its δ.
        clip: the length that rows' features are shortened to; a public number.
        counts: class counts are "noised", or "public" by agreement.
        reproducible: draw the noise from the run's seed. For simulations alone: whoever knows the seed can take the
            noise away again. Otherwise it comes from the operating system.
        of: which layer, and how it is run.
    """

    epsilon: float
    delta: float = 1e-5
    clip: float = 1.0
    counts: Counts = "noised"
    reproducible: bool = False
    of: Moments = field(default_factory=Moments)
    name: ClassVar[str] = KIND
    needs_classes: ClassVar[bool] = True

    @property
    def sigma(self) -> float:
        """The standard deviation of the noise, for features measured in units of the clip."""
        return gaussian_sigma(self.epsilon, self.delta, self.sensitivity)

    @property
    def sensitivity(self) -> float:
        """How far one row can move the release."""
        return math.sqrt(_SQUARED_SENSITIVITY[self.counts])

    @property
    def release(self) -> Release:
        """What one exchange tells of any one row."""
        return Release(self.sensitivity / self.sigma, self.delta)

    @property
    def reveals(self) -> str:
        """What the sums tell, and how surely they do not tell of one row."""
        known = "the number of rows" if self.counts == "noised" else "the number of rows of each class"
        return (
            f"{known}, exactly; class means of the features and their second moments with Gaussian noise, "
            f"differentially private in one row replaced: ε = {self.epsilon:g}, δ = {self.delta:g} for this exchange "
            f"(features clipped to {self.clip:g})"
        )

    def __call__(self, local: Local) -> Params:
        """The sums at the weights the client has, with noise."""
        own = sums_in(replace(self.of, clip=self.clip)(local))
        draw = local.stream("privacy") if self.reproducible else torch.Generator().manual_seed(secrets.randbits(63))
        return moment_notes(add_noise(own, self.sigma, self.clip, self.counts, draw))

    def passes(self, effort: Effort) -> float:
        """As many as without noise."""
        return self.of.passes(effort)

    def expects(self, brief: Brief) -> Mapping[str, Form]:
        """As without noise."""
        return self.of.expects(brief)

    def check(self, notes: Params, num_examples: float) -> Flaw | None:
        """What noise leaves true: the number of rows, counts that add up to it, and how long sums of short rows can be.

        n rows of length up to `clip` have ‖Σφφᵀ‖ ≤ n clip² and ‖Σφtᵀ‖ ≤ n clip; noise is hardly longer than √entries.
        """
        sums = sums_in(notes)
        counts = sums.cross[-1]
        if sums.count != num_examples:
            return Flaw(f"{KIND}/gram", f"a count of {sums.count:g}", f"the num_examples {num_examples:g}")
        if bool((counts < 0).any()) or abs(float(counts.sum()) - num_examples) > _SLACK * num_examples:
            return Flaw(f"{KIND}/cross", "other class counts", f"counts ≥ 0 that sum to {num_examples:g}")
        inner, table = sums.gram[:-1, :-1], sums.cross[:-1]
        noise = {
            "gram": math.sqrt(len(inner) * (len(inner) + 1)) + _FAR * math.sqrt(2),
            "cross": math.sqrt(table.numel()) + _FAR,
        }
        for what, part, unit in (("gram", inner, self.clip**2), ("cross", table, self.clip)):
            most = unit * (num_examples + self.sigma * noise[what])
            if (length := float(part.norm())) > most * (1 + _SLACK):
                return Flaw(
                    f"{KIND}/{what}", f"{length:.4g} long", f"at most {most:.4g}, for rows clipped to {self.clip:g}"
                )
        return None

    def influence(self, notes: Params) -> Mapping[str, float]:
        """The mean square of a feature, as without noise; noise can bring it below zero, which counts as zero."""
        return {name: max(0.0, value) for name, value in self.of.influence(notes).items()}


def add_noise(sums: Sums, sigma: float, clip: float, counts: Counts, draw: torch.Generator) -> Sums:
    """Sums of rows of length up to `clip`, with noise of σ clip² on Σφφᵀ, σ clip on Σφtᵀ, and σ on class counts.

    Noise on the triangle is mirrored, so that G stays symmetric. Counts are brought back to what counts can be: none
    below zero, all together the number of rows. The constant's column is the sum of the table over classes.

    Example:
        >>> exact = Sums.of(torch.tensor([[0.5, 1.0], [1.0, 1.0]]), torch.eye(2))
        >>> add_noise(exact, 0.0, 1.0, "noised", torch.Generator()).gram.tolist()
        [[1.25, 1.5], [1.5, 2.0]]
    """

    def noise(like: Tensor, scale: float) -> Tensor:
        return like + sigma * scale * torch.randn(like.shape, generator=draw, dtype=torch.float64).to(like)

    size = len(sums.gram) - 1
    inner = unpack(noise(pack(sums.gram[:-1, :-1]), clip**2), size)
    table = noise(sums.cross[:-1], clip)
    told = sums.cross[-1] if counts == "public" else _as_counts(noise(sums.cross[-1], 1.0), sums.count)
    column = table.sum(1, keepdim=True)
    corner = torch.full((1, 1), sums.count, dtype=torch.float64)
    gram = torch.cat([torch.cat([inner, column], 1), torch.cat([column.mT, corner], 1)])
    return Sums(gram, torch.cat([table, told[None]]), told.clone(), sums.count)


def _as_counts(noised: Tensor, total: float) -> Tensor:
    above = noised.clamp(min=0)
    return above * (total / float(above.sum())) if bool(above.any()) else torch.full_like(above, total / len(above))

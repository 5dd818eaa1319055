"""Options that methods share which fit a head in closed form: from which sums, how, and with what noise."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, Literal, TypeAlias

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat
from torch import Tensor

from fedfuse.client.class_sums import Moments, Precision
from fedfuse.core.messages import Brief, Cohort, Flaw, Form
from fedfuse.core.params import Layer, Params
from fedfuse.core.posterior import Flat, Geometry, Kron
from fedfuse.core.seams import Effort, PlainEvidence, ServerPart
from fedfuse.core.settings import Settings
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench, Local, ServerState
from fedfuse.errors import ConfigError, RecipeError
from fedfuse.linalg.privacy import Release, gaussian_sigma
from fedfuse.linalg.psd import add_diagonal, pack, unpack
from fedfuse.linalg.ridge import RidgePath, Rule, Sums, gaussian_classes
from fedfuse.nets.head import KIND, linear_layer, moment_notes, sums_in, total_sums
from fedfuse.tasks import CLASSIFICATION, Binary, Classification, Multilabel, Regression, Task

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


Head = Literal["ridge", "gaussian"]
Penalty = float | Rule

_SHARPNESS = 10.0  # a regression on ones and zeros answers in tenths: times this, its answers are logits


@dataclass(frozen=True, slots=True)
class FitHead(ServerPart):
    """Fit the last linear layer, or one by name, to the clients' `Moments`: W = (ΣG + λI)⁻¹ ΣH.

    This is ridge regression of the targets on the layer's input over everybody's rows, whatever the partition: of
    one-hot classes, of yes or no and of labels as 1 and −1, of numbers as they are. Answers that are to be logits are
    divided by a temperature, so that yes or no has the odds that two classes would have. The posterior of W has the
    covariance σ² (ΣG + λI)⁻¹ per output. With head = "gaussian" the same sums of classes give linear discriminant
    analysis, whose answers are log probabilities.

    Attributes:
        layer: the linear layer's name; "" for the last one.
        penalty: λ in units of G's mean eigenvalue, or "gcv" or "evidence" for the one the sums prefer.
        head: "ridge" or "gaussian".
        temperature: what logits are divided by; by default 0.1 for ridge and 1 for gaussian. Numbers are no logits.
        noise: the standard deviation of noise in the entries of one client's G. λ is then no less than the largest
            eigenvalue that such noise has in the sum over clients, about 2 noise √(K d): below it nothing can be seen.
    """

    layer: str
    penalty: Penalty = "gcv"
    head: Head = "ridge"
    temperature: float | None = None
    noise: float = 0.0
    needs: ClassVar[frozenset[str]] = frozenset({KIND})
    only_sums: ClassVar[bool] = True
    sums_by: ClassVar[str] = "evidence"
    laws: ClassVar[frozenset[str]] = frozenset({"order", "scale", "pure", "dtype", "finite", "repeat"})

    def __call__(self, cohort: Cohort, state: ServerState, bench: Bench) -> ServerState:
        """Add the sums, choose λ, solve, and put the solution into the network everybody stands at."""
        update = cohort.updates[0]
        if moved := [u.client for u in cohort if u.steps]:
            raise RecipeError(
                f"{moved[0]} has trained, and a layer can be fitted only to features all clients share; "
                "let the recipe have trains=False"
            )
        layer = linear_layer(update.spec.layout, self.layer)
        sums = total_sums(u.notes for u in cohort)
        matrix, geometry, facts = self.fit(sums, layer, cohort.sites, bench.task)
        params = {n: t.clone() for n, t in update.posterior.mean.items()}
        _check_outputs(layer, len(params[layer.weight]), len(matrix), bench.task)
        return state.fused(params | layer.split(matrix, params), geometry, update.spec).noting(**facts)

    @property
    def needs_classes(self) -> bool:
        """Discriminant analysis has a Gaussian for each class; a regression is there for every target."""
        return self.head == "gaussian"

    def fit(
        self, sums: Sums, layer: Layer, clients: int = 1, task: Task = CLASSIFICATION
    ) -> tuple[Tensor, Geometry, dict[str, float]]:
        """The layer's matrix [W | b], what is believed of it, and what a reader should know, from the sums alone."""
        sums = _as_signs(sums, task)
        own = sums if layer.bias is not None else sums.without_last_feature()
        path = RidgePath.of(own)
        penalty = path.choose(self.penalty) if isinstance(self.penalty, str) else self.penalty * own.scale
        penalty = max(penalty, 2 * self.noise * math.sqrt(clients * len(own.gram)))
        facts = {
            "rows": sums.count,
            "penalty": penalty / own.scale,
            "freedom": path.freedom(penalty),
            "noise": path.noise(penalty),
        }
        if self.head == "gaussian":
            if layer.bias is None:
                raise ConfigError(
                    f"layer {layer.name!r} has no bias, which the gaussian head needs; use head = 'ridge'"
                )
            return gaussian_classes(sums, penalty).mT / (self.temperature or 1.0), Flat(), facts
        sharpness = 1 / self.temperature if self.temperature else _SHARPNESS
        sharpness = 1.0 if isinstance(task, Regression) else sharpness
        weights = path.weights(penalty).mT * sharpness
        if not facts["noise"]:
            return weights, Flat(), facts
        outputs = torch.eye(len(weights), dtype=weights.dtype) / (facts["noise"] * sharpness**2)
        return weights, Kron({layer.name: (add_diagonal(own.gram, penalty), outputs)}), facts

    def check_network(self, networks: Mapping[str, Spec], bench: Bench, rounds: int) -> None:  # noqa: ARG002
        """The layer must be there, with one output per target."""
        for spec in networks.values():
            layer = linear_layer(spec.layout, self.layer)
            outputs = spec.skeleton().state_dict()[layer.weight].shape[0]
            if bench.classes:
                _check_outputs(layer, outputs, bench.task.outputs(bench.classes), bench.task)


def _as_signs(sums: Sums, task: Task) -> Sums:
    """The sums with yes or no and labels as 1 and −1: of two classes the difference, of labels t the sums of 2t − 1."""
    if isinstance(task, Binary):
        return replace(sums, cross=sums.cross[:, 1:] - sums.cross[:, :1], squares=sums.squares.sum(0, keepdim=True))
    if isinstance(task, Multilabel):
        squares = torch.full_like(sums.squares, sums.count)
        return replace(sums, cross=2 * sums.cross - sums.gram[:, -1:], squares=squares)
    return sums


def _check_outputs(layer: Layer, outputs: int, wanted: int, task: Task) -> None:
    if outputs != wanted:
        each = "class" if isinstance(task, Classification) else "target"
        raise ConfigError(
            f"layer {layer.name!r} has {outputs} outputs and the task {task.name} has {wanted}; a layer is fitted to "
            f"targets only where it has one output per {each}"
        )


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

"""Analytic federated learning: AFL (CVPR 2025), Fed3R (ICML 2024), FedCGS (AAAI 2025).

A linear layer on frozen features φ, fitted in closed form to targets t. One exchange without a step of training:

    client   G_k = Σ φ φᵀ and H_k = Σ φ tᵀ over its rows                     `Moments`, `PrivateMoments` with noise
    server   W = (Σ G_k + λI)⁻¹ Σ H_k                                        `FitHead`

Sums of parts are the sums of the whole, so this is ridge regression on the rows of all clients, whatever the partition.
Features are those of the network as it starts, or random ones in its place (`RandomFeatures`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor

from fedfuse.client.class_sums import Counts, Moments, Precision, PrivateMoments
from fedfuse.core.inputs import own_form
from fedfuse.core.messages import Cohort, Form
from fedfuse.core.model import Single, outputs
from fedfuse.core.params import Layer, Layout
from fedfuse.core.posterior import Flat, Geometry, Kron
from fedfuse.core.recipe import AsChosen, Recipe
from fedfuse.core.registry import method
from fedfuse.core.seams import ServerPart
from fedfuse.core.settings import Settings
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench, ServerState
from fedfuse.errors import ConfigError, RecipeError
from fedfuse.linalg.psd import add_diagonal
from fedfuse.linalg.ridge import RidgePath, Rule, Sums, gaussian_classes
from fedfuse.models.random_features import random_convolution, random_fourier
from fedfuse.nets.head import KIND, linear_layer, total_sums
from fedfuse.tasks import CLASSIFICATION, Binary, Classification, Multilabel, Regression, Task

_FACTORIES = (random_convolution.__name__, random_fourier.__name__)


@dataclass(frozen=True, slots=True)
class RandomFeatures:
    """Random convolutions where the chosen network reads pictures, random cosines where it reads rows of a table.

    Attributes:
        count: about how many features.

    Example:
        >>> spec = Spec("lenet")
        >>> RandomFeatures()(Single.of(spec.build(), spec), classes=10, seed=3).spec.options["filters"]
        29
    """

    count: int = 464
    needs_numbers: ClassVar[bool] = True

    def __call__(self, start: Single, classes: int, seed: int, task: Task = CLASSIFICATION) -> Single:
        """The feature network; one that is there already stays as it is."""
        if start.spec.factory in _FACTORIES:
            return start
        spec = self._spec(start.spec, task.outputs(classes) if classes else outputs(start) or 0, seed)
        return Single.of(spec.build(), spec)

    def missing(self, layout: Layout, forms: Mapping[str, Form], classes: int) -> str | None:  # noqa: ARG002
        """Nothing: whichever network the sums were made at, they are its own."""
        return None

    def _spec(self, chosen: Spec, classes: int, seed: int) -> Spec:
        form = own_form(chosen)
        if form is None:
            raise ConfigError(
                f"model {chosen.factory!r} does not say what an input looks like, so no features of it can be drawn; "
                "choose a network of fedfuse's, or features = 'given' for those of your own"
            )
        common: dict[str, Any] = {"classes": classes, "seed": seed}
        if len(form.shape) == 1:
            return Spec("random_fourier", {"inputs": form.shape[0], "features": self.count, **common})
        channels, size, _ = form.shape
        filters = max(1, round(self.count / 16))  # each is pooled to 4 × 4 features
        return Spec("random_convolution", {"channels": channels, "size": size, "filters": filters, **common})


Head = Literal["ridge", "gaussian"]
Penalty = float | Rule

_SHARPNESS = 10.0  # a regression on ones and zeros answers in tenths: times this, its answers are logits


@dataclass(frozen=True, slots=True)
class FitHead(ServerPart):
    """Fit the last linear layer, or one by name, to the clients' `Moments`: W = (ΣG + λI)⁻¹ ΣH.

    This is ridge regression of the targets on the layer's input over all clients' rows, whatever the partition: of
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
        """Add the sums, choose λ, solve, and put the solution into the common network."""
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


@method("ridge", paper="arXiv:2405.16240", family="statistics")
def ridge(features: PositiveInt | Literal["given"] = 464, how: HeadFit = USUAL) -> Recipe:
    """Frozen features and a closed-form classifier: clients send sums, and the fused answer is the pooled one.

    W = (ΣG + λI)⁻¹ ΣH with G = Σφφᵀ and H = Σφtᵀ is ridge regression on everybody's rows, whatever the partition, in
    one exchange and without a step of training.

    Args:
        features: about how many random features take the place of the network: convolutions for pictures, cosines for
            tables; or "given" for those of the network as it starts, a pretrained one say.
        how: which sums, and how the head is fitted to them.
    """
    return Recipe(
        trains=False,
        evidence=(how.evidence,),
        aggregate=how.fit(),
        prepare_model=AsChosen() if features == "given" else RandomFeatures(features),
    )

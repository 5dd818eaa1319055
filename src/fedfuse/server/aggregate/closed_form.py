"""A linear layer fitted from sums: the pooled answer in one exchange, however the rows are split."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedfuse.core.messages import Cohort
from fedfuse.core.params import Layer
from fedfuse.core.posterior import Flat, Geometry, Kron
from fedfuse.core.seams import ServerPart
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench, ServerState
from fedfuse.errors import ConfigError, RecipeError
from fedfuse.linalg.psd import add_diagonal
from fedfuse.linalg.ridge import RidgePath, Rule, Sums, gaussian_classes
from fedfuse.nets.head import KIND, linear_layer, total_sums
from fedfuse.tasks import CLASSIFICATION, Binary, Classification, Multilabel, Regression, Task

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

"""A linear layer fitted from sums: the pooled answer in one exchange, however the rows are split."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
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

Head = Literal["ridge", "gaussian"]
Penalty = float | Rule

_SHARPNESS = 10.0  # a regression on ones and zeros answers in tenths: times this, its answers are logits


@dataclass(frozen=True, slots=True)
class FitHead(ServerPart):
    """Fit the last linear layer, or one by name, to the clients' `Moments`: W = (ΣG + λI)⁻¹ ΣH.

    This is ridge regression of one-hot labels on the layer's input over everybody's rows, whatever the partition. The
    answers are divided by a temperature to be logits. The posterior of W has the covariance σ² (ΣG + λI)⁻¹ per output.
    With head = "gaussian" the same sums give linear discriminant analysis, whose answers are log probabilities.

    Attributes:
        layer: the linear layer's name; "" for the last one.
        penalty: λ in units of G's mean eigenvalue, or "gcv" or "evidence" for the one the sums prefer.
        head: "ridge" or "gaussian".
        temperature: what answers are divided by; by default 0.1 for ridge and 1 for gaussian.
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

    def __call__(self, cohort: Cohort, state: ServerState, bench: Bench) -> ServerState:  # noqa: ARG002
        """Add the sums, choose λ, solve, and put the solution into the network everybody stands at."""
        update = cohort.updates[0]
        if moved := [u.client for u in cohort if u.steps]:
            raise RecipeError(
                f"{moved[0]} has trained, and a layer can be fitted only to features all clients share; "
                "let the recipe have trains=False"
            )
        layer = linear_layer(update.spec.layout, self.layer)
        sums = total_sums(u.notes for u in cohort)
        matrix, geometry, facts = self.fit(sums, layer, cohort.sites)
        params = {n: t.clone() for n, t in update.posterior.mean.items()}
        _check_outputs(layer, len(params[layer.weight]), len(matrix))
        return state.fused(params | layer.split(matrix, params), geometry, update.spec).noting(**facts)

    def fit(self, sums: Sums, layer: Layer, clients: int = 1) -> tuple[Tensor, Geometry, dict[str, float]]:
        """The layer's matrix [W | b], what is believed of it, and what a reader should know, from the sums alone."""
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
        weights = path.weights(penalty).mT * sharpness
        if not facts["noise"]:
            return weights, Flat(), facts
        outputs = torch.eye(len(weights), dtype=weights.dtype) / (facts["noise"] * sharpness**2)
        return weights, Kron({layer.name: (add_diagonal(own.gram, penalty), outputs)}), facts

    def check_network(self, networks: Mapping[str, Spec], bench: Bench, rounds: int) -> None:  # noqa: ARG002
        """The layer must be there, with one output per class."""
        for spec in networks.values():
            layer = linear_layer(spec.layout, self.layer)
            outputs = spec.skeleton().state_dict()[layer.weight].shape[0]
            if bench.classes:
                _check_outputs(layer, outputs, bench.classes)


def _check_outputs(layer: Layer, outputs: int, classes: int) -> None:
    if outputs != classes:
        raise ConfigError(
            f"layer {layer.name!r} has {outputs} outputs and there are {classes} classes; a layer is fitted to labels "
            "only where it has one output per class"
        )

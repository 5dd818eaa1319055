"""Numbers: half the squared error, which is a Gaussian's negative log-likelihood."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedfuse.tasks.task import Reduction, Scores, Task, as_columns, describe_targets


@dataclass(frozen=True, slots=True)
class Regression(Task):
    """One number or several per row; the outputs are the expected numbers.

    The loss is ½ ‖z − y‖², the negative log-likelihood of N(z, I) but for a constant, so that evidence (Fisher
    information, Kronecker factors) is that of unit noise: give targets of unit variance, as `standardize` makes them.

    Attributes:
        shift: what was taken from each target before it was divided, so that scores are in its own unit.
        scale: by what it was divided.

    Example:
        >>> float(REGRESSION.loss(torch.tensor([[1.0], [3.0]]), torch.tensor([0.0, 3.0])))
        0.25
    """

    shift: tuple[float, ...] = ()
    scale: tuple[float, ...] = ()

    name: ClassVar[str] = "regression"
    likelihood: ClassVar[str] = "Gaussian"
    headline: ClassVar[str] = "rmse"
    scores: ClassVar[tuple[str, ...]] = ("rmse", "mae", "r2")
    lower: ClassVar[frozenset[str]] = frozenset({"rmse", "mae"})

    def outputs(self, classes: int) -> int:
        """One for each number."""
        return classes

    def flaw(self, y: Tensor, classes: int = 0) -> str | None:
        """Finite numbers in floating point, one per row or a column for each."""
        width = 1 if y.ndim == 1 else y.shape[1] if y.ndim == 2 else None
        if not y.is_floating_point() or width is None or (classes and width != classes):
            wanted = f"({len(y)},)" if classes in (0, 1) else f"({len(y)}, {classes})"
            return f"targets are {describe_targets(y)}, expected float32 of shape {wanted}"
        return None if bool(y.isfinite().all()) else "targets are not all finite, expected numbers"

    def loss(self, outputs: Tensor, y: Tensor, reduction: Reduction = "mean") -> Tensor:
        """½ ‖z − y‖²."""
        z = as_columns(outputs, len(y))
        each = (z - as_columns(y, len(y)).to(z)).square().sum(-1) / 2
        return each.mean() if reduction == "mean" else each.sum()

    def sample(self, outputs: Tensor, generator: torch.Generator | None) -> Tensor:
        """Numbers around the expected ones, with unit noise."""
        return outputs + torch.randn(outputs.shape, generator=generator).to(outputs)

    def predict(self, outputs: Tensor) -> Tensor:
        """The outputs themselves."""
        return outputs

    def in_units(self, values: Tensor, rows: int) -> Tensor:
        """Outputs or targets in the targets' own units, float64, a column each.

        Example:
            >>> Regression((10.0,), (2.0,)).in_units(torch.tensor([0.0, 1.0]), 2).flatten().tolist()
            [10.0, 12.0]
        """
        z = as_columns(values, rows).double()
        return z * z.new_tensor(self.scale) + z.new_tensor(self.shift) if self.scale else z

    def as_outputs(self, predictions: Tensor) -> Tensor:
        """The predictions themselves."""
        return predictions

    def measure(self, outputs: Tensor, y: Tensor, classes: int, bins: int = 15) -> Scores:  # noqa: ARG002
        """Root mean squared error, mean absolute error, and R² = 1 − Σ (y − z)² / Σ (y − ȳ)², a mean over targets.

        R² is None where a target does not vary.

        Example:
            >>> scores = REGRESSION.measure(torch.tensor([[1.0], [2.0], [4.0]]), torch.tensor([1.0, 2.0, 3.0]), 1)
            >>> round(scores["rmse"], 4), round(scores["mae"], 4), scores["r2"]
            (0.5774, 0.3333, 0.5)
        """
        z, t = self.in_units(outputs, len(y)), self.in_units(y, len(y))
        error, around = (z - t).square(), (t - t.mean(0)).square().sum(0)
        return {
            "rmse": float(error.mean().sqrt()),
            "mae": float((z - t).abs().mean()),
            "r2": float((1 - error.sum(0) / around).mean()) if bool((around > 0).all()) else None,
        }


REGRESSION = Regression()

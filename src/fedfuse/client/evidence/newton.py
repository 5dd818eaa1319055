"""Gradient and Hessian sums of a network's last linear layer: all that a Newton step asks of a client's rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedfuse.core.effort import CurvatureEvidence, Effort
from fedfuse.core.messages import Brief, Flaw, Form
from fedfuse.core.params import Params
from fedfuse.core.state import Local, representation
from fedfuse.linalg.psd import is_psd, packed_size
from fedfuse.nets.glm import family_of, fit_glm, newton_sums, penalties
from fedfuse.nets.glm_layer import hessian_in, layer_matrix, sum_notes

First = Literal["sums", "local"]


@dataclass(frozen=True, slots=True)
class CurvatureSums(CurvatureEvidence):
    """Loss, gradient and Hessian of the last linear layer over the client's rows, in float64.

    They are taken at the weights the server publishes in float64, or at the network's own. With first = "local" the
    first round brings the client's own fit instead and the Hessian there.

    Attributes:
        family: "auto" takes the task's, "poisson" counts.
        first: what the first round brings.
        ridge: the penalty of the client's own fit.
    """

    family: Literal["auto", "poisson"] = "auto"
    first: First = "sums"
    ridge: float = 0.0
    name: ClassVar[str] = "newton"
    needs_one_target: ClassVar[bool] = True
    reveals: ClassVar[str] = (
        "the gradient and the Hessian of the last layer, summed over the client's rows: second moments of the features "
        "its layer reads"
    )

    def __call__(self, local: Local) -> Params:
        """One pass over the rows; a local fit takes a few over the features."""
        brief, family = local.brief, family_of(local.task, self.family)
        weights = layer_matrix(brief.spec, brief.params, brief.memory)
        features = layer_features(local, weights.shape[1])
        y = local.rows.y.cpu()
        if self.first == "local" and brief.round == 0:
            ridge, free = penalties(weights, self.ridge, family)
            weights, sums = fit_glm(features, y, family, ridge, free)
            return sum_notes(sums, len(y)) | {"newton/fit": weights}
        return sum_notes(newton_sums(features, y, weights, family), len(y))

    def passes(self, effort: Effort) -> float:  # noqa: ARG002 - the seam's signature
        """One pass forward; the sums over the last layer's features are left out."""
        return 1.0

    def expects(self, brief: Brief) -> Mapping[str, Form]:
        """A number, a table and a triangle; a local fit is one more table."""
        rows, columns = layer_matrix(brief.spec, brief.params, brief.memory).shape
        shape, size = (rows, columns), rows * columns
        wanted = {
            "newton/count": Form((), torch.float64),
            "newton/loss": Form((), torch.float64),
            "newton/gradient": Form(shape, torch.float64),
            "newton/hessian": Form((packed_size(size),), torch.float64),
        }
        return wanted | ({"newton/fit": Form(shape, torch.float64)} if self._brings_fit(brief) else {})

    def _brings_fit(self, brief: Brief) -> bool:
        return self.first == "local" and brief.round == 0

    def check(self, notes: Params, num_examples: float) -> Flaw | None:
        """A Hessian of real rows has no negative eigenvalue, a loss is not negative, and rows are as many as said."""
        if float(notes["newton/count"]) != num_examples:
            return Flaw("newton/count", float(notes["newton/count"]), f"the num_examples {num_examples:g}")
        if self.family != "poisson" and (loss := float(notes["newton/loss"])) < 0:
            return Flaw("newton/loss", loss, "a sum of losses ≥ 0")
        if not is_psd(hessian_in(notes)):
            return Flaw("newton/hessian", "not positive semi-definite", "a matrix without negative eigenvalues")
        return None

    def influence(self, notes: Params) -> Mapping[str, float]:
        """The length of the gradient, the mean eigenvalue of the Hessian and the loss per row; the length of a fit."""
        rows, gradient = max(float(notes["newton/count"]), 1.0), notes["newton/gradient"]
        told = {
            "newton/gradient": float(gradient.norm()) / rows,
            "newton/hessian": float(hessian_in(notes).trace()) / (gradient.numel() * rows),
            "newton/loss": abs(float(notes["newton/loss"])) / rows,
        }
        return told | ({"newton/fit": float(notes["newton/fit"].norm())} if "newton/fit" in notes else {})


def layer_features(local: Local, width: int) -> Tensor:
    """What the last linear layer reads, a 1 appended where it has a bias, float64."""
    with torch.no_grad():
        parts = [representation(local.module, x)[1].double().cpu() for x in local.rows.x.split(512)]
    phi = torch.cat(parts)
    return phi if phi.shape[1] == width else torch.cat([phi, phi.new_ones(len(phi), 1)], 1)

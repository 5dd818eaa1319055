"""Analytic federated learning: AFL (CVPR 2025), Fed3R (ICML 2024), FedCGS (AAAI 2025)."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from fedfuse.client.evidence.moments import Moments, Precision
from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import method
from fedfuse.core.seams import AsChosen
from fedfuse.linalg.ridge import Rule
from fedfuse.server.aggregate.closed_form import FitHead, Head
from fedfuse.server.features import RandomFeatures


@method("ridge", paper="arXiv:2405.16240", family="statistics")
def ridge(
    features: PositiveInt | Literal["given"] = 464,
    penalty: NonNegativeFloat | Rule = "gcv",
    head: Head = "ridge",
    temperature: PositiveFloat | None = None,
    layer: str = "",
    precision: Precision = "network",
) -> Recipe:
    """Frozen features and a closed-form classifier: clients send sums, and the fused answer is the pooled one.

    W = (ΣG + λI)⁻¹ ΣH with G = Σφφᵀ and H = Σφtᵀ is ridge regression on everybody's rows, whatever the partition, in
    one exchange and without a step of training.

    Args:
        features: about how many random features take the place of the network: convolutions for pictures, cosines for
            tables; or "given" for those of the network as it starts, a pretrained one say.
        penalty: λ in units of ΣG's mean eigenvalue; "gcv" (generalized cross-validation) and "evidence" (marginal
            likelihood) choose it from the sums.
        head: ridge, or gaussian for linear discriminant analysis from the same sums.
        temperature: what answers are divided by to be logits; by default 0.1 for ridge and 1 for gaussian.
        layer: the linear layer that is fitted; by default the last.
        precision: "network" computes features as the network does, "float64" in float64, at about twice the time.
    """
    return Recipe(
        trains=False,
        evidence=(Moments(layer, precision),),
        aggregate=FitHead(layer, penalty, head, temperature),
        prepare_model=AsChosen() if features == "given" else RandomFeatures(features),
    )

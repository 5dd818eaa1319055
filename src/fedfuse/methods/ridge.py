"""Analytic federated learning: AFL (CVPR 2025), Fed3R (ICML 2024), FedCGS (AAAI 2025)."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveInt

from fedfuse.core.before import AsChosen
from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import method
from fedfuse.methods._closed_form import USUAL, HeadFit
from fedfuse.server.features import RandomFeatures


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

"""Analytic federated learning: AFL (CVPR 2025), Fed3R (ICML 2024), FedCGS (AAAI 2025)."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from fedfuse.client.evidence.moments import Moments, Precision
from fedfuse.client.evidence.private_moments import Counts, PrivateMoments
from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import method
from fedfuse.core.seams import AsChosen
from fedfuse.linalg.ridge import Rule
from fedfuse.server.aggregate.closed_form import FitHead, Head
from fedfuse.server.features import RandomFeatures

Delta: TypeAlias = Annotated[float, Field(gt=0, lt=1)]


@method("ridge", paper="arXiv:2405.16240", family="statistics")
def ridge(
    features: PositiveInt | Literal["given"] = 464,
    penalty: NonNegativeFloat | Rule = "gcv",
    head: Head = "ridge",
    temperature: PositiveFloat | None = None,
    layer: str = "",
    precision: Precision = "network",
    epsilon: PositiveFloat | None = None,
    delta: Delta = 1e-5,
    clip: PositiveFloat = 1.0,
    counts: Counts = "noised",
    reproducible: bool = False,
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
        epsilon: add noise that makes each client's sums (ε, δ)-differentially private in any one row; none by default.
        delta: its δ.
        clip: the length that features are shortened to before they are summed, where there is noise.
        counts: class counts are noised, or public by agreement.
        reproducible: draw the noise from the seed, for simulations alone; else from the operating system.
    """
    plain = Moments(layer, precision)
    private = None if epsilon is None else PrivateMoments(epsilon, delta, clip, counts, reproducible, plain)
    noise = 0.0 if private is None else private.sigma * clip**2
    return Recipe(
        trains=False,
        evidence=(private or plain,),
        aggregate=FitHead(layer, penalty, head, temperature, noise),
        prepare_model=AsChosen() if features == "given" else RandomFeatures(features),
    )

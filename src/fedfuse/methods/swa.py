"""SWA, statistical weight aggregation."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat

from fedfuse.client.memory import KeepModel
from fedfuse.client.objectives import Contrastive
from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import method
from fedfuse.core.seams import CrossEntropy
from fedfuse.errors import ConfigError
from fedfuse.linalg.divergence import Density
from fedfuse.server.aggregate.gaussianity import Distance, HigherOrder, Level, NonGaussianMean, Normalize, Renyi

PAPER = "Chatzikonstantinou et al., Federated Learning Aggregation based on Weight Distribution Analysis, 2023"


@method("swa", paper=PAPER)
def swa(
    distance: Literal["hos", "renyi"] = "hos",
    order: NonNegativeFloat = 1.0,
    density: Density = "histogram",
    scale: Literal["raw", "standardized"] = "raw",
    normalize: Normalize = "sum",
    level: Level = "layer",
    mix: Annotated[float, Field(ge=0, le=1)] = 0.0,
    contrastive: NonNegativeFloat = 0.0,
    temperature: PositiveFloat = 0.5,
) -> Recipe:
    """Average layer by layer, each client weighed by how far its layer's weights are from Gaussian.

    Client k weighs g_kl / Σ_j g_jl in layer l; example counts are not used unless mixed in, so show the
    example-weighted mean (`fedavg`) and the plain mean (`fedavg(uniform=true)`) beside it. Bias, norm and running
    statistics follow their layer.

    Args:
        distance: "hos", the product of the third and fourth k-statistics, or "renyi", a divergence from N(0, 1).
        order: of the Rényi divergence: 0, 0.5, 1 (Kullback–Leibler), 2 or any other.
        density: of the Rényi divergence: "histogram", "samples" (the paper's text) or "grid" (its released code).
        scale: "raw" scores depend on the weights' scale ("hos" on its seventh power), "standardized" ones do not.
        normalize: "sum" gives an average; "max" is the printed equation 8, which is none.
        level: one weight per "layer", or per output "filter".
        mix: share of the example-count weights mixed in.
        contrastive: weight of MOON's term in the clients' loss (the paper takes 8, 5 and 3); 0 leaves it out.
        temperature: T of that term.
    """
    if distance == "hos" and (order, density) != (1.0, "histogram"):
        raise ConfigError(
            f"method 'swa': order {order:g} and density {density!r} came with distance 'hos', which has neither; "
            "expected distance = 'renyi' with them"
        )
    standardized = scale == "standardized"
    measure: Distance = HigherOrder(standardized) if distance == "hos" else Renyi(order, density, standardized)
    return Recipe(
        objective=Contrastive(contrastive, temperature) if contrastive else CrossEntropy(),
        memory=(KeepModel(),) if contrastive else (),
        aggregate=NonGaussianMean(measure, normalize, level, mix),
    )

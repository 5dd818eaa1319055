"""SWA, statistical weight aggregation."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat

from fedfuse.client.memory import KeepModel
from fedfuse.client.objectives import Contrastive
from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import method
from fedfuse.core.seams import TaskLoss
from fedfuse.errors import ConfigError
from fedfuse.linalg.divergence import Density
from fedfuse.server.aggregate.gaussianity import (
    Distance,
    HigherOrder,
    Level,
    Negentropy,
    NonGaussianMean,
    Normalize,
    Renyi,
    Wasserstein,
)

PAPER = "Chatzikonstantinou et al., Federated Learning Aggregation based on Weight Distribution Analysis, 2023"


@method("swa", paper=PAPER)
def swa(
    distance: Literal["hos", "renyi", "negentropy", "wasserstein"] = "hos",
    order: NonNegativeFloat = 1.0,
    density: Density = "histogram",
    scale: Literal["raw", "standardized"] = "raw",
    sign: Literal["absolute", "signed"] = "absolute",
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
        distance: "hos", the product of the third and fourth k-statistics, or "renyi", a divergence from N(0, 1). Free
            of the weights' scale: "negentropy" by k-statistics, "wasserstein" distance from the fitted Gaussian.
        order: of the Rényi divergence: 0, 0.5, 1 (Kullback–Leibler), 2 or any other.
        density: of the Rényi divergence: "histogram", "samples" (the paper's text) or "grid" (its released code).
        scale: "raw" scores depend on the weights' scale ("hos" on its seventh power), "standardized" ones do not.
        sign: of "hos": "absolute" as released; "signed" is the printed equation, whose weights may be negative.
        normalize: "sum" gives an average; "max" is the printed equation 8, which is none.
        level: one weight per "layer", or per output "filter".
        mix: share of the example-count weights mixed in.
        contrastive: weight of MOON's term in the clients' loss (the paper takes 8, 5 and 3); 0 leaves it out.
        temperature: T of that term.
    """
    if distance != "renyi" and (order, density) != (1.0, "histogram"):
        raise ConfigError(
            f"method 'swa': order {order:g} and density {density!r} came with distance {distance!r}, which has "
            "neither; expected distance = 'renyi' with them"
        )
    signed, standardized = sign == "signed", scale == "standardized"
    if distance != "hos" and signed:
        raise ConfigError(f"method 'swa': distance {distance!r} has no sign; expected sign = 'signed' with 'hos' only")
    measures: dict[str, Distance] = {
        "hos": HigherOrder(standardized, signed),
        "renyi": Renyi(order, density, standardized),
        "negentropy": Negentropy(),
        "wasserstein": Wasserstein(),
    }
    return Recipe(
        objective=Contrastive(contrastive, temperature) if contrastive else TaskLoss(),
        memory=(KeepModel(),) if contrastive else (),
        aggregate=NonGaussianMean(measures[distance], normalize, level, mix, signed),
    )

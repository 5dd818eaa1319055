"""Zhang et al., FedDUAP: Federated Learning with Dynamic Update and Adaptive Pruning, IJCAI 2022: the update."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from fedfuse.client.evidence.counts import LabelCounts
from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import method
from fedfuse.server.aggregate.mean import Mean
from fedfuse.server.labels import Unheard
from fedfuse.server.steps.dynamic import DynamicUpdate, Need


@method("feddu", paper="arXiv:2204.11536")
def feddu(
    form: Need = "complement",
    C: PositiveFloat = 1.0,
    decay: Annotated[float, Field(gt=0, le=1)] = 0.999,
    epochs: PositiveInt | None = None,
    batch_size: PositiveInt | None = None,
    least: NonNegativeFloat = 1e-3,
    explode: PositiveFloat = 3.0,
    unheard: Unheard = "uniform",
) -> Recipe:
    """FedAvg, then some steps on the server's own rows: many while the model is poor and the cohort one-sided.

    The server trains the mean w on its rows to w_s and goes the part α = f′(acc) · n₀ D(P̄) / (n₀ D(P̄) + n′ D(P₀)) ·
    C · decayᵗ of the way. D is the Jensen–Shannon divergence of the cohort's and of the server's labels from those of
    all clients, which is why clients tell how many rows of each class they have.

    Args:
        form: f′(acc): complement is 1 − acc, inverse is 1/(acc + ε).
        C: a factor of the step.
        decay: the step fades as decay to the power of the round.
        epochs: the server's passes over its rows; by default as many as the clients'.
        batch_size: the server's; by default the clients'.
        least: a smaller α is no step at all.
        explode: a step that raises the loss on the server's rows more than so many times is taken back.
        unheard: clients that never answered are taken to have all classes alike (uniform), or are left out (ignored).
    """
    update = DynamicUpdate(form, C, decay, epochs, batch_size, least, explode, unheard)
    return Recipe(evidence=(LabelCounts(),), aggregate=Mean(), steps=(update,))

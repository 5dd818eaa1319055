"""Guo et al., On Calibration of Modern Neural Networks, ICML 2017, for a fused network.

    T = argmin_{T > 0} −Σ_i log softmax(z_i / T)[y_i] over the server's rows                          (section 4.2)

and the network answers z / T from then on. Clients and the mean are FedAvg's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from fedfuse.core.messages import Cohort, Start
from fedfuse.core.model import Single
from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import method
from fedfuse.core.seams import ServerPart
from fedfuse.core.state import Bench, ServerState
from fedfuse.errors import ConfigError
from fedfuse.server.aggregate.mean import Mean
from fedfuse.server.judge import answers


@dataclass(frozen=True, slots=True)
class Temperature(ServerPart):
    """Divide the logits by the T > 0 under which the server's rows are likeliest (Guo et al., ICML 2017).

    No class changes its rank. The last linear layer is divided, so that the network stays what it is; the next round
    begins with the undivided one.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"server_rows", "network"})
    needs_classes: ClassVar[bool] = True

    def __call__(self, state: ServerState, cohort: Cohort, bench: Bench) -> ServerState:  # noqa: ARG002
        """The model with its last layer divided; the facts name T."""
        model, rows = state.single, bench.need_rows("temperature scaling")
        found = best_temperature(answers(model, rows.x)[:, : bench.classes or None], rows.y)
        layers, mean = model.spec.layout.layers, dict(model.posterior.mean)
        if not layers or layers[-1].kind != "linear":
            raise ConfigError(
                "temperature scaling divides the last layer and the network does not end with a linear one; "
                "give it a linear classifier"
            )
        mean |= {name: mean[name] / found for name in (layers[-1].weight, layers[-1].bias) if name is not None}
        cooled = Single(model.spec, replace(model.posterior, mean=mean))
        begin = Start(model.spec, model.posterior.mean)
        return replace(state, model=cooled, starts={"": begin}).noting(temperature=found)


def best_temperature(logits: Tensor, labels: Tensor) -> float:
    """The T from 1/100 to 100 that minimizes the mean negative log-likelihood of logits / T.

    It is convex in 1/T; its slope in β = 1/T, the mean of Σ_c p_c z_c − z_y, is bisected.

    Example:
        >>> import torch
        >>> round(best_temperature(torch.tensor([[4.0, 0.0]] * 4), torch.tensor([0, 0, 0, 1])), 6)  # 4 / log 3
        3.640957
    """
    z, right = logits.double(), logits.double().gather(1, labels[:, None])[:, 0]
    low, high = -math.log(100.0), math.log(100.0)
    for _ in range(60):  # halvings of that range, more than float64 has digits
        middle = (low + high) / 2
        expected = ((math.exp(middle) * z).softmax(1) * z).sum(1)
        low, high = (low, middle) if float((expected - right).mean()) > 0 else (middle, high)
    return math.exp(-(low + high) / 2)


@method("temperature", paper="arXiv:1706.04599", family="server rows")
def temperature() -> Recipe:
    """FedAvg whose logits are divided by one number, under which the server's labelled rows are likeliest.

    Every answer stays the same; how sure it is changes. Clients train on from the undivided network.
    """
    return Recipe(aggregate=Mean(), steps=(Temperature(),))

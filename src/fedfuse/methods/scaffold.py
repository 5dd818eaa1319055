"""Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, ICML 2020."""

from __future__ import annotations

from fedfuse.client.evidence.control import ControlDelta
from fedfuse.client.memory import KeepControl
from fedfuse.client.objectives import Controlled
from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import method
from fedfuse.server.aggregate.mean import Mean
from fedfuse.server.steps.control import ControlStep


@method("scaffold", paper="arXiv:1910.06378")
def scaffold() -> Recipe:
    """FedAvg whose clients correct their drift by control variates (option II, zero start).

    The correction c − c_k is the gradient of a linear term of the local loss. In the first round both variates are
    zero and the round is FedAvg's.
    """
    return Recipe(
        objective=Controlled(),
        evidence=(ControlDelta(),),
        memory=(KeepControl(),),
        aggregate=Mean(),
        steps=(ControlStep(),),
        publishes=("control",),
    )

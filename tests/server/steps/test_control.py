"""SCAFFOLD's server step."""

from __future__ import annotations

import torch

from fedfuse.core.messages import ClientUpdate, Cohort
from fedfuse.core.model import Single
from fedfuse.core.posterior import Posterior
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench, ServerState
from fedfuse.methods.scaffold import ControlStep

SPEC = Spec("mlp")


def cohort(*deltas: float) -> Cohort:
    none: Posterior = Posterior({})
    return Cohort(
        tuple(
            ClientUpdate(
                f"c{i}", none, 7.0 * i + 1, 1, SPEC, {"control/w": torch.tensor([d]), "counts/x": torch.ones(1)}
            )
            for i, d in enumerate(deltas)
        )
    )


def test_the_variate_moves_by_the_sum_over_everybody_asked_or_not() -> None:
    """c ← c + (1/N) Σ Δc: ten clients, two of them answered; num_examples do not matter."""
    state = ServerState(1, Single(SPEC, Posterior({})), {"other/w": torch.ones(1)})
    once = ControlStep()(state, cohort(1.0, 4.0), Bench(population=10))
    assert once.memory["control/w"].item() == 0.5
    twice = ControlStep()(once, cohort(-2.0), Bench(population=10))
    assert torch.allclose(twice.memory["control/w"], torch.tensor([0.3]))
    assert set(twice.memory) == {"control/w", "other/w"}


def test_a_population_that_nobody_told_is_the_cohort() -> None:
    state = ServerState(1, Single(SPEC, Posterior({})))
    assert ControlStep()(state, cohort(1.0, 3.0), Bench()).memory["control/w"].item() == 2.0

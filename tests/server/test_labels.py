"""What a server knows of labels."""

from __future__ import annotations

import pytest
import torch
from scipy.spatial.distance import jensenshannon

from fedfuse.core.messages import ClientUpdate, Cohort
from fedfuse.core.model import Single
from fedfuse.core.posterior import Posterior
from fedfuse.core.spec import Spec
from fedfuse.core.state import ServerState
from fedfuse.server.training import cohort_histogram, divergence, population_histogram, record_label_counts

SPEC = Spec("mlp")


def cohort(**counts: list[int]) -> Cohort:
    return Cohort(
        tuple(
            ClientUpdate(c, Posterior({}), float(sum(n)), 1, SPEC, {"counts/labels": torch.tensor(n)})
            for c, n in counts.items()
        )
    )


@pytest.mark.parametrize(("classes", "value"), [(1, 0.7583), (2, 0.6100), (5, 0.3113)])
def test_the_divergence_of_a_few_classes_from_ten_balanced_ones(classes: int, value: float) -> None:
    few = torch.tensor([7] * classes + [0] * (10 - classes))
    even = torch.full((10,), 3)
    assert divergence(few, even) == pytest.approx(value, abs=5e-5)
    assert divergence(few, even) == pytest.approx(jensenshannon(few / few.sum(), even / 30, base=2) ** 2)


def test_counts_are_remembered_per_client_and_the_newest_wins() -> None:
    state = ServerState(0, Single(SPEC, Posterior({})), {"mask/w": torch.ones(1)})
    state = record_label_counts(state, cohort(a=[3, 1], b=[0, 4]))
    state = record_label_counts(state, cohort(b=[2, 2], c=[1, 0]))
    assert set(state.memory) == {"mask/w", "labels/a", "labels/b", "labels/c"}
    assert population_histogram(state.memory, 3).tolist() == [6.0, 3.0]


def test_clients_never_heard_are_guessed_until_they_answer() -> None:
    state = record_label_counts(ServerState(0, Single(SPEC, Posterior({}))), cohort(a=[6, 0], b=[2, 0]))
    assert population_histogram(state.memory, 4).tolist() == [8.0 + 4.0, 4.0]
    assert population_histogram(state.memory, 4, "ignored").tolist() == [8.0, 0.0]
    assert population_histogram(state.memory, 2).tolist() == [8.0, 0.0]


def test_a_cohorts_histogram_is_that_of_its_rows_together() -> None:
    assert cohort_histogram(cohort(a=[3, 1], b=[0, 4])).tolist() == [3, 5]

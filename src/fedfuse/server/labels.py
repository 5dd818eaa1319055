"""The clients' label counts as far as the server knows them, and how far a histogram is from that of all clients."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from fedfuse.core.messages import Cohort
from fedfuse.core.params import Params
from fedfuse.core.state import ServerState, entries_of, with_kind
from fedfuse.linalg.divergence import jensen_shannon

MissingCounts: TypeAlias = Literal["uniform", "ignored"]

_KIND = "labels"


def record_label_counts(state: ServerState, cohort: Cohort) -> ServerState:
    """The state with the cohort's label counts in its memory, beside those of clients that answered before."""
    counts = {u.client: u.notes["counts/labels"].clone() for u in cohort}
    return replace(state, memory={**state.memory, **with_kind(_KIND, counts)})


def population_histogram(memory: Params, population: int, missing_counts: MissingCounts = "uniform") -> Tensor:
    """The label histogram of all clients, float64: the sum over those known, and a guess for the others.

    A client that never answered counts with the mean number of rows, evenly over the classes ("uniform"), or is
    left out ("ignored"). Once everybody has answered the histogram is exact and the guess is gone.

    Example:
        >>> population_histogram({"labels/a": torch.tensor([4, 0])}, population=2)
        tensor([6., 2.], dtype=torch.float64)
        >>> population_histogram({"labels/a": torch.tensor([4, 0])}, population=2, missing_counts="ignored")
        tensor([4., 0.], dtype=torch.float64)
    """
    known = torch.stack(list(entries_of(memory, _KIND).values())).double()
    total = known.sum(0)
    missing = max(0, population - len(known)) if missing_counts == "uniform" else 0
    return total + missing * total.sum() / len(known) / len(total)


def divergence(counts: Tensor, everyone: Tensor) -> float:
    """D(P): the Jensen–Shannon divergence, base 2, of a histogram from everybody's.

    Example:
        >>> two_classes = torch.tensor([1, 1, 0, 0, 0, 0, 0, 0, 0, 0])
        >>> round(divergence(two_classes, torch.ones(10)), 4)
        0.61
    """
    return jensen_shannon(counts.double(), everyone.double())


def cohort_histogram(cohort: Cohort) -> Tensor:
    """The label histogram of a cohort's rows together."""
    return torch.stack([u.notes["counts/labels"] for u in cohort]).sum(0)

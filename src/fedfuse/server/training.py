"""What the server knows of how the cohort trained, and on which labels; and a server that trains as its clients did."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from fedfuse.core.messages import Brief, ClientUpdate, Cohort
from fedfuse.core.params import Params
from fedfuse.core.rows import Rows
from fedfuse.core.seams import Work
from fedfuse.core.settings import LocalSettings
from fedfuse.core.state import Bench, ServerState, entries_of, with_kind
from fedfuse.errors import ConfigError
from fedfuse.linalg.divergence import jensen_shannon
from fedfuse.nets.cost import MASK
from fedfuse.training.pulls import Masked
from fedfuse.training.round import TrainingResult, train_on_rows

MissingCounts: TypeAlias = Literal["uniform", "ignored"]

_KIND = "labels"


def record_label_counts(state: ServerState, cohort: Cohort) -> ServerState:
    """The state with the cohort's label counts in its memory, in addition to those of clients that answered before."""
    counts = {u.client: u.notes["counts/labels"].clone() for u in cohort}
    return replace(state, memory={**state.memory, **with_kind(_KIND, counts)})


def population_histogram(memory: Params, population: int, missing_counts: MissingCounts = "uniform") -> Tensor:
    """The label histogram of all clients, float64: the sum over those known, and a guess for the others.

    A client that never answered counts with the mean number of rows, evenly over the classes ("uniform"), or is
    left out ("ignored"). Once all have answered the histogram is exact and the guess is gone.

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
    """D(P): the Jensen–Shannon divergence, base 2, of a histogram from that of all clients.

    Example:
        >>> two_classes = torch.tensor([1, 1, 0, 0, 0, 0, 0, 0, 0, 0])
        >>> round(divergence(two_classes, torch.ones(10)), 4)
        0.61
    """
    return jensen_shannon(counts.double(), everyone.double())


def cohort_histogram(cohort: Cohort) -> Tensor:
    """The label histogram of a cohort's rows together."""
    return torch.stack([u.notes["counts/labels"] for u in cohort]).sum(0)


def training_of(update: ClientUpdate, who: str) -> LocalSettings:
    """How one client trained.

    Args:
        update: its update.
        who: the method that must know, for the sentence.

    Raises:
        ConfigError: if the update does not say.
    """
    if update.training is None:
        raise ConfigError(
            f"{who} must know how clients trained and {update.client} does not say; fuse what `fedfuse update` or "
            "`fedfuse.local_update` made"
        )
    return update.training


def common_training(cohort: Cohort, bench: Bench, who: str, given: Collection[str] = ()) -> LocalSettings:
    """The settings all clients trained with, for a server that trains as they did.

    Where it runs and how it augments stay the server's own.

    Args:
        cohort: the clients.
        bench: the server's.
        who: the method that must know, for the sentence.
        given: settings the method was told itself, so that clients need not agree on them.

    Raises:
        ConfigError: naming two clients that differ, and in what.
    """
    common = _agree(cohort, who, lambda u: {k: v for k, v in training_of(u, who).to_json().items() if k not in given})
    theirs = LocalSettings.from_json(common)
    own = {"augment": bench.local.augment, "device": bench.local.device, "kernel": bench.local.kernel}
    return theirs.model_copy(update=own)


def common_rate(cohort: Cohort, round_: int, who: str) -> float:
    """The learning rate all clients began a round with.

    Raises:
        ConfigError: naming two clients whose rates differ.
    """
    return float(_agree(cohort, who, lambda u: {"rate": training_of(u, who).rate(round_, 0)})["rate"])


def _agree(cohort: Cohort, who: str, read: Callable[[ClientUpdate], dict[str, Any]]) -> dict[str, Any]:
    first = cohort.updates[0]
    common = read(first)
    for update in cohort.updates[1:]:
        theirs = read(update)
        for key in sorted(common.keys() | theirs.keys()):
            if common.get(key) != theirs.get(key):
                raise ConfigError(
                    f"{who} needs clients that trained alike: {first.client} had {key} = {common.get(key)} and "
                    f"{update.client} {key} = {theirs.get(key)}; train again with the same settings"
                )
    return common


def train_on(
    rows: Rows, state: ServerState, settings: LocalSettings, bench: Bench, who: str = "server"
) -> TrainingResult:
    """What the state's network becomes on some rows of the server's; weights that a mask leaves out stay zero.

    Args:
        rows: what to train on.
        state: the network, and the masks in its memory.
        settings: how to train.
        bench: the run's seed and number of classes.
        who: whose random streams are used.
    """
    model, masks = state.single, entries_of(state.memory, MASK)
    memory = with_kind(MASK, masks)
    brief = Brief(state.round, model.spec, model.posterior.mean, memory, classes=bench.classes, task=bench.task)
    work = Work(settings, project=Masked()) if masks else Work(settings)
    return train_on_rows(work, brief, who, rows, seed=bench.seed)

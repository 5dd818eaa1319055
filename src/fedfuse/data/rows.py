"""A data set in memory: training rows and test rows that never mix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedfuse.core.inputs import TableForm
from fedfuse.core.rows import Rows, describe, is_channels_last
from fedfuse.errors import ConfigError
from fedfuse.tasks import CLASSIFICATION, Task

__all__ = ["Array", "Dataset", "Rows", "stratified_split"]

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class Dataset:
    """A training set and a test set that never mix.

    Attributes:
        name: what the user called it.
        train: rows that may be given to clients and to the server.
        test: rows that only the judge sees.
        classes: the name of each class or label, or of each number to be predicted.
        facts: where it was found, rows seen, files, whether it is a partial set, checksum.
        task: what is to be learned.
        features: the name of each feature, of a table.
        owners: who holds each training row by nature, where that is known.
        vocabulary: what each token stands for, where rows are texts.
        form: the columns of a table and their scale, by which a model's file can read another table.
    """

    name: str
    train: Rows
    test: Rows
    classes: tuple[str, ...]
    facts: Mapping[str, object] = field(default_factory=dict)
    task: Task = CLASSIFICATION
    features: tuple[str, ...] = ()
    owners: tuple[str, ...] = ()
    vocabulary: tuple[str, ...] = ()
    form: TableForm | None = None

    @property
    def has_labels(self) -> bool:
        """Whether each row is of one class."""
        return not self.train.y.is_floating_point() and self.train.y.ndim == 1

    @property
    def has_numbers(self) -> bool:
        """Whether inputs are numbers, which have a scale, and not tokens."""
        return self.train.x.is_floating_point()

    def labels(self) -> torch.Tensor:
        """The class of each training row, by which rows are dealt; all alike where there are none."""
        return self.train.y if self.has_labels else torch.zeros(len(self.train), dtype=torch.int64)

    def __post_init__(self) -> None:
        object.__setattr__(self, "owners", tuple(map(str, self.owners)))
        for part, rows in (("training", self.train), ("test", self.test)):
            self._check(part, rows)
        if self.owners and len(self.owners) != len(self.train):
            raise ConfigError(
                f"{self.name}: owners names {len(self.owners)} holders, expected one for each of the "
                f"{len(self.train)} training rows; name one per row, or leave owners out"
            )
        if self.train.x.shape[1:] != self.test.x.shape[1:]:
            raise ConfigError(
                f"{self.name}: a training row has shape {tuple(self.train.x.shape[1:])} and a test row "
                f"{tuple(self.test.x.shape[1:])}, expected the same; resize one of them"
            )

    def _check(self, part: str, rows: Rows) -> None:
        if not len(rows):
            raise ConfigError(f"{self.name}: there are no {part} rows, expected at least one; add some")
        if rows.x.dtype not in (torch.float32, torch.int64) or rows.x.ndim not in (2, 4):
            raise ConfigError(
                f"{self.name}: the {part} rows' x is {describe(rows.x)}, expected float32 (or int64) of shape "
                "(n, features) or (n, channels, height, width); convert it first"
            )
        if is_channels_last(rows.x.shape[1:]):
            raise ConfigError(
                f"{self.name}: the {part} rows' x is {describe(rows.x)}, which looks like pictures with their channels "
                "last, expected (n, channels, height, width); turn it by x.permute(0, 3, 1, 2)"
            )
        if flaw := self.task.flaw(rows.y, len(self.classes)):
            raise ConfigError(f"{self.name}: {part} {flaw} (task {self.task.name})")


def stratified_split(y: Array, test_fraction: float) -> tuple[Array, Array]:
    """Positions for training and for testing, every class in the same proportion, always the same way.

    A class of one row stays in training.

    Example:
        >>> train, test = stratified_split(np.array([0] * 10 + [1] * 5), 0.2)
        >>> len(train), len(test)
        (12, 3)
    """
    if not 0 < test_fraction < 1:
        raise ConfigError(f"test_fraction is {test_fraction}, expected a number between 0 and 1; try 0.2")
    rng = np.random.default_rng(0)
    testing = np.zeros(len(y), dtype=bool)
    for label in np.unique(y):
        members = rng.permutation(np.flatnonzero(y == label))
        testing[members[: round(test_fraction * len(members))]] = len(members) > 1
    return np.flatnonzero(~testing), np.flatnonzero(testing)

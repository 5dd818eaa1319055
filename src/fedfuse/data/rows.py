"""Rows in memory: as they lie in files, as a data set whose halves never mix, and as one site's.

Readers (`formats`, `images`, `table_sources`, `texts`) give an `ArraySplit` for each half of an experiment's source,
from which `sources.load` makes a `Dataset`; at a site, `site.read_site` gives `SiteRows`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedfuse.core.inputs import RowForm, TableForm, TextForm
from fedfuse.core.rows import Rows, describe, is_channels_last
from fedfuse.data.transforms import scale01
from fedfuse.errors import ConfigError
from fedfuse.tasks import CLASSIFICATION, Binary, Classification, Multilabel, Regression, Task

__all__ = [
    "Array",
    "ArraySplit",
    "Dataset",
    "Half",
    "Halves",
    "Rows",
    "SiteRows",
    "concatenate",
    "in_units",
    "stratified_split",
]

Array = npt.NDArray[Any]


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


@dataclass(frozen=True, slots=True, eq=False)
class ArraySplit:
    """One half of a source as it lies in files, before it is limited and turned into tensors.

    Attributes:
        x: bytes of pixels, floats, or whole numbers.
        y: labels or numbers.
        owners: who holds each row, where that is known.
        features: the name of each feature, of a table.
        vocabulary: what each token stands for, where rows are texts.
    """

    x: Array
    y: Array
    owners: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    vocabulary: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.y)

    def take(self, index: Array) -> ArraySplit:
        """The rows at these positions."""
        owners = tuple(self.owners[i] for i in index) if self.owners else ()
        return replace(self, x=self.x[index], y=self.y[index], owners=owners)

    def rows(self) -> Rows:
        """The rows as tensors: bytes scaled to [0, 1], other whole numbers as they are; labels or numbers."""
        x = torch.from_numpy(np.ascontiguousarray(self.x))
        whole = x.dtype in (torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32)
        y = self.y.astype(np.float32 if self.y.dtype.kind == "f" else np.int64)
        return Rows(x.long() if whole else scale01(x), torch.from_numpy(y))


def concatenate(splits: Sequence[ArraySplit]) -> ArraySplit:
    """Splits of the same features one after another."""
    # Even a single part is copied: torch wants arrays it may write to, and bytes read from a file are not.
    x, y = np.concatenate([s.x for s in splits]), np.concatenate([s.y for s in splits])
    return replace(splits[0], x=x, y=y, owners=tuple(owner for split in splits for owner in split.owners))


@dataclass(frozen=True, slots=True)
class Halves:
    """A table or texts as rows to train on and rows to judge on, the names of their targets, and a table's columns."""

    train: ArraySplit
    test: ArraySplit
    classes: tuple[str, ...]
    form: TableForm | None = None


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

    def labels(self) -> Tensor:
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


Half = Literal["train", "test"]


def in_units(task: Task, form: RowForm | None) -> Task:
    """A task that for a table's numbers answers in the units of their columns, and any other as it is."""
    if not isinstance(task, Regression) or not isinstance(form, TableForm):
        return task
    return Regression(*(tuple(getattr(t, key) for t in form.targets) for key in ("mean", "std")))


@dataclass(frozen=True, slots=True, eq=False)
class SiteRows:
    """Rows of one place.

    Attributes:
        source: what the user called it.
        rows: inputs in the form, and labels that count in the order of the class names.
        class_names: the name of each label.
        form: what the inputs were brought to.
        names: what each row is called: a picture's file, or a number.
        broken: pictures that were left out, with the reason.
        half: which half of the source these are; empty if they are all of it.
        labelled: whether the source tells classes.
        task: what the labels are: classes, switches or numbers.
        remarks: what a reader should know.
    """

    source: str
    rows: Rows
    class_names: tuple[str, ...]
    form: RowForm
    names: tuple[str, ...]
    broken: Mapping[str, str] = field(default_factory=dict)
    half: str = ""
    labelled: bool = True
    task: Task = CLASSIFICATION
    remarks: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def counts(self) -> dict[str, int]:
        """How many rows each class has, or how often each label is on; numbers have nothing to count."""
        if not self.labelled or not isinstance(self.task, Classification | Binary | Multilabel):
            return {}
        switches = isinstance(self.task, Multilabel)
        counts = self.rows.y.sum(0).long() if switches else self.rows.counts(len(self.class_names))
        return dict(zip(self.class_names, counts.tolist(), strict=True))

    @property
    def targets_text(self) -> str:
        """A description of rows without classes: the names of numbers, or the form of texts."""
        return str(self.form) if isinstance(self.form, TextForm) else ", ".join(self.class_names)

    @property
    def strata(self) -> Tensor:
        """Per row the group that splits keep in proportion: its class, if it has one."""
        has_class = not self.rows.y.is_floating_point() and self.rows.y.ndim == 1
        return self.rows.y if has_class else torch.zeros(len(self), dtype=torch.int64)

    @property
    def task_in_units(self) -> Task:
        """The task, which for a table's numbers scores in the units of their columns."""
        return in_units(self.task, self.form)

    def take(self, index: Sequence[int]) -> SiteRows:
        """The rows at these positions."""
        return replace(self, rows=self.rows.take(index), names=tuple(self.names[i] for i in index))

    def split(self, fraction: float) -> tuple[SiteRows, SiteRows]:
        """Rows to train on and rows held out, every class in the same proportion, always the same way."""
        train, held = stratified_split(self.strata.numpy(), fraction)
        return self.take(train.tolist()), self.take(held.tolist())

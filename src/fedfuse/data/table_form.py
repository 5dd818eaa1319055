"""What a table's columns become: numbers of a common scale, one column per category, and marks of what is missing.

Sites add up counts, Σx and Σx² per column; the form that follows is the one the pooled rows would have.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat

from fedfuse.core.settings import Settings, validate_settings
from fedfuse.data.rows import Array
from fedfuse.data.tables import RawTable
from fedfuse.errors import ConfigError

Kind = Literal["numeric", "categorical"]


class ColumnMoments(Settings):
    """What one site tells of one column.

    Attributes:
        kind: numeric or categorical.
        count: rows in which it is there.
        missing: rows in which it is not.
        total: Σ x, of numbers.
        square: Σ x².
        levels: how many rows each category has.
    """

    kind: Kind
    count: NonNegativeInt = 0
    missing: NonNegativeInt = 0
    total: float = 0.0
    square: NonNegativeFloat = 0.0
    levels: dict[str, NonNegativeInt] = Field(default_factory=dict)

    def plus(self, other: ColumnMoments) -> ColumnMoments:
        """The moments of both sites' rows."""
        levels = {n: self.levels.get(n, 0) + other.levels.get(n, 0) for n in (*self.levels, *other.levels)}
        sums = {name: getattr(self, name) + getattr(other, name) for name in ("count", "missing", "total", "square")}
        return ColumnMoments(kind=self.kind, levels=levels, **sums)


class NumericColumn(Settings):
    """Numbers, shifted and scaled; where one is missing, the mean stands."""

    name: str
    kind: Literal["numeric"] = "numeric"
    mean: float = 0.0
    std: PositiveFloat = 1.0
    indicator: bool = False

    @property
    def features(self) -> tuple[str, ...]:
        """The names of what it becomes."""
        return (self.name, f"{self.name} missing") if self.indicator else (self.name,)

    def encode(self, table: RawTable) -> Array:
        """(x − mean) / std, and whether it was missing."""
        x = table.numbers(self.name)
        absent = np.isnan(x)
        z = np.where(absent, 0.0, (x - self.mean) / self.std)
        return np.stack([z, absent], 1) if self.indicator else z[:, None]


class CategoricalColumn(Settings):
    """Categories: one column of zeros and ones for each but the first; where one is missing, the commonest stands."""

    name: str
    kind: Literal["categorical"] = "categorical"
    levels: tuple[str, ...]
    mode: str
    indicator: bool = False

    @property
    def features(self) -> tuple[str, ...]:
        """The names of what it becomes."""
        found = tuple(f"{self.name}={level}" for level in self.levels[1:])
        return (*found, f"{self.name} missing") if self.indicator else found

    def encode(self, table: RawTable) -> Array:
        """Zeros and ones."""
        words = table.words(self.name)
        if unknown := sorted({w for w in words if w is not None} - set(self.levels)):
            raise ConfigError(
                f"{table.where}: column {self.name!r} holds {unknown[0]!r}, expected one of {', '.join(self.levels)}; "
                "correct it, or let the federation know that category"
            )
        at = np.array([self.levels.index(self.mode if w is None else w) for w in words], dtype=np.int64)
        one_hot = np.eye(len(self.levels))[at][:, 1:]
        absent = np.array([[w is None] for w in words], dtype=np.float64)
        return np.concatenate([one_hot, absent], 1) if self.indicator else one_hot


class TableForm(Settings):
    """The columns of a table in their order, and what each becomes.

    Example:
        >>> form = TableForm(columns=[NumericColumn(name="age", mean=50, std=10),
        ...                           CategoricalColumn(name="sex", levels=["f", "m"], mode="f")])
        >>> form.features, form.encode(RawTable("here", {"sex": ["m", None], "age": ["60", None]})).tolist()
        (('age', 'sex=m'), [[1.0, 1.0], [0.0, 0.0]])
    """

    columns: tuple[NumericColumn | CategoricalColumn, ...] = Field(min_length=1)

    @property
    def features(self) -> tuple[str, ...]:
        """The name of each feature, in order."""
        return tuple(name for column in self.columns for name in column.features)

    def encode(self, table: RawTable) -> torch.Tensor:
        """Rows as a network reads them, float32.

        Raises:
            ConfigError: naming a column that is not there, or is of another kind.
        """
        parts = [column.encode(table) for column in self.columns]
        return torch.from_numpy(np.concatenate(parts, 1)).float()


@dataclass(frozen=True, slots=True)
class TableMoments:
    """Counts and sums of every column: all that sites exchange to agree on one scale.

    What it reveals: per column the number of rows, the mean and variance, the categories and how many rows each has.
    """

    columns: Mapping[str, ColumnMoments] = field(default_factory=dict)

    @classmethod
    def of(cls, table: RawTable, names: Sequence[str], categorical: Sequence[str] = ()) -> TableMoments:
        """The moments of one table's columns; text is categorical, numbers are unless they are listed so.

        Example:
            >>> table = RawTable("here", {"age": ["60", "40", None], "sex": ["f", "m", "m"]})
            >>> found = TableMoments.of(table, ["age", "sex"])
            >>> found.columns["age"].total, found.columns["age"].missing, found.columns["sex"].levels
            (100.0, 1, {'f': 1, 'm': 2})
        """
        return cls({n: _moments(table, n, n in categorical or not table.is_numeric(n)) for n in names})

    def __add__(self, other: TableMoments) -> TableMoments:
        if odd := sorted(self.columns.keys() ^ other.columns.keys()):
            raise ConfigError(
                f"column {odd[0]!r} is in one site's moments and not in another's; give both the same ones"
            )
        for name, mine in self.columns.items():
            if mine.kind != other.columns[name].kind:
                raise ConfigError(
                    f"column {name!r} is {mine.kind} at one site and {other.columns[name].kind} at another; list it as "
                    "categorical everywhere, or correct its values"
                )
        return TableMoments({name: mine.plus(other.columns[name]) for name, mine in self.columns.items()})

    def form(self, indicators: bool = True) -> TableForm:
        """The form the pooled rows have: columns by name, mean and standard deviation, categories in order."""
        return TableForm(columns=tuple(_column(n, m, indicators) for n, m in sorted(self.columns.items())))

    def to_json(self) -> dict[str, Any]:
        """Plain data for a file."""
        return {name: column.model_dump(mode="json") for name, column in self.columns.items()}

    @classmethod
    def from_json(cls, given: object, where: str) -> TableMoments:
        """Read them back.

        Raises:
            ConfigError: naming what cannot be.
        """
        if not isinstance(given, Mapping) or not given:
            raise ConfigError(f"{where} holds no moments of columns; make it with `fedfuse moments`")
        return cls({str(n): validate_settings(ColumnMoments, m, f"{where}: {n}") for n, m in given.items()})


def _moments(table: RawTable, name: str, categorical: bool) -> ColumnMoments:
    if categorical:
        words = table.words(name)
        levels = {w: words.count(w) for w in sorted({w for w in words if w is not None})}
        return ColumnMoments(kind="categorical", count=sum(levels.values()), missing=words.count(None), levels=levels)
    x = table.numbers(name)
    there = x[~np.isnan(x)]
    missing, total, square = len(x) - len(there), float(there.sum()), float((there**2).sum())
    return ColumnMoments(kind="numeric", count=len(there), missing=missing, total=total, square=square)


def _column(name: str, m: ColumnMoments, indicators: bool) -> NumericColumn | CategoricalColumn:
    if not m.count:
        raise ConfigError(f"column {name!r} is missing in every row of every site; leave it out")
    indicator = indicators and m.missing > 0
    if m.kind == "categorical":
        levels = tuple(sorted(m.levels))
        mode = max(levels, key=lambda level: (m.levels[level], level))
        return CategoricalColumn(name=name, levels=levels, mode=mode, indicator=indicator)
    mean = m.total / m.count
    std = math.sqrt(max(m.square / m.count - mean**2, 0.0))
    return NumericColumn(name=name, mean=mean, std=std if std > 1e-9 * abs(mean) else 1.0, indicator=indicator)

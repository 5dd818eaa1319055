"""Tables: CSV and Parquet files read as text, the moments of their columns, and rows encoded by a common form.

Columns are found by name, never by position. `RawTable` is a file in memory, `TableMoments` the counts and sums that
sites add up without showing a row, and `encode_table` gives the rows in the form that follows from those moments.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, Self

import numpy as np
import torch
from pydantic import Field, NonNegativeFloat, NonNegativeInt, model_validator

from fedfuse.core.files import regular
from fedfuse.core.inputs import CategoricalColumn, NumericColumn, Scale, TableForm, TargetColumn, split_heading
from fedfuse.core.settings import Settings
from fedfuse.data.rows import Array
from fedfuse.errors import ConfigError, suggest

MISSING = frozenset({"", "?", "na", "n/a", "nan", "null", "none"})
SUFFIXES = (".csv", ".parquet")


@dataclass(frozen=True, slots=True, eq=False)
class RawTable:
    """A table in memory: every value as text, None where it is missing.

    Example:
        >>> table = RawTable("here", {"age": ["63", None], "sex": ["f", "m"]})
        >>> table.numbers("age"), table.is_numeric("sex"), len(table)
        (array([63., nan]), False, 2)
    """

    where: str
    columns: Mapping[str, Sequence[str | None]]
    units: Mapping[str, str] = field(default_factory=dict)
    numbering: Sequence[int] = ()

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))

    def take(self, index: Sequence[int]) -> RawTable:
        """The rows at these positions, which keep their numbers in the file."""
        columns = {name: [values[i] for i in index] for name, values in self.columns.items()}
        return replace(self, columns=columns, numbering=[self.row_number(i) for i in index])

    def row_number(self, position: int) -> int:
        """Which row of the file stands at a position, counted from 1."""
        return self.numbering[position] if self.numbering else position + 1

    def without(self, names: Sequence[str]) -> RawTable:
        """The table without some columns, which must be there."""
        for name in names:
            self.column(name)
        return replace(self, columns={name: values for name, values in self.columns.items() if name not in names})

    def with_units(self) -> RawTable:
        """The table with units taken out of its headings, as in `chol [mg/dl]`, where that leaves no name twice."""
        split = {heading: split_heading(heading) for heading in self.columns}
        if len({name for name, _ in split.values()}) < len(split):
            return self
        columns = {split[heading][0]: values for heading, values in self.columns.items()}
        return replace(self, columns=columns, units={name: unit for name, unit in split.values() if unit})

    def check_unit(self, name: str, unit: str) -> None:
        """Refuse a column whose heading tells another unit.

        Raises:
            ConfigError: naming both.
        """
        if unit and self.units.get(name, unit) != unit:
            raise ConfigError(
                f"{self.where}: column {name!r} is in {self.units[name]}, expected {unit}; convert it first"
            )

    def complete_rows(self) -> list[int]:
        """The positions of rows in which nothing is missing."""
        return [i for i, row in enumerate(zip(*self.columns.values(), strict=True)) if None not in row]

    def column(self, name: str) -> Sequence[str | None]:
        """A column's values.

        Raises:
            ConfigError: naming the columns there are.
        """
        if name not in self.columns:
            raise ConfigError(
                f"{self.where} has no column {name!r}{suggest(name, self.columns)} it has {', '.join(self.columns)}"
            )
        return self.columns[name]

    def is_numeric(self, name: str) -> bool:
        """Whether everything that is there in a column is a number."""
        return all(value is None or is_number(value) for value in self.column(name))

    def numbers(self, name: str) -> Array:
        """A column as float64, NaN where it is missing.

        Raises:
            ConfigError: naming the first value that is no number.
        """
        found = np.full(len(self), np.nan)
        for row, value in enumerate(self.column(name)):
            if value is None:
                continue
            number = _as_number(value)
            if number is None:
                raise ConfigError(
                    f"{self.where}: column {name!r} holds {value!r} in row {self.row_number(row)}, expected numbers; "
                    "correct it, or leave the cell empty"
                )
            found[row] = number
        return found

    def words(self, name: str, known: Sequence[str] = ()) -> list[str | None]:
        """A column as names of categories: 1, 1.0 and "1" are one.

        Raises:
            ConfigError: naming the first value that is none of those known, where they are.
        """
        found = [None if value is None else level_name(value) for value in self.column(name)]
        odd = next((row for row, word in enumerate(found) if known and word is not None and word not in known), None)
        if odd is not None:
            raise ConfigError(
                f"{self.where}: column {name!r} holds {found[odd]!r} in row {self.row_number(odd)}, expected one of "
                f"{', '.join(known)}{suggest(str(found[odd]), known)} correct it, or let the federation know it"
            )
        return found


def read_table(path: Path) -> RawTable:
    """Read a CSV (its first line names the columns) or a Parquet file.

    Raises:
        ConfigError: if it is no such file, or its columns do not have names of their own.
    """
    if path.suffix == ".parquet":
        return _read_parquet(path)
    try:
        with regular(path).open(newline="", encoding="utf-8-sig") as file:
            lines = list(csv.reader(file, skipinitialspace=True))
    except (OSError, UnicodeDecodeError, csv.Error) as why:
        raise ConfigError(f"{path} cannot be read as a CSV file: {why}") from why
    lines = [line for line in lines if line]
    if len(lines) < 2:
        raise ConfigError(f"{path} has no rows, expected a line of column names and rows below it")
    return table_of_lines(str(path), [name.strip() for name in lines[0]], lines[1:])


def table_of_lines(where: str, names: Sequence[str], lines: Sequence[Sequence[str]]) -> RawTable:
    """A table of text, line by line, under the given names."""
    if twice := sorted({name for name in names if names.count(name) > 1 or not name}):
        raise ConfigError(f"{where}: the column {twice[0]!r} stands there twice or has no name; name each once")
    if odd := [number for number, line in enumerate(lines, 1) if len(line) != len(names)]:
        raise ConfigError(
            f"{where}: row {odd[0]} has {len(lines[odd[0] - 1])} values and there are {len(names)} columns; correct it"
        )
    columns = zip(*lines, strict=True)
    return RawTable(where, {name: [_as_value(v) for v in column] for name, column in zip(names, columns, strict=True)})


def _read_parquet(path: Path) -> RawTable:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as why:
        raise ConfigError(f"{path}: to read Parquet files install pyarrow: pip install 'fedfuse[tables]'") from why
    try:
        found = parquet.read_table(regular(path)).to_pydict()
    except (OSError, ArrowException) as why:
        raise ConfigError(f"{path} cannot be read as a Parquet file: {why}") from why
    return RawTable(str(path), {n: [None if v is None else _as_value(str(v)) for v in c] for n, c in found.items()})


def _as_value(text: str) -> str | None:
    text = text.strip()
    return None if text.lower() in MISSING else text


def _as_number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if np.isfinite(number) else None


def is_number(text: str) -> bool:
    """Whether a cell holds a finite number.

    Example:
        >>> is_number("104.1"), is_number("<100")
        (True, False)
    """
    return _as_number(text) is not None


def level_name(text: str) -> str:
    """A category's name.

    Example:
        >>> level_name("4.0"), level_name(" asymptomatic ")
        ('4', 'asymptomatic')
    """
    number = _as_number(text)
    return str(int(number)) if number is not None and number == int(number) else text.strip()


Kind = Literal["numeric", "categorical"]


class ColumnMoments(Settings):
    """What one site discloses of one column.

    Attributes:
        kind: numeric or categorical.
        count: rows in which it is there.
        missing: rows in which it is not.
        total: Σ x, of numbers.
        square: Σ x².
        levels: how many rows each category has.
        unit: of numbers, where it is known.
    """

    kind: Kind
    count: NonNegativeInt = 0
    missing: NonNegativeInt = 0
    total: float = 0.0
    square: NonNegativeFloat = 0.0
    levels: dict[str, NonNegativeInt] = Field(default_factory=dict)
    unit: str = ""

    @model_validator(mode="after")
    def _check(self) -> Self:
        # Cauchy-Schwarz, with room for the rounding of both sums: moments come from other sites and may be forged.
        if self.total**2 > self.count * self.square * (1 + 1e-9) + 1e-9:
            raise ValueError("(Σx)² is more than n Σx², which no numbers have")
        if self.kind == "categorical" and sum(self.levels.values()) != self.count:
            raise ValueError(f"its categories have {sum(self.levels.values())} rows and {self.count} are counted")
        return self

    @classmethod
    def of(cls, table: RawTable, name: str, kind: Kind) -> ColumnMoments:
        """The moments of one column of a table.

        Raises:
            ConfigError: naming the row of a word in a numeric column.
        """
        if kind == "categorical":
            words = table.words(name)
            levels = {w: words.count(w) for w in sorted({w for w in words if w is not None})}
            return cls(kind=kind, count=sum(levels.values()), missing=words.count(None), levels=levels)
        x = table.numbers(name)
        there = x[~np.isnan(x)]
        total, square = float(there.sum()), float((there**2).sum())
        unit, missing = table.units.get(name, ""), len(x) - len(there)
        return cls(kind=kind, count=len(there), missing=missing, total=total, square=square, unit=unit)

    @property
    def mean(self) -> float:
        """Of the numbers that are there."""
        return self.total / max(self.count, 1)

    @property
    def std(self) -> float:
        """The standard deviation, dividing by n; 1 for numbers that do not vary."""
        # E[x²] − E[x]² cancels: below 1e-9 of the mean only rounding is left, and dividing by it would blow that up.
        found = math.sqrt(max(self.square / max(self.count, 1) - self.mean**2, 0.0))
        return found if found > 1e-9 * abs(self.mean) and found > 0 else 1.0

    def plus(self, other: ColumnMoments) -> ColumnMoments:
        """The moments of both sites' rows."""
        levels = {n: self.levels.get(n, 0) + other.levels.get(n, 0) for n in (*self.levels, *other.levels)}
        sums = {name: getattr(self, name) + getattr(other, name) for name in ("count", "missing", "total", "square")}
        return ColumnMoments(kind=self.kind, levels=levels, unit=self.unit or other.unit, **sums)

    def rescale(self, column: NumericColumn | CategoricalColumn) -> NumericColumn | CategoricalColumn:
        """A column with the mean and standard deviation, or the most frequent category, of these moments."""
        if self.kind != column.kind:
            raise ConfigError(
                f"column {column.name!r} is {column.kind} and its moments are of a {self.kind} one; ask anew"
            )
        if isinstance(column, NumericColumn):
            return column.model_copy(update={"mean": self.mean, "std": self.std, "indicator": self.missing > 0})
        if unknown := sorted(set(self.levels) - set(column.levels)):
            raise ConfigError(
                f"column {column.name!r}: a site has the category {unknown[0]!r}, expected one of "
                f"{', '.join(column.levels)}; correct it there, or let the federation know it"
            )
        mode = max(column.levels, key=lambda level: (self.levels.get(level, 0), level))
        return column.model_copy(update={"mode": mode, "indicator": self.missing > 0})


@dataclass(frozen=True, slots=True)
class TableMoments:
    """Counts and sums of every column: all that sites exchange to agree on one scale.

    What it reveals: per column the number of rows, the mean and variance, the categories and how many rows each has.
    """

    columns: Mapping[str, ColumnMoments] = field(default_factory=dict)

    @classmethod
    def of(cls, table: RawTable, names: Sequence[str], kinds: Mapping[str, Kind] | None = None) -> TableMoments:
        """The moments of one table's columns, of the kinds that were agreed on.

        Where no kind was agreed on, a column is numeric if every cell that is there is a number.

        Example:
            >>> table = RawTable("here", {"age": ["60", "40", None], "sex": ["f", "m", "m"]})
            >>> found = TableMoments.of(table, ["age", "sex"])
            >>> found.columns["age"].total, found.columns["age"].missing, found.columns["sex"].levels
            (100.0, 1, {'f': 1, 'm': 2})

        Raises:
            ConfigError: naming the row of a word among numbers that were agreed on.
        """
        columns = {}
        for name in names:
            kind = (kinds or {}).get(name) or ("numeric" if table.is_numeric(name) else "categorical")
            columns[name] = ColumnMoments.of(table, name, kind)
        return cls(columns)

    def __add__(self, other: TableMoments) -> TableMoments:
        if odd := sorted(self.columns.keys() ^ other.columns.keys()):
            raise ConfigError(
                f"column {odd[0]!r} is in one site's moments and not in another's; give both the same ones"
            )
        for name, mine in self.columns.items():
            if mine.unit and other.columns[name].unit not in ("", mine.unit):
                raise ConfigError(
                    f"column {name!r} is in {mine.unit} at one site and in {other.columns[name].unit} at another; "
                    "bring it to one unit everywhere"
                )
            if mine.kind != other.columns[name].kind:
                raise ConfigError(
                    f"column {name!r} is {mine.kind} at one site and {other.columns[name].kind} at another; correct "
                    f"its values, or name its categories everywhere (--columns {name}:…|…)"
                )
        return TableMoments({name: mine.plus(other.columns[name]) for name, mine in self.columns.items()})

    def form(self, targets: Sequence[TargetColumn] = (), scale: Scale = "moments") -> TableForm:
        """The form the pooled rows have: columns by name, mean and standard deviation, categories in order."""
        columns = []
        for name in sorted(self.columns):
            moments = self._of(name)
            if moments.kind == "categorical":
                columns.append(moments.rescale(CategoricalColumn(name=name, levels=tuple(sorted(moments.levels)))))
            else:
                columns.append(moments.rescale(NumericColumn(name=name, unit=moments.unit)))
        return TableForm(columns=tuple(columns), targets=tuple(targets), scale=scale)

    def form_for(self, targets: Sequence[TargetColumn]) -> TableForm:
        """The form of all columns but the targets, with the targets' own scale where they are numbers."""
        names = {target.name for target in targets}
        inputs = TableMoments({name: m for name, m in self.columns.items() if name not in names})
        return self.rescale(inputs.form(targets))

    def rescale(self, form: TableForm) -> TableForm:
        """An agreed form with the scale of these moments: its columns, units, categories and order stay.

        Raises:
            ConfigError: naming a column that has no moments, or no values at any site.
        """
        columns = tuple(self._of(column.name).rescale(column) for column in form.columns)
        targets = []
        for target in form.targets:
            m = self.columns.get(target.name)
            if m is not None and m.kind == "numeric":  # names of classes have no scale
                target = target.model_copy(update={"mean": m.mean, "std": m.std, "unit": target.unit or m.unit})
            targets.append(target)
        return form.model_copy(update={"columns": columns, "targets": tuple(targets), "scale": "moments"})

    def _of(self, name: str) -> ColumnMoments:
        if name not in self.columns:
            raise ConfigError(f"there are no moments of the column {name!r}; make them by this federation folder")
        if not self.columns[name].count:
            raise ConfigError(f"column {name!r} is missing in every row of every site; leave it out")
        return self.columns[name]


def looks_like_another_unit(mean: float, std: float, common_mean: float, common_std: float) -> bool:
    """Whether a site's numbers lie so far from the others' that they may be in another unit.

    They do if the means are five deviations apart, or two while one deviation is five times the other.

    Example:
        >>> looks_like_another_unit(6.1, 1.3, 237, 49), looks_like_another_unit(210, 55, 237, 49)
        (True, False)
    """
    wide, narrow = max(std, common_std), min(std, common_std)
    apart = abs(mean - common_mean)
    return apart > 5 * wide or (apart > 2 * wide and wide > 5 * narrow)


def encode_table(form: TableForm, table: RawTable) -> torch.Tensor:
    """Rows as a network reads them, float32: z-scores, categories one-hot without the first, and indicators of gaps.

    A missing number becomes the mean and a missing category the most frequent one.

    Example:
        >>> form = TableForm(columns=[NumericColumn(name="age", mean=50, std=10),
        ...                           CategoricalColumn(name="sex", levels=["f", "m"], mode="f")])
        >>> encode_table(form, RawTable("here", {"sex": ["m", None], "age": ["60", None]})).tolist()
        [[1.0, 1.0], [0.0, 0.0]]

    Raises:
        ConfigError: naming a column that is not there, or is of another kind or unit.
    """
    parts: list[Array] = []
    for column in form.columns:
        if isinstance(column, CategoricalColumn):
            words = table.words(column.name, column.levels)
            absent = np.array([word is None for word in words])
            filled = [column.mode or column.levels[0] if word is None else word for word in words]
            levels = np.array([column.levels.index(word) for word in filled], dtype=np.int64)
            parts.append(np.eye(len(column.levels))[levels][:, 1:])
        else:
            table.check_unit(column.name, column.unit)
            x = table.numbers(column.name)
            absent = np.isnan(x)
            parts.append(np.where(absent, 0.0, (x - column.mean) / column.std)[:, None])
        if column.indicator:
            parts.append(absent[:, None].astype(np.float64))
    return torch.from_numpy(np.concatenate(parts, 1)).float()

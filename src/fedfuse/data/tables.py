"""Tables of people, machines or days: CSV and Parquet files, their columns told by name and never by place.

A form says which columns there are, what kind each is of and how it is scaled; it comes from moments, which sites can
add up without showing a row, so that no site's scale decides.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from fedfuse.core.columns import split_heading
from fedfuse.core.files import regular
from fedfuse.core.words import suggest
from fedfuse.data.rows import Array
from fedfuse.errors import ConfigError

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

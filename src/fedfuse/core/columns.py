"""The columns of a table as all sites have them: names, kinds, units, categories and one common scale."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Literal, Self, TypeAlias

from pydantic import Field, PositiveFloat, model_validator

from fedfuse.core.inputs import InputForm
from fedfuse.core.settings import Settings
from fedfuse.errors import ConfigError

Name = Annotated[str, Field(min_length=1, max_length=200)]
Scale = Literal["awaited", "moments", "site", "none"]

_HEADING = re.compile(r"(?P<name>[^\[\]]*[^\[\]\s])\s*\[(?P<unit>[^\[\]]+)\]")
_COLUMN = re.compile(r"(?P<name>[^\[\]:]+)(\[(?P<unit>[^\[\]]+)\])?(:(?P<levels>.*))?")


class NumericColumn(Settings):
    """Numbers, shifted and scaled; where one is missing, the mean stands."""

    name: Name
    kind: Literal["numeric"] = "numeric"
    unit: str = ""
    mean: float = 0.0
    std: PositiveFloat = 1.0
    indicator: bool = False

    @property
    def features(self) -> tuple[str, ...]:
        """The names of what it becomes."""
        return (self.name, f"{self.name} missing") if self.indicator else (self.name,)


class CategoricalColumn(Settings):
    """Categories: one column of zeros and ones for each but the first; where one is missing, the commonest stands."""

    name: Name
    kind: Literal["categorical"] = "categorical"
    levels: Annotated[tuple[Name, ...], Field(min_length=1, max_length=10_000)]
    mode: str = ""
    indicator: bool = False

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(set(self.levels)) < len(self.levels):
            raise ValueError(f"column {self.name!r} names a category twice")
        if self.mode and self.mode not in self.levels:
            raise ValueError(f"the commonest category of {self.name!r} is {self.mode!r}, which is none of its own")
        return self

    @property
    def features(self) -> tuple[str, ...]:
        """The names of what it becomes."""
        found = tuple(f"{self.name}={level}" for level in self.levels[1:])
        return (*found, f"{self.name} missing") if self.indicator else found


class TargetColumn(Settings):
    """What is to be predicted; numbers are shifted and scaled, so that a network sees unit variance."""

    name: Name
    unit: str = ""
    mean: float = 0.0
    std: PositiveFloat = 1.0


Column: TypeAlias = Annotated[NumericColumn | CategoricalColumn, Field(discriminator="kind")]


class TableForm(Settings):
    """The columns of a table in their order, what each becomes, and what is to be predicted.

    Attributes:
        kind: of form.
        scale: where means and deviations come from: sums of all sites, one site's rows, nowhere (numbers are taken as
            they are), or they are still awaited.
        columns: what is read, in the order in which a network reads it.
        targets: what is predicted.

    Example:
        >>> form = TableForm(columns=[NumericColumn(name="age", mean=50, std=10),
        ...                           CategoricalColumn(name="sex", levels=["f", "m"])])
        >>> form.features, form.shape, str(form)
        (('age', 'sex=m'), (2,), 'a table of age, sex')
    """

    kind: Literal["table"] = "table"
    scale: Scale = "none"
    columns: Annotated[tuple[Column, ...], Field(min_length=1, max_length=100_000)]
    targets: tuple[TargetColumn, ...] = ()

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = [column.name for column in (*self.columns, *self.targets)]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"the column {twice[0]!r} stands there twice; name each once, the target apart")
        if not self.features:
            raise ValueError("no column has more than one category; a network could tell nothing from them")
        return self

    @property
    def features(self) -> tuple[str, ...]:
        """The name of each feature, in order."""
        return tuple(name for column in self.columns for name in column.features)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one row: as many numbers as there are features."""
        return (len(self.features),)

    @property
    def is_normalized(self) -> bool:
        """Whether a tensor must still be shifted and scaled: never, for reading a table does it column by column."""
        return False

    @property
    def target_names(self) -> tuple[str, ...]:
        """The names of what is predicted."""
        return tuple(target.name for target in self.targets)

    def bounds(self) -> InputForm:
        """The range of its numbers: scaled ones are taken to lie in ±3."""
        return InputForm(self.shape, (-3.0,), (3.0,))

    def differences(self, other: TableForm) -> str:
        """In which column two tables differ, and how, in a few words.

        Example:
            >>> a, b = (TableForm(columns=[NumericColumn(name="age", mean=m)]) for m in (1, 2))
            >>> a.differences(b)
            "column 'age' has mean 1, there 2"
        """
        mine, theirs = ({c.name: c for c in (*form.columns, *form.targets)} for form in (self, other))
        for name in (*mine, *theirs):
            if name not in mine or name not in theirs:
                return f"column {name!r} is {'not there' if name not in theirs else 'only there'}"
            for key, value in mine[name].model_dump().items():
                there = theirs[name].model_dump().get(key)
                if value != there:
                    return f"column {name!r} has {key} {_plain(value)}, there {_plain(there)}"
        return "columns stand in another order"

    def __str__(self) -> str:
        names = [column.name for column in self.columns]
        shown = ", ".join(names[:8]) + (f", … ({len(names)} columns)" if len(names) > 8 else "")
        return f"a table of {shown}"


def _plain(value: object) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return ", ".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


def split_heading(heading: str) -> tuple[str, str]:
    """A column's name and unit, as the first line of a file has them.

    Example:
        >>> split_heading("chol [mg/dl]"), split_heading("age")
        (('chol', 'mg/dl'), ('age', ''))
    """
    found = _HEADING.fullmatch(heading.strip())
    return (found["name"].strip(), found["unit"].strip()) if found else (heading.strip(), "")


def parse_columns(texts: Sequence[str]) -> tuple[NumericColumn | CategoricalColumn, ...]:
    """Columns as a user types them: `age`, `chol[mg/dl]` for numbers, `sex:f|m` for categories.

    Example:
        >>> [column.name for column in parse_columns(["age[years]", "sex:f|m"])]
        ['age', 'sex']

    Raises:
        ConfigError: naming what cannot be read.
    """
    return tuple(_parse_column(text.strip()) for text in texts)


def _parse_column(text: str) -> NumericColumn | CategoricalColumn:
    found = _COLUMN.fullmatch(text)
    levels = [] if found is None else [level.strip() for level in (found["levels"] or "").split("|")]
    if found is None or (found["levels"] is not None and (found["unit"] or "" in levels or len(levels) < 2)):
        raise ConfigError(
            f"--columns: {text!r} is no column; write age or age[years] for numbers, sex:f|m for categories"
        )
    name = found["name"].strip()
    if found["levels"] is None:
        return NumericColumn(name=name, unit=(found["unit"] or "").strip())
    return CategoricalColumn(name=name, levels=tuple(levels))

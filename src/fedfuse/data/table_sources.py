"""Tables as sources of rows, and a site's table brought to the form that all sites have."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from fedfuse.core.inputs import CategoricalColumn, NumericColumn, TableForm, TargetColumn
from fedfuse.data.rows import Array, Rows, stratified_split
from fedfuse.data.stores import Store
from fedfuse.data.tables import (
    Kind,
    RawTable,
    TableMoments,
    encode_table,
    is_number,
    level_name,
    looks_like_another_unit,
    read_table,
    table_of_lines,
)
from fedfuse.errors import ConfigError
from fedfuse.tasks import CLASSIFICATION, Binary, Classification, Multilabel, Regression, Task

OPTIONS = ("target", "columns", "categorical", "drop", "client", "test_fraction", "missing")


@dataclass(frozen=True, slots=True, eq=False)
class TableSplit:
    """Rows of a table, their features named, and who holds each where a column says so."""

    x: Array
    y: Array
    features: tuple[str, ...]
    owners: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.y)

    def take(self, index: Array) -> TableSplit:
        """The rows at these positions."""
        owners = tuple(self.owners[i] for i in index) if self.owners else ()
        return replace(self, x=self.x[index], y=self.y[index], owners=owners)

    def rows(self) -> Rows:
        """The rows as tensors."""
        return Rows(torch.from_numpy(self.x.copy()), torch.from_numpy(self.y.copy()))


@dataclass(frozen=True, slots=True)
class TableHalves:
    """A table as rows to train on and rows to judge on, the names of its classes or targets, and its columns."""

    train: TableSplit
    test: TableSplit
    classes: tuple[str, ...]
    form: TableForm | None = None


def open_table(path: Path, options: Mapping[str, object], task: Task) -> TableHalves:
    """A CSV or Parquet file as a source: one scale for all, from the training rows.

    Every client's sums add up to those of all training rows, so this is the form that federated moments give.

    Args:
        path: the file.
        options: `target` (a column, or several for labels and numbers); `columns`, by default all others; those of
            them that are `categorical` though they look like numbers; columns to `drop`; `client`, a column that says
            who holds the row; `test_fraction`; `missing`: "impute" or "drop" rows.
        task: what the target is.
    """
    table = read_table(path)
    targets, names = _targets(options, path), _words(options, "columns", path)
    owner = options.get("client")
    extra = [owner] if isinstance(owner, str) else []
    table = table.without(_words(options, "drop", path))
    if options.get("missing", "impute") == "drop":
        table = table.take(table.complete_rows())
    table = _with_targets(table, targets)
    names = names or [n for n in table.columns if n not in (*targets, *extra)]
    y, classes = encode_targets(table, targets, task)
    train, test = _split(y, options.get("test_fraction", 0.2), path)
    own, rest = table.take(train.tolist()), table.take(test.tolist())
    targeted = [TargetColumn(name=name) for name in targets]
    kinds: dict[str, Kind] = dict.fromkeys(_words(options, "categorical", path), "categorical")
    form = TableMoments.of(own, names, kinds).form(targeted)
    owners = tuple(v or "unknown" for v in own.words(extra[0])) if extra else ()
    return TableHalves(_rows(own, form, y[train], owners), _rows(rest, form, y[test]), classes, form)


def _rows(table: RawTable, form: TableForm, y: Array, owners: tuple[str, ...] = ()) -> TableSplit:
    return TableSplit(encode_table(form, table).numpy(), y, form.features, owners)


def encode_targets(
    table: RawTable, targets: Sequence[str], task: Task, classes: Sequence[str] = ()
) -> tuple[Array, tuple[str, ...]]:
    """Targets as the task has them, and their names: classes in order, labels, or numbers.

    Args:
        table: the rows.
        targets: the target columns.
        task: what they are.
        classes: the names of the classes where they are agreed on; else those found, sorted.

    Raises:
        ConfigError: naming a value that cannot be.
    """
    if not isinstance(task, Classification | Binary):
        y = np.stack([table.numbers(name) for name in targets], 1).astype(np.float32)
        return (y if len(targets) > 1 or isinstance(task, Multilabel) else y[:, 0]), tuple(targets)
    if len(targets) != 1:
        raise ConfigError(f"{table.where}: {len(targets)} target columns came, and {task.name} has one")
    words = [str(word) for word in table.words(targets[0])]
    names = tuple(classes) or tuple(sorted(set(words)))
    if unknown := sorted(set(words) - set(names)):
        raise ConfigError(f"{table.where}: {targets[0]!r} is {unknown[0]!r}, expected one of {', '.join(names)}")
    if isinstance(task, Binary) and len(names) != 2:
        raise ConfigError(f"{table.where}: {targets[0]!r} has {len(names)} values, expected two for task = 'binary'")
    return np.array([names.index(word) for word in words], dtype=np.int64), names


def _with_targets(table: RawTable, targets: Sequence[str]) -> RawTable:
    """The rows whose targets are all there."""
    columns = [table.column(name) for name in targets]
    return table.take([i for i in range(len(table)) if all(column[i] is not None for column in columns)])


def _split(y: Array, fraction: object, path: Path) -> tuple[Array, Array]:
    if not isinstance(fraction, int | float):
        raise ConfigError(f"{path}: test_fraction is {fraction!r}, expected a number between 0 and 1; try 0.2")
    labels = y if y.dtype.kind == "i" else np.zeros(len(y), dtype=np.int64)
    return stratified_split(labels, float(fraction))


def _targets(options: Mapping[str, object], path: Path) -> list[str]:
    found = _words(options, "target", path)
    if not found:
        raise ConfigError(f'{path}: say which column is to be predicted: target = "…" under [data] options')
    return found


def _words(options: Mapping[str, object], key: str, path: Path) -> list[str]:
    given = options.get(key, [])
    words = [given] if isinstance(given, str) else given
    if not isinstance(words, list | tuple) or not all(isinstance(w, str) for w in words):
        raise ConfigError(f"{path}: {key} is {given!r}, expected a column's name or a list of them")
    return list(words)


HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
_HEART = (
    *("age", "sex", "cp", "trestbps", "chol", "fbs", "restecg", "thalach", "exang", "oldpeak"),
    *("slope", "ca", "thal", "num"),
)
_DROPPED = ("slope", "ca", "thal")  # missing in most rows outside Cleveland
_TEST_SHARE, _SEED = 0.34, 10


def hospital_table(store: Store, hospital: str) -> RawTable:
    """One hospital's usable rows: without the columns that most hospitals lack, and without incomplete rows."""
    name = f"processed.{hospital}.data"
    lines = [line.split(",") for line in store.read(name).decode("ascii").splitlines() if line.strip()]
    table = table_of_lines(f"{store.location / name}", _HEART, lines).without(_DROPPED)
    return table.take(table.complete_rows())


def hospital_halves(store: Store, hospitals: Sequence[str]) -> dict[str, tuple[RawTable, RawTable]]:
    """Each hospital's rows to train on and to judge on: 34 % of them, rounded up, drawn with a fixed seed."""
    halves = {}
    for hospital in hospitals:
        table = hospital_table(store, hospital)
        order = np.random.default_rng(_SEED).permutation(len(table)).tolist()
        cut = math.ceil(_TEST_SHARE * len(table))
        halves[hospital] = table.take(sorted(order[cut:])), table.take(sorted(order[:cut]))
    return halves


def heart_halves(store: Store, hospitals: Sequence[str]) -> TableHalves:
    """The heart disease data, 66 % of each hospital's rows for training, drawn with a fixed seed.

    Numbers are scaled by the moments of all training rows; the kind of chest pain and the resting electrocardiogram
    are categories. The target is whether any vessel is narrowed by half or more.
    """
    kept = hospital_halves(store, hospitals)
    names = [name for name in _HEART if name not in (*_DROPPED, "num")]
    kinds: dict[str, Kind] = {name: "categorical" if name in ("cp", "restecg") else "numeric" for name in names}
    first, *rest = (TableMoments.of(train, names, kinds) for train, _ in kept.values())
    form = sum(rest, first).form()
    train = [_rows(own, form, _ill(own), (hospital,) * len(own)) for hospital, (own, _) in kept.items()]
    test = [_rows(own, form, _ill(own)) for _, own in kept.values()]
    return TableHalves(_join(train), _join(test), ("healthy", "ill"))


def _ill(table: RawTable) -> Array:
    return (table.numbers("num") > 0).astype(np.int64)


def _join(splits: Sequence[TableSplit]) -> TableSplit:
    owners = tuple(owner for split in splits for owner in split.owners)
    x, y = np.concatenate([s.x for s in splits]), np.concatenate([s.y for s in splits])
    return TableSplit(x, y, splits[0].features, owners)


FEW = 5  # rows of which a mean says nothing, and a word points at persons
MOST_CATEGORIES = 50  # that cells alone may tell


@dataclass(frozen=True, slots=True)
class TableChoice:
    """What a user says of a table where nothing is agreed on: the targets, and the columns if not all others."""

    targets: tuple[str, ...] = ()
    columns: tuple[NumericColumn | CategoricalColumn, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class TableRows:
    """A table's rows in a form.

    Attributes:
        rows: inputs and targets.
        class_names: of classes, labels or numbers.
        form: what inputs and targets were brought to.
        names: the number of each row in its file, counted from 1.
        remarks: what a reader should know.
        labelled: whether the table tells targets.
    """

    rows: Rows
    class_names: tuple[str, ...]
    form: TableForm
    names: tuple[str, ...]
    remarks: tuple[str, ...] = ()
    labelled: bool = True

    def take(self, index: Sequence[int]) -> TableRows:
        """The rows at these positions."""
        names = tuple(self.names[i] for i in index)
        return TableRows(self.rows.take(index), self.class_names, self.form, names, self.remarks, self.labelled)


def read_table_rows(
    location: Path,
    *,
    form: TableForm | None = None,
    classes: Sequence[str] = (),
    task: Task = CLASSIFICATION,
    choice: TableChoice | None = None,
    labelled: bool = True,
) -> TableRows:
    """A CSV or Parquet file's rows in a form, or in the one they have by themselves.

    Args:
        location: the file.
        form: columns, targets and scale that were agreed on.
        classes: the names of the classes, where targets are such.
        task: what the targets are.
        choice: targets and columns where no form was agreed on.
        labelled: whether targets are needed; where not, they are not looked at.

    Raises:
        ConfigError: naming file, column and row of what does not fit.
    """
    table, agreed = read_table(location).with_units(), form is not None
    form = form or form_of_table(table, choice or TableChoice(), task)
    if form.scale == "awaited":
        raise ConfigError(
            f"{location}: the federation's columns have no common scale yet; let every site send `fedfuse moments`, "
            "add them with `fedfuse scale`, and send the folder anew"
        )
    x, remarks = encode_table(form, table), [*_unread(table, form), *_far_columns(table, form)]
    if not agreed:
        remarks.append(
            f"no scale was agreed on, so columns are scaled by the rows of {location} themselves; let all sites make "
            "one federation folder (`fedfuse init`) or give their sums (--moments)"
        )
    numbered = tuple(str(row) for row in range(1, len(table) + 1))
    if not labelled:
        return TableRows(
            Rows(x, torch.zeros(len(x), dtype=torch.int64)), tuple(classes), form, numbered, tuple(remarks), False
        )
    there = rows_with(table, form.target_names)
    if len(there) < len(table):
        remarks.append(f"{len(table) - len(there)} rows of {location} without a target were left out")
    y, names = _site_targets(table, there, form, task, classes)
    rows = Rows(x[torch.tensor(there, dtype=torch.int64)], torch.from_numpy(y))
    return TableRows(rows, names, form, tuple(numbered[i] for i in there), tuple(remarks))


def other_columns(table: RawTable, targets: Sequence[str]) -> list[str]:
    """The columns beside the targets, where nobody chose any.

    Raises:
        ConfigError: if the words of one of them would tell single rows.
    """
    names = [name for name in table.columns if name not in targets]
    for name in names:
        if not table.is_numeric(name):
            _check_categories(table, name)
    return names


def _check_categories(table: RawTable, name: str) -> None:
    """Refuse a column of words as categories, which all sites will see, unless each stands for several rows."""
    where, cells = f"{table.where}: column {name!r}", table.column(name)
    remedy = f"name its categories (--columns '{name}:…|…'), or the columns to learn from without it (--columns)"
    words = [cell for cell in cells if cell is not None and not is_number(cell)]
    present = sum(cell is not None for cell in cells)
    if 2 * len(words) <= present:
        odd = cells.index(words[0])
        raise ConfigError(
            f"{where} holds {words[0]!r} in row {table.row_number(odd)} among numbers, of which each would become a "
            f"category that all sites see; correct it or leave the cell empty, or {remedy}"
        )
    if present >= FEW and len(set(words)) == len(cells):
        raise ConfigError(f"{where} has another word in every row and would name them to all sites; {remedy}")
    check_common(where, Counter(level_name(cell) for cell in cells if cell is not None), remedy)


def check_common(where: str, counts: Mapping[str, int], remedy: str) -> None:
    """Refuse words that a site's cells alone tell if they are too many, or one is that of a few rows.

    Raises:
        ConfigError: naming the rarest of them.
    """
    found = {word: count for word, count in counts.items() if count}
    if len(found) > MOST_CATEGORIES:
        raise ConfigError(
            f"{where} has {len(found)} different words and all sites would see them, expected at most "
            f"{MOST_CATEGORIES}; {remedy}"
        )
    for word, count in found.items():
        if count < FEW:
            raise ConfigError(
                f"{where} has {word!r} in {count} row{'' if count == 1 else 's'} and all sites would see it, expected "
                f"words of at least {FEW} rows; {remedy}"
            )


def form_of_table(table: RawTable, choice: TableChoice, task: Task) -> TableForm:
    """The form a table has by itself, scaled by its own moments."""
    if not choice.targets:
        raise ConfigError(f"{table.where}: say which column is to be predicted: --target …")
    for name in choice.targets:
        table.column(name)
    names = [c.name for c in choice.columns] or other_columns(table, choice.targets)
    numbers = choice.targets if isinstance(task, Regression) else ()
    moments = TableMoments.of(table, [*names, *numbers], kinds_of(table, choice.columns, numbers))
    check_present(table, moments, min(FEW, len(table)))
    targets = tuple(TargetColumn(name=name, unit=table.units.get(name, "")) for name in choice.targets)
    if choice.columns:
        form = moments.rescale(TableForm(columns=choice.columns, targets=targets))
    else:
        found = TableMoments({name: moments.columns[name] for name in names}).form(targets)
        form = moments.rescale(found) if numbers else found
    return form.model_copy(update={"scale": "site"})


def kinds_of(
    table: RawTable, columns: Sequence[NumericColumn | CategoricalColumn], numbers: Sequence[str]
) -> dict[str, Kind]:
    """The kinds that were decided, of columns and of targets that are numbers, if the table's cells are of these kinds.

    Raises:
        ConfigError: naming an unknown category, or a column in another unit.
    """
    for column in columns:
        if isinstance(column, CategoricalColumn):
            table.words(column.name, column.levels)
        else:
            table.check_unit(column.name, column.unit)
    return {**{column.name: column.kind for column in columns}, **dict.fromkeys(numbers, "numeric")}


def check_present(table: RawTable, moments: TableMoments, least: int) -> None:
    """Refuse sums of a few numbers, which are nearly those numbers themselves.

    Raises:
        ConfigError: naming the column.
    """
    for name, column in moments.columns.items():
        if column.kind == "numeric" and 0 < column.count < least:
            raise ConfigError(
                f"{table.where}: column {name!r} has a number in {column.count} of {len(table)} rows, expected at "
                f"least {least} or none: sums of so few tell the numbers themselves; leave its cells empty here"
            )


def rows_with(table: RawTable, names: Sequence[str]) -> list[int]:
    """The positions of rows in which these columns are all there."""
    columns = [table.column(name) for name in names]
    return [row for row in range(len(table)) if all(column[row] is not None for column in columns)]


def _site_targets(
    table: RawTable, there: Sequence[int], form: TableForm, task: Task, classes: Sequence[str]
) -> tuple[Array, tuple[str, ...]]:
    """Targets as the task has them, numbers in the common scale; what cannot be is told with its row."""
    names, known = form.target_names, list(classes) if isinstance(task, Classification | Binary) else []
    for target in form.targets:
        table.check_unit(target.name, target.unit)
        if known:
            table.words(target.name, known)
        if isinstance(task, Multilabel):
            _check_switch(table, target.name)
    y, found = encode_targets(table.take(there), names, task, known)
    if isinstance(task, Regression):
        mean, std = (np.array([getattr(t, key) for t in form.targets]) for key in ("mean", "std"))
        y = ((y.reshape(len(y), -1) - mean) / std).astype(np.float32).reshape(y.shape)
    return y, found


def _check_switch(table: RawTable, name: str) -> None:
    values = table.numbers(name)
    for row, value in enumerate(values.tolist()):
        if value == value and value not in (0.0, 1.0):
            raise ConfigError(
                f"{table.where}: label {name!r} is {value:g} in row {table.row_number(row)}, expected 0 or 1; "
                "correct it"
            )


def _unread(table: RawTable, form: TableForm) -> list[str]:
    known = {column.name for column in (*form.columns, *form.targets)}
    extra = [name for name in table.columns if name not in known]
    return [f"{table.where} has columns that are not read: {', '.join(extra)}"] if extra else []


def _far_columns(table: RawTable, form: TableForm) -> list[str]:
    """Columns whose numbers lie far from the common scale, as those of another unit do."""
    said = []
    for column in form.columns:
        if not isinstance(column, NumericColumn) or form.scale == "none":
            continue
        values = table.numbers(column.name)
        values = values[~np.isnan(values)]
        if len(values) < FEW:
            continue
        if looks_like_another_unit(float(values.mean()), float(values.std()), column.mean, column.std):
            unit = f" {column.unit}" if column.unit else ""
            said.append(
                f"{table.where}: column {column.name!r} has mean {values.mean():g} here and {column.mean:g}{unit} "
                f"(± {column.std:g}) in common; look whether it is in another unit"
            )
    return said

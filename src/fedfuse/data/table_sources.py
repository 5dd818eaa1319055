"""Rows of tables: as an experiment's source (`open_table`), as a site's own (`read_table_rows`), and the heart data.

All end in a form (`tables.encode_table`) and in targets (`encode_targets`). An experiment draws its form from the
moments of all training rows; a site has the form that was agreed on, and only where there is none that of its own rows.
What a site would tell others by the words of its cells is checked here: `check_common`, `check_present`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from fedfuse.core.inputs import CategoricalColumn, NumericColumn, TableForm, TargetColumn
from fedfuse.data.rows import Array, ArraySplit, Halves, Rows, SiteRows, concatenate, stratified_split
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
FEW = 5  # rows of which a mean says nothing, and a word points at persons
MOST_CATEGORIES = 50  # that cells alone may tell
HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")


def open_table(path: Path, options: Mapping[str, object], task: Task) -> Halves:
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
    targets, names = _words(options, "target", path), _words(options, "columns", path)
    if not targets:
        raise ConfigError(f'{path}: say which column is to be predicted: target = "…" under [data] options')
    owner = options.get("client") if isinstance(options.get("client"), str) else None
    table = table.without(_words(options, "drop", path))
    if options.get("missing", "impute") == "drop":
        table = table.take(table.complete_rows())
    table = table.take(rows_with(table, targets))
    names = names or [name for name in table.columns if name not in (*targets, owner)]
    y, classes = encode_targets(table, targets, task)
    fraction = options.get("test_fraction", 0.2)
    if not isinstance(fraction, int | float):
        raise ConfigError(f"{path}: test_fraction is {fraction!r}, expected a number between 0 and 1; try 0.2")
    strata = y if y.dtype.kind == "i" else np.zeros(len(y), dtype=np.int64)
    train, test = stratified_split(strata, float(fraction))
    own, rest = table.take(train.tolist()), table.take(test.tolist())
    kinds: dict[str, Kind] = dict.fromkeys(_words(options, "categorical", path), "categorical")
    form = TableMoments.of(own, names, kinds).form([TargetColumn(name=name) for name in targets])
    owners = tuple(word or "unknown" for word in own.words(str(owner))) if owner is not None else ()
    return Halves(_split(own, form, y[train], owners), _split(rest, form, y[test]), classes, form)


def _words(options: Mapping[str, object], key: str, path: Path) -> list[str]:
    given = options.get(key, [])
    words = [given] if isinstance(given, str) else given
    if not isinstance(words, list | tuple) or not all(isinstance(w, str) for w in words):
        raise ConfigError(f"{path}: {key} is {given!r}, expected a column's name or a list of them")
    return list(words)


def _split(table: RawTable, form: TableForm, y: Array, owners: tuple[str, ...] = ()) -> ArraySplit:
    return ArraySplit(encode_table(form, table).numpy(), y, owners, form.features)


def rows_with(table: RawTable, names: Sequence[str]) -> list[int]:
    """The positions of rows in which these columns are all there."""
    columns = [table.column(name) for name in names]
    return [row for row in range(len(table)) if all(column[row] is not None for column in columns)]


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


@dataclass(frozen=True, slots=True)
class TableChoice:
    """What a user says of a table where nothing is agreed on: the targets, and the columns if not all others."""

    targets: tuple[str, ...] = ()
    columns: tuple[NumericColumn | CategoricalColumn, ...] = ()


def read_table_rows(
    location: Path,
    *,
    form: TableForm | None = None,
    classes: Sequence[str] = (),
    task: Task = CLASSIFICATION,
    choice: TableChoice | None = None,
    labelled: bool = True,
) -> SiteRows:
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
    table, remarks = read_table(location).with_units(), []
    if form is None:
        form = form_of_table(table, choice or TableChoice(), task)
        remarks.append(
            f"no scale was agreed on, so columns are scaled by the rows of {location} themselves; let all sites make "
            "one federation folder (`fedfuse init`) or give their sums (--moments)"
        )
    if form.scale == "awaited":
        raise ConfigError(
            f"{location}: the federation's columns have no common scale yet; let every site send `fedfuse moments`, "
            "add them with `fedfuse scale`, and send the folder anew"
        )
    x, remarks = encode_table(form, table), [*_doubts(table, form), *remarks]
    numbered = tuple(str(row) for row in range(1, len(table) + 1))
    if not labelled:
        rows = Rows(x, torch.zeros(len(x), dtype=torch.int64))
        return SiteRows(
            str(location), rows, tuple(classes), form, numbered, labelled=False, task=task, remarks=tuple(remarks)
        )
    there = rows_with(table, form.target_names)
    if len(there) < len(table):
        remarks.append(f"{len(table) - len(there)} rows of {location} without a target were left out")
    y, names = _scaled_targets(table, there, form, task, classes)
    rows = Rows(x[torch.tensor(there, dtype=torch.int64)], torch.from_numpy(y))
    numbers = tuple(numbered[i] for i in there)
    return SiteRows(str(location), rows, names, form, numbers, task=task, remarks=tuple(remarks))


def _doubts(table: RawTable, form: TableForm) -> list[str]:
    """Columns that are not read, and those whose numbers lie as far from the common scale as another unit's do."""
    known = {column.name for column in (*form.columns, *form.targets)}
    extra = [name for name in table.columns if name not in known]
    doubts = [f"{table.where} has columns that are not read: {', '.join(extra)}"] if extra else []
    for column in form.columns:
        if not isinstance(column, NumericColumn) or form.scale == "none":
            continue
        values = table.numbers(column.name)
        values = values[~np.isnan(values)]
        if len(values) < FEW:
            continue
        if looks_like_another_unit(float(values.mean()), float(values.std()), column.mean, column.std):
            unit = f" {column.unit}" if column.unit else ""
            doubts.append(
                f"{table.where}: column {column.name!r} has mean {values.mean():g} here and {column.mean:g}{unit} "
                f"(± {column.std:g}) in common; look whether it is in another unit"
            )
    return doubts


def _scaled_targets(
    table: RawTable, there: Sequence[int], form: TableForm, task: Task, classes: Sequence[str]
) -> tuple[Array, tuple[str, ...]]:
    """Targets as the task has them, numbers in the common scale; a cell that cannot be is named with its row."""
    known = list(classes) if isinstance(task, Classification | Binary) else []
    for target in form.targets:
        table.check_unit(target.name, target.unit)
        if known:
            table.words(target.name, known)
        for row, value in enumerate(table.numbers(target.name).tolist() if isinstance(task, Multilabel) else ()):
            if not math.isnan(value) and value not in (0.0, 1.0):
                raise ConfigError(
                    f"{table.where}: label {target.name!r} is {value:g} in row {table.row_number(row)}, expected 0 or "
                    "1; correct it"
                )
    y, names = encode_targets(table.take(there), form.target_names, task, known)
    if isinstance(task, Regression):
        mean, std = (np.array([getattr(t, key) for t in form.targets]) for key in ("mean", "std"))
        y = ((y.reshape(len(y), -1) - mean) / std).astype(np.float32).reshape(y.shape)
    return y, names


def form_of_table(table: RawTable, choice: TableChoice, task: Task) -> TableForm:
    """The form a table has by itself, scaled by its own moments."""
    if not choice.targets:
        raise ConfigError(f"{table.where}: say which column is to be predicted: --target …")
    for name in choice.targets:
        table.column(name)
    moments = moments_of_choice(table, choice, task, min(FEW, len(table)))
    targets = tuple(TargetColumn(name=name, unit=table.units.get(name, "")) for name in choice.targets)
    if choice.columns:
        form = moments.rescale(TableForm(columns=choice.columns, targets=targets))
    else:
        form = moments.form_for(targets)
    return form.model_copy(update={"scale": "site"})


def moments_of_choice(table: RawTable, choice: TableChoice, task: Task, least: int) -> TableMoments:
    """The moments of the chosen columns, or of all but the targets, and of targets that are numbers.

    Raises:
        ConfigError: if a column does not fit the choice, or its moments would tell the cells of a few rows.
    """
    names = [column.name for column in choice.columns] or other_columns(table, choice.targets)
    numbers = choice.targets if isinstance(task, Regression) else ()
    moments = TableMoments.of(table, [*names, *numbers], kinds_of(table, choice.columns, numbers))
    check_present(table, moments, least)
    return moments


def other_columns(table: RawTable, targets: Sequence[str]) -> list[str]:
    """All columns but the targets, where none were chosen.

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


_HEART = (
    *("age", "sex", "cp", "trestbps", "chol", "fbs", "restecg", "thalach", "exang", "oldpeak"),
    *("slope", "ca", "thal", "num"),
)
_DROPPED = ("slope", "ca", "thal")  # missing in most rows outside Cleveland


def hospital_halves(store: Store, hospitals: Sequence[str]) -> dict[str, tuple[RawTable, RawTable]]:
    """Each hospital's rows to train on and to judge on: 34 % of them, rounded up, drawn with a fixed seed.

    Columns that most hospitals lack and incomplete rows are left out.
    """
    halves = {}
    for hospital in hospitals:
        name = f"processed.{hospital}.data"
        lines = [line.split(",") for line in store.read(name).decode("ascii").splitlines() if line.strip()]
        table = table_of_lines(f"{store.location / name}", _HEART, lines).without(_DROPPED)
        table = table.take(table.complete_rows())
        order = np.random.default_rng(10).permutation(len(table)).tolist()
        cut = math.ceil(0.34 * len(table))
        halves[hospital] = table.take(sorted(order[cut:])), table.take(sorted(order[:cut]))
    return halves


def heart_halves(store: Store, hospitals: Sequence[str]) -> Halves:
    """The heart disease data, 66 % of each hospital's rows for training, drawn with a fixed seed.

    Numbers are scaled by the moments of all training rows; the kind of chest pain and the resting electrocardiogram
    are categories. The target is whether any vessel is narrowed by half or more.
    """
    kept = hospital_halves(store, hospitals)
    names = [name for name in _HEART if name not in (*_DROPPED, "num")]
    kinds: dict[str, Kind] = {name: "categorical" if name in ("cp", "restecg") else "numeric" for name in names}
    first, *rest = (TableMoments.of(train, names, kinds) for train, _ in kept.values())
    form = sum(rest, first).form()
    train = [_split(own, form, _ill(own), (hospital,) * len(own)) for hospital, (own, _) in kept.items()]
    test = [_split(own, form, _ill(own)) for _, own in kept.values()]
    return Halves(concatenate(train), concatenate(test), ("healthy", "ill"))


def _ill(table: RawTable) -> Array:
    return (table.numbers("num") > 0).astype(np.int64)

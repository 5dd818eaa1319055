"""Tables as sources of rows: a CSV or Parquet file with a target column, and the four hospitals of heart disease."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from fedfuse.core.columns import TableForm, TargetColumn
from fedfuse.data.rows import Array, Rows, stratified_split
from fedfuse.data.stores import Store
from fedfuse.data.table_form import Kind, TableMoments, encode_table
from fedfuse.data.tables import RawTable, read_table, table_of_lines
from fedfuse.errors import ConfigError
from fedfuse.tasks import Binary, Classification, Multilabel, Task

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

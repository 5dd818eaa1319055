"""The rows of one place, brought to the form that a federation agreed on, their classes told by name.

A source that has halves of its own (`train/` and `test/`, x_train and x_test, a public set) gives the half asked
for; any other gives all its rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedfuse.core.inputs import ArrayForm, PictureForm, RowForm, TableForm, TextForm
from fedfuse.core.messages import client_order
from fedfuse.core.metadata import check_class_names, distinct_names, names_text
from fedfuse.core.rows import is_channels_last
from fedfuse.core.settings import validate_settings
from fedfuse.data import formats, images, sources
from fedfuse.data.images import ImageSplit
from fedfuse.data.official import OFFICIAL
from fedfuse.data.rows import Array, Rows, stratified_split
from fedfuse.data.table_sources import TableChoice, read_table_rows
from fedfuse.data.tables import SUFFIXES
from fedfuse.data.texts import read_text_rows, reads_texts
from fedfuse.data.transforms import Grayscale, Standardize
from fedfuse.errors import ConfigError, suggest
from fedfuse.tasks import CLASSIFICATION, Binary, Classification, Multilabel, Regression, Task

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
        """What is told of rows without classes: the names of numbers, or of texts their form."""
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


@dataclass(frozen=True, slots=True, eq=False)
class _Found:
    """A source opened: labels in its own order of classes, inputs not yet in any form."""

    inputs: ImageSplit | Tensor
    y: Tensor
    class_names: tuple[str, ...]
    half: str = ""
    labelled: bool = True
    empty: Sequence[int] = ()  # classes that no row has, where labels alone decide how many there are


def read_site(
    source: str,
    *,
    half: Half = "train",
    form: RowForm | None = None,
    classes: Sequence[str] | None = None,
    limit: int | None = None,
    image_size: int | None = None,
    skip_broken: bool = False,
    labelled: bool = True,
    keep_order: bool = False,
    task: Task = CLASSIFICATION,
    table: TableChoice | None = None,
) -> SiteRows:
    """The rows of a source in one form, labelled by the names of classes.

    Args:
        source: a folder of class folders, an `.npz`, `.csv` or `.parquet`, a public set or package.module:function; of
            texts a `.jsonl`, a `.txt` or a folder of such files.
        half: which half to take of a source that has two.
        form: what to bring inputs to; by default what they all have.
        classes: all classes, in order; a source may lack some and have no other. By default those it has, by name.
        limit: at most this many rows, drawn at random, always the same.
        image_size: width and height to resize pictures to, where no form says it.
        skip_broken: leave out pictures that cannot be read.
        labelled: whether classes are needed; where not, pictures may lie in one folder and unknown classes do not
            matter.
        keep_order: number classes as the source does, where nobody names them, and not in the order of their names.
        task: what the labels are.
        table: the targets and columns of a table, where no form says them.

    Raises:
        ConfigError: if there are classes that should not be, rows that cannot be brought to the form, or broken ones.
    """
    if reads_texts(task):
        return _read_texts(source, form, classes or (), limit, labelled, task, half)
    if _is_table(source):
        return _read_table(source, form, classes or (), limit, labelled, task, table)
    form = _without_columns(source, form)
    found = _open(source, half, classes or (), limit, labelled, task)
    names = _class_names(found, classes, keep_order)
    y = _relabel(source, found, names) if labelled and found.labelled else torch.zeros_like(found.y)
    if limit is not None and limit < len(y):
        found, y = _take_limit(found, y, limit)
    if isinstance(found.inputs, ImageSplit):
        split = replace(found.inputs, y=y.numpy())
        form = form or _form_of_pictures(split, image_size)
        form = _as_pictures(source, form)
        made = images.decode_pictures(split, form, skip_broken)
        rows, called, broken = made.rows, made.names, made.broken
    else:
        form = form or ArrayForm(shape=tuple(found.inputs.shape[1:]))
        rows = Rows(_match_arrays(source, found.inputs, form), y)
        called, broken = tuple(map(str, range(len(y)))), {}
    if not len(rows):
        raise ConfigError(f"{source} has no rows; add some")
    if form.is_normalized:
        rows = Rows(Standardize(form.mean, form.std)(rows.x), rows.y)
    told = _tell_empty(source, found) if classes is None and labelled else ()
    return SiteRows(source, rows, names, form, called, broken, found.half, found.labelled, task, told)


def _tell_empty(source: str, found: _Found) -> tuple[str, ...]:
    """What labels that leave out classes were taken for; a site may hold none of a class, so they are not refused."""
    if not found.empty:
        return ()
    return (
        f"{source}: {formats.empty_classes_text(found.empty, len(found.class_names))}; if labels should not leave any "
        "out, number the classes 0, 1, 2, …, else name all of them (--classes, or an array `classes`)",
    )


def _without_columns(source: str, form: RowForm | None) -> PictureForm | ArrayForm | None:
    """The form, if it is one of pictures or arrays."""
    if isinstance(form, TableForm | TextForm):
        more = "give a .csv or .parquet file" if isinstance(form, TableForm) else "say which task reads texts"
        raise ConfigError(f"{source} is no {form.kind.removesuffix('s')}, and {form} is expected here; {more}")
    return form


def _read_texts(
    source: str, form: RowForm | None, classes: Sequence[str], limit: int | None, labelled: bool, task: Task, half: Half
) -> SiteRows:
    if form is not None and not isinstance(form, TextForm):
        raise ConfigError(f"{task.name} reads texts, and rows of {form} are expected here; use a model made of texts")
    if source in sources.source_names() or sources.FUNCTION.fullmatch(source):
        raise ConfigError(
            f"{source} is no file of a site's texts; give a .jsonl file, a .txt file or a folder of .txt files"
        )
    location = sources.local_path(source)
    found = read_text_rows(location, form=form, classes=classes, task=task, half=half, labelled=labelled)
    if limit is not None and limit < len(found.names):
        found = found.take(_limit_index(len(found.names), limit).tolist())
    return SiteRows(
        source,
        found.rows,
        found.class_names,
        found.form,
        found.names,
        half=found.half,
        labelled=found.labelled,
        task=task,
        remarks=found.remarks,
    )


def _is_table(source: str) -> bool:
    return Path(source).suffix in SUFFIXES and not sources.FUNCTION.fullmatch(source)


def _read_table(
    source: str,
    form: RowForm | None,
    classes: Sequence[str],
    limit: int | None,
    labelled: bool,
    task: Task,
    choice: TableChoice | None,
) -> SiteRows:
    if form is not None and not isinstance(form, TableForm):
        raise ConfigError(
            f"{source} is a table, and rows of {form} are expected here; use a model whose file tells its columns, or "
            "name them with --target and --columns"
        )
    location = sources.local_path(source)
    found = read_table_rows(location, form=form, classes=classes, task=task, choice=choice, labelled=labelled)
    if limit is not None and limit < len(found.names):
        found = found.take(_limit_index(len(found.names), limit).tolist())
    if not len(found.rows):
        raise ConfigError(f"{source} has no rows with a target; add some")
    return SiteRows(
        source,
        found.rows,
        found.class_names,
        found.form,
        found.names,
        labelled=found.labelled,
        task=task,
        remarks=found.remarks,
    )


def _class_names(found: _Found, classes: Sequence[str] | None, keep_order: bool) -> tuple[str, ...]:
    own = found.class_names if keep_order else tuple(sorted(found.class_names, key=client_order))
    names = own if classes is None else tuple(classes)
    check_class_names(names)
    return names


def _open(
    source: str, half: Half, classes: Sequence[str], limit: int | None, labelled: bool, task: Task = CLASSIFICATION
) -> _Found:
    if source in sources.source_names() or sources.FUNCTION.fullmatch(source):
        return _open_dataset(source, half, limit, task)
    location = sources.local_path(source)
    if location.suffix == ".npz":
        return _open_arrays(source, location, half, task)
    if not isinstance(task, Classification | Binary):
        raise ConfigError(f"{source} is a folder of classes, and the task is {task.name}; give arrays or a table")
    if not labelled and (loose := images.loose_pictures(location)) is not None:
        return _Found(loose, torch.from_numpy(loose.y), (), labelled=False)
    own = images.half_folder(location, half)
    split, names = images.class_folders(location if own is None else location / own, may_be_empty=classes)
    return _Found(split, torch.from_numpy(split.y.astype(np.int64)), names, own or "")


def _open_dataset(source: str, half: Half, limit: int | None, task: Task) -> _Found:
    """A half of a public set or of what a function returns; the other half is not read where that can be helped."""
    other = {"test_limit" if half == "train" else "train_limit": 1} if source in OFFICIAL else {}
    dataset = sources.load(source, **{f"{half}_limit": limit}, **other, task=task)  # type: ignore[arg-type]
    rows = dataset.train if half == "train" else dataset.test
    empty: Any = dataset.facts.get(sources.EMPTY, ())
    return _Found(rows.x, rows.y, distinct_names(dataset.classes), half, empty=empty)


def _open_arrays(source: str, location: Path, half: Half, task: Task) -> _Found:
    arrays = formats.read_npz(location)
    if "x" in arrays:
        split, part, told = formats.split_from_arrays(arrays, "x", "y", location, task), "", "y" in arrays
    else:
        if f"x_{half}" not in arrays:
            raise ConfigError(f"{location} holds no x and no x_{half}, expected x and y, or x_{half} and y_{half}")
        split, part = formats.split_from_arrays(arrays, f"x_{half}", f"y_{half}", location, task), half
        told = f"y_{half}" in arrays
    rows = split.rows()
    most = _count_names(rows, task)
    named = formats.named_classes(arrays, location)
    names = tuple(map(str, range(most))) if named is None else named
    if most > len(names):
        raise ConfigError(f"{source}: a label is {most - 1} and there are {len(names)} names of classes; name them all")
    counted = told and named is None and isinstance(task, Classification)
    return _Found(rows.x, rows.y, names, part, told, formats.empty_classes(split.y) if counted else ())


def _count_names(rows: Rows, task: Task) -> int:
    """How many classes, labels or numbers the targets have names for."""
    if isinstance(task, Binary):
        return 2
    if not isinstance(task, Classification):
        return rows.y.shape[1] if rows.y.ndim == 2 else 1
    return 1 + int(rows.y.max()) if len(rows) else 0


def _relabel(source: str, found: _Found, names: tuple[str, ...]) -> Tensor:
    """Labels that count in the order of these names; columns of numbers and switches stand as they are."""
    own = found.class_names
    if found.y.is_floating_point():
        if len(own) != len(names):
            raise ConfigError(f"{source} has {len(own)} targets, expected {len(names)}: {names_text(names)}")
        return found.y
    present = [own[label] for label in found.y.unique().tolist()]
    unknown = [name for name in own if name not in names and (name in present or isinstance(found.inputs, ImageSplit))]
    if unknown:
        raise ConfigError(
            f"{source} has the class{'' if len(unknown) == 1 else 'es'} {', '.join(map(repr, unknown[:12]))}, "
            f"expected none but {names_text(names)}{suggest(unknown[0], names)} "
            + (
                "name them in an array `classes`"
                if all(n.isdecimal() for n in own)
                else "rename or remove what should not be there"
            )
        )
    where = torch.tensor([names.index(name) if name in names else -1 for name in own], dtype=torch.int64)
    return where[found.y] if len(found.y) else found.y


def _limit_index(count: int, limit: int) -> Array:
    return np.sort(np.random.default_rng(0).permutation(count)[:limit])


def _take_limit(found: _Found, y: Tensor, limit: int) -> tuple[_Found, Tensor]:
    """So many rows, drawn as `load` draws them."""
    chosen = _limit_index(len(y), limit)
    inputs = found.inputs.take(chosen) if isinstance(found.inputs, ImageSplit) else found.inputs[chosen]
    return replace(found, inputs=inputs, y=found.y[chosen]), y[chosen]


def _form_of_pictures(split: ImageSplit, image_size: int | None) -> PictureForm:
    seen = images.survey(split)
    if image_size is not None:
        return PictureForm(height=image_size, width=image_size, channels=1 if seen.gray else 3)
    return seen.form


def _as_pictures(source: str, form: PictureForm | ArrayForm) -> PictureForm:
    """The form as one of pictures, if arrays of that shape can be pictures."""
    if isinstance(form, PictureForm):
        return form
    if len(form.shape) != 3 or form.shape[0] not in (1, 3):
        raise ConfigError(f"{source} holds pictures, and rows of {form} are expected here; give arrays")
    channels, height, width = form.shape
    values = {"height": height, "width": width, "channels": channels, "mean": form.mean, "std": form.std}
    return validate_settings(PictureForm, values)


def _match_arrays(source: str, x: Tensor, form: PictureForm | ArrayForm) -> Tensor:
    """Arrays in the form: pictures of the same size may be made grey or colour, the same numbers laid out anew."""
    shape = tuple(x.shape[1:])
    if isinstance(form, PictureForm) and len(shape) == 3 and shape[1:] == form.shape[1:] and shape[0] in (1, 3):
        if shape[0] > form.channels:
            return Grayscale(1.0)(x, torch.Generator())[:, :1]
        return x.expand(-1, form.channels, -1, -1).contiguous()
    if is_channels_last(form.shape) and (form.shape[2], *form.shape[:2]) == shape:
        return x.permute(0, 2, 3, 1).contiguous()
    if x[:1].numel() and x[0].numel() == torch.Size(form.shape).numel():
        return x.reshape(len(x), *form.shape)
    came = "×".join(map(str, shape))
    raise ConfigError(f"a row of {source} is {came}, expected {form}; bring the rows to that form first")

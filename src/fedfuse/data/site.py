"""The rows of one place, brought to the form that a federation agreed on, their classes found by name.

A source that has halves of its own (`train/` and `test/`, x_train and x_test, a public set) gives the half asked
for; any other gives all its rows. Tables and texts are read by `table_sources` and `texts`, pictures and arrays here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

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
from fedfuse.data.rows import Array, Half, Rows, SiteRows
from fedfuse.data.table_sources import TableChoice, read_table_rows
from fedfuse.data.tables import SUFFIXES
from fedfuse.data.texts import read_text_rows, reads_texts
from fedfuse.data.transforms import Grayscale, Standardize
from fedfuse.errors import ConfigError, suggest
from fedfuse.tasks import CLASSIFICATION, Binary, Classification, Task


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
        keep_order: without `classes`, number them as the source does and not in the order of their names.
        task: what the labels are.
        table: the targets and columns of a table, where no form says them.

    Raises:
        ConfigError: if there are classes that should not be, rows that cannot be brought to the form, or broken ones.
    """
    is_table = Path(source).suffix in SUFFIXES and not sources.FUNCTION.fullmatch(source)
    if reads_texts(task) or is_table:
        if reads_texts(task):
            whole = _read_texts(source, form, classes or (), labelled, task, half)
        else:
            whole = _read_table(source, form, classes or (), labelled, task, table)
        if limit is not None and limit < len(whole):
            whole = whole.take(_limit_index(len(whole), limit).tolist())
        return replace(whole, source=source)
    if isinstance(form, TableForm | TextForm):
        more = "give a .csv or .parquet file" if isinstance(form, TableForm) else "say which task reads texts"
        raise ConfigError(f"{source} is no {form.kind.removesuffix('s')}, and {form} is expected here; {more}")
    opened = _open(source, half, classes or (), limit, labelled, task)
    own = opened.class_names if keep_order else tuple(sorted(opened.class_names, key=client_order))
    names = own if classes is None else tuple(classes)
    check_class_names(names)
    inputs, y = opened.inputs, opened.y
    y = _relabel(source, opened, names) if labelled and opened.labelled else torch.zeros_like(y)
    if limit is not None and limit < len(y):  # before pictures are decoded
        chosen = _limit_index(len(y), limit)
        inputs, y = inputs.take(chosen) if isinstance(inputs, ImageSplit) else inputs[chosen], y[chosen]
    if isinstance(inputs, ImageSplit):
        split = replace(inputs, y=y.numpy())
        form = _form_of_pictures(split, image_size) if form is None else _as_pictures(source, form)
        made = images.decode_pictures(split, form, skip_broken)
        rows, called, broken = made.rows, made.names, made.broken
    else:
        form = form or ArrayForm(shape=tuple(inputs.shape[1:]))
        rows = Rows(_match_arrays(source, inputs, form), y)
        called, broken = tuple(map(str, range(len(y)))), {}
    if not len(rows):
        raise ConfigError(f"{source} has no rows; add some")
    if form.is_normalized:
        rows = Rows(Standardize(form.mean, form.std)(rows.x), rows.y)
    remarks: tuple[str, ...] = ()
    if opened.empty and classes is None and labelled:  # a site may hold no row of a class, so these are not refused
        remarks = (
            f"{source}: {formats.empty_classes_text(opened.empty, len(opened.class_names))}; if labels should not "
            "leave any out, number the classes 0, 1, 2, …, else name all of them (--classes, or an array `classes`)",
        )
    return SiteRows(source, rows, names, form, called, broken, opened.half, opened.labelled, task, remarks)


def _read_texts(
    source: str, form: RowForm | None, classes: Sequence[str], labelled: bool, task: Task, half: Half
) -> SiteRows:
    if form is not None and not isinstance(form, TextForm):
        raise ConfigError(f"{task.name} reads texts, and rows of {form} are expected here; use a model made of texts")
    if source in sources.source_names() or sources.FUNCTION.fullmatch(source):
        raise ConfigError(
            f"{source} is no file of a site's texts; give a .jsonl file, a .txt file or a folder of .txt files"
        )
    location = sources.local_path(source)
    return read_text_rows(location, form=form, classes=classes, task=task, half=half, labelled=labelled)


def _read_table(
    source: str,
    form: RowForm | None,
    classes: Sequence[str],
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
    if not len(found):
        raise ConfigError(f"{source} has no rows with a target; add some")
    return found


@dataclass(frozen=True, slots=True, eq=False)
class _Opened:
    """Pictures or arrays before they are in any form, their labels in the source's own order of classes."""

    inputs: ImageSplit | Tensor
    y: Tensor
    class_names: tuple[str, ...]
    half: str = ""
    labelled: bool = True
    empty: Sequence[int] = ()  # classes that no row has, where labels alone decide how many there are


def _open(
    source: str, half: Half, classes: Sequence[str], limit: int | None, labelled: bool, task: Task = CLASSIFICATION
) -> _Opened:
    if source in sources.source_names() or sources.FUNCTION.fullmatch(source):
        return _open_dataset(source, half, limit, task)
    location = sources.local_path(source)
    if location.suffix == ".npz":
        return _open_arrays(source, location, half, task)
    if not isinstance(task, Classification | Binary):
        raise ConfigError(f"{source} is a folder of classes, and the task is {task.name}; give arrays or a table")
    if not labelled and (loose := images.loose_pictures(location)) is not None:
        return _Opened(loose, torch.from_numpy(loose.y), (), labelled=False)
    own = images.half_folder(location, half)
    split, names = images.class_folders(location if own is None else location / own, may_be_empty=classes)
    return _Opened(split, torch.from_numpy(split.y.astype(np.int64)), names, own or "")


def _open_dataset(source: str, half: Half, limit: int | None, task: Task) -> _Opened:
    """A half of a public set or of what a function returns; the other half is not read where that can be avoided."""
    other = {"test_limit" if half == "train" else "train_limit": 1} if source in OFFICIAL else {}
    dataset = sources.load(source, **{f"{half}_limit": limit}, **other, task=task)  # type: ignore[arg-type]
    rows = dataset.train if half == "train" else dataset.test
    empty: Any = dataset.facts.get(sources.EMPTY, ())
    return _Opened(rows.x, rows.y, distinct_names(dataset.classes), half, empty=empty)


def _open_arrays(source: str, location: Path, half: Half, task: Task) -> _Opened:
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
    return _Opened(rows.x, rows.y, names, part, told, formats.empty_classes(split.y) if counted else ())


def _count_names(rows: Rows, task: Task) -> int:
    """How many classes, labels or numbers the targets have names for."""
    if isinstance(task, Binary):
        return 2
    if not isinstance(task, Classification):
        return rows.y.shape[1] if rows.y.ndim == 2 else 1
    return 1 + int(rows.y.max()) if len(rows) else 0


def _relabel(source: str, opened: _Opened, names: tuple[str, ...]) -> Tensor:
    """Labels that count in the order of these names; columns of numbers and switches stand as they are."""
    own = opened.class_names
    if opened.y.is_floating_point():
        if len(own) != len(names):
            raise ConfigError(f"{source} has {len(own)} targets, expected {len(names)}: {names_text(names)}")
        return opened.y
    present = [own[label] for label in opened.y.unique().tolist()]
    unknown = [name for name in own if name not in names and (name in present or isinstance(opened.inputs, ImageSplit))]
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
    return where[opened.y] if len(opened.y) else opened.y


def _limit_index(count: int, limit: int) -> Array:
    return np.sort(np.random.default_rng(0).permutation(count)[:limit])


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
    """Arrays in the form: pictures of the same size may be made grey or colour, the same numbers in another shape."""
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

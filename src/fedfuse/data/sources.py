"""Where data come from: a name, a folder, a file or a function; looked for on disk before the network.

Files of a public data set are looked for in `$FEDFUSE_DATA`, in the user's cache folder and in
`/usr/share/datasets`, and at last downloaded into the cache.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedfuse.core.files import cache_folder
from fedfuse.core.inputs import TableForm
from fedfuse.data import download, formats, images
from fedfuse.data.download import find_local, locate
from fedfuse.data.formats import NPZ_KEYS
from fedfuse.data.official import DIGITS, OFFICIAL, Official, Split
from fedfuse.data.rows import ArraySplit, Dataset, Rows, stratified_split
from fedfuse.data.table_sources import OPTIONS, open_table
from fedfuse.data.tables import SUFFIXES
from fedfuse.data.texts import OPTIONS as TEXT_OPTIONS
from fedfuse.data.texts import SUFFIXES as TEXTS
from fedfuse.data.texts import open_texts, reads_texts
from fedfuse.errors import ConfigError, DataMissing
from fedfuse.tasks import CLASSIFICATION, Binary, Classification, LanguageModel, Task

__all__ = [
    "Dataset",
    "Rows",
    "SourceLocation",
    "cache_folder",
    "find",
    "load",
    "load_arrays",
    "load_or_outline",
    "outline",
    "source_names",
]
FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
EMPTY = "classes_without_rows"
"""The fact that lists classes without rows, where classes have no names and labels decide how many there are."""
Options = Mapping[str, object]


def source_names() -> tuple[str, ...]:
    """The sources known by name.

    Example:
        >>> "digits" in source_names() and "mnist" in source_names()
        True
    """
    return ("digits", *OFFICIAL)


@dataclass(frozen=True, slots=True)
class SourceLocation:
    """Where the files of a source are.

    Attributes:
        source: what the user called it.
        location: the folder, archive, file, package or function.
        missing: files of the official set that are not there.
    """

    source: str
    location: str
    missing: tuple[str, ...] = ()


def find(source: str) -> SourceLocation | None:
    """Where the files of a source lie, or None when they would have to be downloaded.

    Only names are looked at, in folders and in archives: what is inside the files is checked by `load`.

    Example:
        >>> find("digits").location
        'scikit-learn'
    """
    if source == "digits":
        return SourceLocation(source, "scikit-learn")
    if source in OFFICIAL:
        located = locate(OFFICIAL[source])
        return SourceLocation(source, str(located.store.location), located.missing) if located else None
    return SourceLocation(source, source if FUNCTION.fullmatch(source) else str(local_path(source)))


def local_path(source: str) -> Path:
    """The folder or `.npz` file a user means, or an error that says what else may have been meant."""
    if (location := find_local(source)) is not None:
        return location
    close = difflib.get_close_matches(source.lower(), source_names(), n=1, cutoff=0.5)
    raise ConfigError(
        f"the data source {source!r} is unknown, expected {', '.join(source_names())}, a folder of class "
        "folders, an .npz, .csv, .parquet, .jsonl or .txt file, or package.module:function; "
        + (f"did you mean {close[0]!r}?" if close else "check the path.")
    )


def load(
    source: str,
    *,
    train_limit: int | None = None,
    test_limit: int | None = None,
    seed: int = 0,
    options: Options | None = None,
    task: Task = CLASSIFICATION,
) -> Dataset:
    """The data of a source, in memory.

    A limit takes a uniformly random subset of that many rows, the same one for the same `seed`, and not
    stratified: class counts vary as in any sample. A smaller limit takes part of what a larger one takes.
    A public set with files or rows missing is used only under a limit that it can serve.

    Args:
        source: `digits`, a public set, a folder of class folders, an `.npz`, or `package.module:function`.
        train_limit: at most this many training rows.
        test_limit: at most this many test rows.
        seed: which subset a limit takes; leave it alone so that runs with other seeds see the same rows.
        options: for a folder `image_size` and `test_fraction`; for a table `target` and those of `open_table`; for
            texts those of `open_texts`; for a function its keyword arguments.
        task: what is to be learned, and so what targets are: labels, or numbers.

    Example:
        >>> digits = load("digits", train_limit=100)
        >>> len(digits.train), digits.train.x.shape[1:]
        (100, torch.Size([1, 8, 8]))
    """
    for name, limit in (("train_limit", train_limit), ("test_limit", test_limit)):
        if limit is not None and limit < 1:
            raise ConfigError(f"{name} is {limit}, expected at least 1; leave it out to use every row")
    return _take_rows(_open(source, options or {}, task), train_limit, test_limit, seed, task)


def load_or_outline(
    source: str,
    *,
    train_limit: int | None = None,
    test_limit: int | None = None,
    options: Options | None = None,
    task: Task = CLASSIFICATION,
) -> Dataset:
    """The data of a source, or the outline of a public set that is not, or not all, on this machine; no download."""
    try:
        if source in OFFICIAL and find(source) is None:
            return outline(source, train_limit=train_limit, test_limit=test_limit, task=task)
        return load(source, train_limit=train_limit, test_limit=test_limit, options=options, task=task)
    except DataMissing:
        return outline(source, train_limit=train_limit, test_limit=test_limit, task=task)


def outline(
    source: str, *, train_limit: int | None = None, test_limit: int | None = None, task: Task = CLASSIFICATION
) -> Dataset:
    """A public set's form without its contents: as many rows, of the same shape, blank, with the labels in turn.

    It shows whether an experiment is sound where the set itself is not at hand, and trains nothing.

    Example:
        >>> form = outline("cifar100", train_limit=500)
        >>> form.train.x.shape, len(form.test), len(form.classes)
        (torch.Size([500, 3, 32, 32]), 10000, 100)
    """
    known = OFFICIAL[source]
    train, test = (
        _blank_rows(known, rows, task)
        for rows in (min(known.rows[0], train_limit or known.rows[0]), min(known.rows[1], test_limit or known.rows[1]))
    )
    names = tuple(map(str, range(known.labels)))
    facts = {"source": source, "outline": True}
    owners = tuple(f"owner-{row % known.owners}" for row in range(len(train))) if known.owners else ()
    tokens = names if reads_texts(task) else ()
    return Dataset(source, train, test, names, facts, task, owners=owners, vocabulary=tokens)


def _blank_rows(known: Official, rows: int, task: Task) -> Rows:
    x = torch.zeros((1,) * (1 + len(known.shape))).expand(rows, *known.shape)
    y = torch.arange(rows) % known.labels
    return Rows(x.long(), y[:, None].expand(rows, *known.shape)) if isinstance(task, LanguageModel) else Rows(x, y)


def load_arrays(
    name: str,
    arrays: Sequence[object],
    *,
    train_limit: int | None = None,
    test_limit: int | None = None,
    task: Task = CLASSIFICATION,
) -> Dataset:
    """Rows that a program holds, x_train, y_train, x_test and y_test, checked and limited as those of a source are.

    Example:
        >>> x = np.zeros((4, 2), np.float32)
        >>> rows = load_arrays("mine", [x, [0, 1, 0, 1], x[:2], [0, 1]])
        >>> len(rows.train), rows.classes
        (4, ('0', '1'))
    """
    plain = {key: np.asarray(array) for key, array in zip(NPZ_KEYS, arrays, strict=True)}
    train, test = formats.splits_from_arrays(plain, name, task)
    classes, facts = _number_classes(task, train, test)
    raw = _OpenedSource(name, train, test, classes, "a program", facts=facts)
    return _take_rows(raw, train_limit, test_limit, 0, task)


@dataclass(frozen=True, slots=True, eq=False)
class _OpenedSource:
    """A source opened, before limits are applied; `official_rows` is set for public sets."""

    name: str
    train: Split
    test: Split
    classes: tuple[str, ...]
    location: str
    files: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    official_rows: tuple[int, int] | None = None
    facts: Mapping[str, object] = field(default_factory=dict)
    form: TableForm | None = None


def _take_rows(raw: _OpenedSource, train_limit: int | None, test_limit: int | None, seed: int, task: Task) -> Dataset:
    """The rows of an opened source, within limits."""
    whole = raw.official_rows or (len(raw.train), len(raw.test))
    train = _take_limit(raw, "train", raw.train, train_limit, whole[0], seed)
    test = _take_limit(raw, "test", raw.test, test_limit, whole[1], seed + 1)
    halves = train.rows(), test.rows()
    facts = {**raw.facts, **_facts(raw, *halves)}
    more: dict[str, Any] = {}
    if isinstance(train, ArraySplit):
        more = {"features": train.features, "owners": train.owners, "vocabulary": train.vocabulary}
    return Dataset(raw.name, *halves, raw.classes, facts, task, form=raw.form, **more)


def _take_limit(raw: _OpenedSource, half: str, split: Split, limit: int | None, whole: int, seed: int) -> Split:
    """The rows a limit leaves, if what was found can serve it."""
    have = len(split)
    if have < whole and (limit is None or limit > have):
        missing = f" (missing: {', '.join(raw.missing)})" if raw.missing else ""
        raise DataMissing(
            f"{raw.name} in {raw.location} is a partial set with {have} of {whole} {half} rows{missing}; "
            f"complete it, or set {half}_limit to at most {have}"
        )
    if limit is None or limit >= have:
        return split
    return split.take(np.sort(np.random.default_rng(seed).permutation(have)[:limit]))


def _facts(raw: _OpenedSource, train: Rows, test: Rows) -> dict[str, object]:
    """What a report should say about the data of a run."""
    found = (len(raw.train), len(raw.test))
    return {
        "source": raw.name,
        "place": raw.location,
        "files": list(raw.files),
        "missing": list(raw.missing),
        "partial": raw.official_rows is not None
        and (found[0] < raw.official_rows[0] or found[1] < raw.official_rows[1]),
        "train_rows": len(train),
        "test_rows": len(test),
        "train_rows_found": found[0],
        "test_rows_found": found[1],
        "checksum": _checksum(train, test),
    }


def _checksum(*parts: Rows) -> str:
    """SHA-256 over the rows used: two runs with the same sum saw the same numbers."""
    digest = hashlib.sha256()
    for rows in parts:
        for tensor in (rows.x, rows.y):
            digest.update(repr(tuple(tensor.shape)).encode())
            digest.update(tensor.contiguous().view(-1).numpy().data)
    return f"sha256:{digest.hexdigest()}"


def _open(source: str, options: Options, task: Task) -> _OpenedSource:
    """The source opened, whatever kind it is."""
    if source == "digits" or source in OFFICIAL:
        _refuse_options(source, options, () if source == "digits" else OFFICIAL[source].options)
        return _open_digits() if source == "digits" else _open_official(OFFICIAL[source], options)
    if FUNCTION.fullmatch(source):
        return _open_function(source, options, task)
    location = local_path(source)
    if location.suffix == ".npz":
        return _open_npz(source, location, options, task)
    if location.suffix in SUFFIXES:
        _refuse_options(source, options, OPTIONS)
        halves = open_table(location, options, task)
        named = (str(location), (location.name,))
        return _OpenedSource(source, halves.train, halves.test, halves.classes, *named, form=halves.form)
    if location.suffix in TEXTS or reads_texts(task):
        return _open_texts(source, location, options, task)
    return _open_folder(source, location, options)


def _refuse_options(source: str, options: Options, known: tuple[str, ...]) -> None:
    for name in options:
        if name not in known:
            expected = f"expected one of {', '.join(known)}" if known else "which takes no options"
            raise ConfigError(f"option {name!r} is unknown to the source {source!r}, {expected}; remove it")


def _open_digits() -> _OpenedSource:
    """Scikit-learn's 1797 digits of 8x8 pixels, 80 % of each class for training."""
    from sklearn.datasets import load_digits

    bundle = load_digits()
    every = ArraySplit((bundle.images[:, None] / 16).astype(np.float32), bundle.target)
    train, test = (every.take(index) for index in stratified_split(every.y, 0.2))
    return _OpenedSource("digits", train, test, DIGITS, "scikit-learn")


def _open_official(official: Official, options: Options) -> _OpenedSource:
    """A public set, downloaded if no folder has it."""
    if (located := locate(official)) is None:
        folder = cache_folder() / official.folders[0]
        download.fetch_all(official, folder)
        if (located := locate(official)) is None:
            raise ConfigError(
                f"{official.name} was downloaded into {folder}, but its files are not those expected; "
                f"delete that folder and look at {official.homepage}"
            )
    store, classes = located.store, official.classes(located.store)
    train = official.read_train(store, located.train, **options)
    test = official.read_test(store, located.test, **options)
    files = tuple(dict.fromkeys(name for part in (*located.train, *located.test) for name in part))
    return _OpenedSource(
        official.name,
        train,
        test,
        classes,
        str(store.location),
        files,
        located.missing,
        None if options else official.rows,
    )


def _open_texts(source: str, location: Path, options: Options, task: Task) -> _OpenedSource:
    """A folder or file of texts."""
    if not reads_texts(task):
        raise ConfigError(f"{location} holds texts; set task = 'text-classification' or 'language-model'")
    _refuse_options(source, options, TEXT_OPTIONS)
    found = open_texts(location, options, task)
    return _OpenedSource(source, found.train, found.test, found.classes, str(location))


def _open_folder(source: str, location: Path, options: Options) -> _OpenedSource:
    """A folder of class folders."""
    _refuse_options(source, options, ("image_size", "test_fraction"))
    size, fraction = options.get("image_size"), options.get("test_fraction", 0.2)
    if size is not None and (not isinstance(size, int) or size < 1):
        raise ConfigError(f"image_size is {size!r}, expected a number of pixels from 1 on; try 32")
    if not isinstance(fraction, int | float):
        raise ConfigError(f"test_fraction is {fraction!r}, expected a number between 0 and 1; try 0.2")
    train, test, classes = images.folder_halves(location, size, fraction)
    return _OpenedSource(source, train, test, classes, str(location))


def _open_npz(source: str, location: Path, options: Options, task: Task) -> _OpenedSource:
    """A NumPy archive of plain arrays."""
    _refuse_options(source, options, ())
    arrays = formats.read_npz(location)
    train, test = formats.splits_from_arrays(arrays, location, task)
    names = formats.named_classes(arrays, location)
    classes, facts = _number_classes(task, train, test) if names is None else (names, {})
    return _OpenedSource(source, train, test, classes, str(location), (location.name,), facts=facts)


def _open_function(source: str, options: Options, task: Task) -> _OpenedSource:
    """What the user's own function returns."""
    returned = _call_function(source, options)
    if isinstance(returned, Dataset):
        train, test = (ArraySplit(half.x.numpy(), half.y.numpy()) for half in (returned.train, returned.test))
        return _OpenedSource(
            source,
            replace(train, owners=returned.owners, features=returned.features, vocabulary=returned.vocabulary),
            test,
            returned.classes,
            source,
            facts=returned.facts,
            form=returned.form,
        )
    if not isinstance(returned, tuple | list) or len(returned) != 4:
        raise ConfigError(
            f"{source} returned {type(returned).__name__}, expected a fedfuse Dataset or a tuple "
            "(x_train, y_train, x_test, y_test); change what it returns"
        )
    train, test = formats.splits_from_arrays(dict(zip(NPZ_KEYS, returned, strict=True)), source, task)
    classes, facts = _number_classes(task, train, test)
    return _OpenedSource(source, train, test, classes, source, facts=facts)


def _call_function(source: str, options: Options) -> object:
    """Import and call `package.module:function`."""
    module, _, name = source.partition(":")
    if module.partition(".")[0] in sys.stdlib_module_names:
        raise ConfigError(
            f"the data source {source!r} is a part of Python itself, and calling it would bring no rows; name a "
            "function of yours that returns (x_train, y_train, x_test, y_test)"
        )
    try:
        function: Callable[..., object] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"the data source {source!r} cannot be imported: {error}; install the package or put its folder "
            "on PYTHONPATH, and check the spelling"
        ) from error
    try:
        inspect.signature(function).bind(**options)
    except TypeError as error:
        raise ConfigError(f"{source} cannot be called with options {dict(options)}: {error}; change them") from error
    try:
        return function(**options)
    except Exception as error:
        raise ConfigError(f"{source} raised {type(error).__name__}: {error}; call it alone to see where") from error


def _number_classes(task: Task, *splits: ArraySplit) -> tuple[tuple[str, ...], dict[str, object]]:
    """Class names when there are none, the labels themselves, and which have no rows; of numbers, their places."""
    if isinstance(task, Binary):
        return ("no", "yes"), {}
    if not isinstance(task, Classification):
        return tuple(map(str, range(splits[0].y.shape[1] if splits[0].y.ndim == 2 else 1))), {}
    labels = np.concatenate([split.y for split in splits])
    empty = formats.empty_classes(labels)
    return tuple(map(str, range(1 + int(labels.max(initial=-1))))), {EMPTY: empty} if empty else {}

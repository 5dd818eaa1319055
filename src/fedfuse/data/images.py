"""Pictures that lie in files of their own: folders of class folders, loose pictures of a site, and Tiny-ImageNet.

`ImageSplit` names pictures without decoding them, so a limit saves time and memory. An experiment insists on pictures
that are alike (`folder_halves`, `ImageSplit.rows`); a site's folder may hold mixed sizes, grey and colour, and broken
files, so `survey` first reads the headers and `decode_pictures` brings all to one form.
"""

from __future__ import annotations

import io
import warnings
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from fedfuse.core.inputs import PictureForm
from fedfuse.data.rows import Array, Rows, stratified_split
from fedfuse.data.stores import Folder, Store, bar, damaged_error
from fedfuse.data.transforms import scale01
from fedfuse.errors import ConfigError

SUFFIXES = frozenset((".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"))
GRAY_MODES = frozenset(("1", "L", "LA", "I", "I;16", "F"))


@dataclass(frozen=True, slots=True, eq=False)
class ImageSplit:
    """Pictures by name, with their labels.

    Attributes:
        store: where the pictures lie.
        names: one per row.
        y: labels.
        size: (width, height) to resize to, or None to insist that all are equal.
        gray: one channel instead of three.
    """

    store: Store
    names: Array
    y: Array
    size: tuple[int, int] | None = None
    gray: bool = False

    def __len__(self) -> int:
        return len(self.y)

    def take(self, index: Array) -> ImageSplit:
        """The rows at these positions."""
        return replace(self, names=self.names[index], y=self.y[index])

    def rows(self) -> Rows:
        """The pictures decoded, as float32 in [0, 1]."""
        width, height = self.size or self.open(self.names[0]).size
        pixels = np.empty((len(self), 1 if self.gray else 3, height, width), dtype=np.uint8)
        with bar(f"reading {self.store.location.name}", len(self)) as advance:
            for row, name in enumerate(self.names):
                pixels[row] = self.pixels(str(name), (width, height))
                advance(1)
        return Rows(scale01(torch.from_numpy(pixels)), torch.from_numpy(self.y.astype(np.int64)))

    def pixels(self, name: str, size: tuple[int, int]) -> Array:
        """One picture as (channels, height, width) bytes."""
        picture = self.open(name)
        if picture.size != size and self.size is None:
            raise ConfigError(
                f"{self.store.location / name} is {picture.width}x{picture.height}, expected "
                f"{size[0]}x{size[1]} like the first; set options.image_size to resize all of them"
            )
        try:
            picture = _in_bytes(picture).convert("L" if self.gray else "RGB")
            resized = picture if picture.size == size else picture.resize(size, Image.Resampling.BILINEAR)
            return np.asarray(resized).reshape(size[1], size[0], -1).transpose(2, 0, 1)
        except Exception as error:  # a scrambled picture surfaces as almost anything inside PIL
            raise damaged_error(self.store.location / name, error) from error

    def open(self, name: str) -> Image.Image:
        """One picture, of which only the header is read until its pixels are asked for."""
        try:
            with warnings.catch_warnings():  # more pixels than PIL thinks sane are refused, not warned of
                warnings.simplefilter("error", Image.DecompressionBombWarning)
                return Image.open(io.BytesIO(self.store.read(str(name))))
        except Exception as error:  # likewise
            if isinstance(error, ConfigError):
                raise
            raise damaged_error(self.store.location / name, error) from error

    def is_gray(self) -> bool:
        """Whether no picture has colour, by their headers; stops at the first that has."""
        return all(self.open(name).mode in GRAY_MODES for name in self.names)


def _in_bytes(picture: Image.Image) -> Image.Image:
    """A picture of eight bits a channel: PIL would clip grey values of sixteen, and warn of a palette's alpha."""
    if picture.mode.startswith("I;16") or (picture.mode == "I" and np.asarray(picture).max(initial=0) > 255):
        return Image.fromarray((np.asarray(picture).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8))
    return picture.convert("RGBA") if "transparency" in picture.info else picture


def is_picture(name: str) -> bool:
    """Whether a file name ends like a picture's.

    Example:
        >>> is_picture("cat.JPEG"), is_picture("notes.txt")
        (True, False)
    """
    return Path(name).suffix.lower() in SUFFIXES


def class_folders(
    location: Path, image_size: int | None = None, may_be_empty: Collection[str] = ()
) -> tuple[ImageSplit, tuple[str, ...]]:
    """Every picture below a folder of class folders, and the class names in sorted order.

    Args:
        location: the folder.
        image_size: width and height to resize to.
        may_be_empty: classes whose folder may hold no pictures.
    """
    store = Folder(location)
    classes = tuple(name for name in store.listing("") if (location / name).is_dir())
    names = [[f"{one}/{name}" for name in store.listing(one) if is_picture(name)] for one in classes]
    empty = [one for one, pictures in zip(classes, names, strict=True) if not pictures and one not in may_be_empty]
    if empty:
        raise ConfigError(
            f"{location / empty[0]} holds no pictures, expected files ending in {', '.join(sorted(SUFFIXES))}; "
            "add some or remove the folder"
        )
    if not classes:
        raise ConfigError(
            f"{location} holds no folders, expected one folder per class (or train/ and test/ with those "
            "inside); sort the pictures into class folders"
        )
    return _split_from_class_lists(store, names, image_size), classes


def _split_from_class_lists(store: Store, names: Sequence[Sequence[str]], image_size: int | None) -> ImageSplit:
    """Pictures listed class by class, as one split."""
    labels = np.repeat(np.arange(len(names)), [len(pictures) for pictures in names])
    flat = np.array([name for pictures in names for name in pictures])
    return ImageSplit(store, flat, labels, size=(image_size, image_size) if image_size else None)


def half_folder(location: Path, half: str) -> str | None:
    """The name of the folder that holds one half, if there is `train/` and with it `test/` or `val/`."""
    tests = [name for name in ("test", "val") if (location / name).is_dir()]
    if not tests or not (location / "train").is_dir():
        return None
    return "train" if half == "train" else tests[0]


def folder_halves(
    location: Path, image_size: int | None = None, test_fraction: float = 0.2
) -> tuple[ImageSplit, ImageSplit, tuple[str, ...]]:
    """Training pictures, test pictures and class names of a folder of class folders.

    With `train/` and `test/` (or `val/`) inside, those are the halves; otherwise the class folders lie on
    the first level and every class is split in the same proportion, always the same way.
    """
    if (half := half_folder(location, "test")) is None:
        every, classes = class_folders(location, image_size)
        train, test = (every.take(index) for index in stratified_split(every.y, test_fraction))
    else:
        train, classes = class_folders(location / "train", image_size)
        test = _relabel_test(*class_folders(location / half, image_size), classes)
    gray = train.is_gray() and test.is_gray()
    return replace(train, gray=gray), replace(test, gray=gray), classes


def _relabel_test(test: ImageSplit, test_classes: tuple[str, ...], classes: tuple[str, ...]) -> ImageSplit:
    """Test pictures numbered by the training half's classes, of which the test half may lack some."""
    if unknown := sorted(set(test_classes) - set(classes)):
        raise ConfigError(
            f"{test.store.location} has a class {unknown[0]!r} without training pictures, expected only "
            f"{', '.join(classes[:8])}{', ...' if len(classes) > 8 else ''}; add it to train/ or remove it"
        )
    label = np.array([classes.index(name) for name in test_classes])
    return replace(test, y=label[test.y])


def loose_pictures(location: Path) -> ImageSplit | None:
    """The pictures that lie in a folder itself, without classes, if there are any and no class folders."""
    store = Folder(location)
    entries = store.listing("")
    names: Array = np.array([name for name in entries if is_picture(name) and (location / name).is_file()])
    has_folders = any((location / name).is_dir() for name in entries)
    return None if has_folders or not len(names) else ImageSplit(store, names, np.zeros(len(names), dtype=np.int64))


@dataclass(frozen=True, slots=True)
class Survey:
    """What headers say: how many pictures there are of each (width, height), whether all are grey, which are broken."""

    sizes: Counter[tuple[int, int]]
    gray: bool
    broken: Mapping[str, str]

    @property
    def form(self) -> PictureForm:
        """The form they all have.

        Raises:
            ConfigError: if they have several sizes.
        """
        if len(self.sizes) > 1:
            each = ", ".join(f"{w}×{h} ({n})" for (w, h), n in self.sizes.most_common(6))
            raise ConfigError(
                f"the pictures come in {len(self.sizes)} sizes, {each}; say to which all are resized: --image-size "
                f"{min(self.sizes.most_common(1)[0][0])}, or train by a federation file, which says it for every site"
            )
        ((width, height),) = self.sizes or {(1, 1): 0}
        return PictureForm(height=height, width=width, channels=1 if self.gray else 3)


def survey(split: ImageSplit) -> Survey:
    """Look at every picture's header."""
    sizes: Counter[tuple[int, int]] = Counter()
    gray, broken = True, dict[str, str]()
    for name in map(str, split.names):
        try:
            picture = split.open(name)
        except ConfigError as why:
            broken[name] = _reason(why)
            continue
        sizes[picture.size] += 1
        gray = gray and picture.mode in GRAY_MODES
    return Survey(sizes, gray, broken)


@dataclass(frozen=True, slots=True, eq=False)
class DecodedPictures:
    """Pictures in one form, with their names and the labels they came with; and those that could not be read."""

    rows: Rows
    names: tuple[str, ...]
    broken: Mapping[str, str]


def decode_pictures(split: ImageSplit, form: PictureForm, skip_broken: bool = False) -> DecodedPictures:
    """The pictures resized, made grey or colour, as float32 in [0, 1].

    Raises:
        ConfigError: naming every broken picture at once, unless they are to be skipped; or if none is left.
    """
    sized = replace(split, size=(form.width, form.height), gray=form.channels == 1)
    pixels = np.empty((len(split), *form.shape), dtype=np.uint8)
    good, broken = np.zeros(len(split), dtype=bool), dict[str, str]()
    with bar(f"reading {split.store.location.name}", len(split)) as advance:
        for row, name in enumerate(map(str, split.names)):
            try:
                pixels[row] = sized.pixels(name, (form.width, form.height))
                good[row] = True
            except ConfigError as why:
                broken[name] = _reason(why)
            advance(1)
    if broken and not (skip_broken and good.any()):
        raise broken_error(split.store.location, broken, len(split))
    x = scale01(torch.from_numpy(pixels if good.all() else pixels[good]))
    rows = Rows(x, torch.from_numpy(split.y[good].astype(np.int64)))
    return DecodedPictures(rows, tuple(map(str, split.names[good])), broken)


def broken_error(location: Path, broken: Mapping[str, str], among: int) -> ConfigError:
    """All broken pictures in one list, the first hundred by name."""
    most = 100
    told = "; ".join(f"{name} ({why})" for name, why in list(broken.items())[:most])
    more = f"; and {len(broken) - most} more" if len(broken) > most else ""
    way = "replace them, or leave them out with --skip-broken" if len(broken) < among else "no other is left"
    return ConfigError(f"{len(broken)} of {among} pictures in {location} cannot be read: {told}{more}; {way}")


def _reason(why: ConfigError) -> str:
    """What is wrong with a picture, without its path, which the list of broken pictures has already."""
    text = str(why).partition(" is damaged: ")[2] or str(why)
    text = text.removesuffix("; delete it and fetch it again")
    return "no picture" if "cannot identify" in text else text


def tiny_imagenet_train(store: Store) -> ImageSplit:
    """The training pictures of Tiny-ImageNet: train/WNID/images/WNID_i.JPEG."""
    names = [
        [f"train/{one}/images/{name}" for name in store.listing(f"train/{one}/images") if is_picture(name)]
        if store.has(f"train/{one}/images")
        else []
        for one in tiny_imagenet_ids(store)
    ]
    return replace(_split_from_class_lists(store, names, None), size=(64, 64))


def tiny_imagenet_test(store: Store) -> ImageSplit:
    """The validation pictures of Tiny-ImageNet, labelled by val/val_annotations.txt.

    The official test pictures have no labels, so the validation pictures are the usual test set.
    """
    ids = {one: label for label, one in enumerate(tiny_imagenet_ids(store))}
    where = "val/val_annotations.txt"
    entries = [line.split("\t")[:2] for line in _lines(store, where)]
    if bad := [entry for entry in entries if len(entry) != 2 or not _is_plain(entry[0]) or entry[1] not in ids]:
        raise damaged_error(
            store.location / where,
            f"a line says {bad[0]}, expected the name of a picture without folders and a class of wnids.txt",
        )
    present = [(f"val/images/{name}", ids[one]) for name, one in entries if store.has(f"val/images/{name}")]
    names, labels = [name for name, _ in present], [label for _, label in present]
    return ImageSplit(store, np.array(names), np.array(labels, dtype=np.int64), size=(64, 64))


def tiny_imagenet_ids(store: Store) -> tuple[str, ...]:
    """The WordNet ids of the classes, sorted: their positions are the labels."""
    ids = tuple(sorted(_lines(store, "wnids.txt")))
    if bad := [one for one in ids if not _is_plain(one)]:
        raise damaged_error(store.location / "wnids.txt", f"a line says {bad[0]!r}, expected an id without folders")
    return ids


def tiny_imagenet_classes(store: Store) -> tuple[str, ...]:
    """A word for each class: the first synonym in words.txt, or the WordNet id without that file."""
    lines = _lines(store, "words.txt") if store.has("words.txt") else []
    words = {one: text.split(",")[0] for one, _, text in (line.partition("\t") for line in lines)}
    return tuple(words.get(one, one) for one in tiny_imagenet_ids(store))


def _is_plain(name: str) -> bool:
    """Whether a name leads to no other folder."""
    return not set(name) & {"/", "\\", "\0"} and name not in ("", ".", "..")


def _lines(store: Store, name: str) -> list[str]:
    try:
        return [line for line in store.read(name).decode().splitlines() if line.strip()]
    except UnicodeDecodeError as error:
        raise damaged_error(store.location / name, error) from error

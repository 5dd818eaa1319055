"""Pictures of a place that nobody has tidied: of several sizes and modes, some of them broken."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from fedfuse.core.forms import PictureForm
from fedfuse.data.images import GRAY_MODES, ImageSplit, is_picture
from fedfuse.data.progress import bar
from fedfuse.data.rows import Array, Rows
from fedfuse.data.stores import Folder
from fedfuse.data.transforms import scale01
from fedfuse.errors import ConfigError

_TOLD = 100  # broken pictures named in one sentence


@dataclass(frozen=True, slots=True)
class Survey:
    """What pictures' headers say: how many there are of each (width, height), whether all are grey, who is broken."""

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
    """All broken pictures in one list."""
    told = "; ".join(f"{name} ({why})" for name, why in list(broken.items())[:_TOLD])
    more = f"; and {len(broken) - _TOLD} more" if len(broken) > _TOLD else ""
    way = "replace them, or leave them out with --skip-broken" if len(broken) < among else "no other is left"
    return ConfigError(f"{len(broken)} of {among} pictures in {location} cannot be read: {told}{more}; {way}")


def loose_pictures(location: Path) -> ImageSplit | None:
    """The pictures that lie in a folder itself, without classes, if there are any and no class folders."""
    store = Folder(location)
    entries = store.listing("")
    names: Array = np.array([name for name in entries if is_picture(name) and (location / name).is_file()])
    has_folders = any((location / name).is_dir() for name in entries)
    return None if has_folders or not len(names) else ImageSplit(store, names, np.zeros(len(names), dtype=np.int64))


def _reason(why: ConfigError) -> str:
    """What is wrong with a picture, without the path that stands beside it."""
    text = str(why).partition(" is damaged: ")[2] or str(why)
    text = text.removesuffix("; delete it and fetch it again")
    return "no picture" if "cannot identify" in text else text

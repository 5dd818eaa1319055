"""The form in which rows are given to a network, as plain data that a file can carry from site to site."""

from __future__ import annotations

import math
from typing import Annotated, Literal, Self, TypeAlias

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from fedfuse.core.characters import TextForm
from fedfuse.core.columns import TableForm
from fedfuse.core.inputs import InputForm
from fedfuse.core.settings import Settings

Side = Annotated[PositiveInt, Field(le=1 << 16)]


class _Normalized(Settings):
    """Inputs of which each channel or feature is shifted and scaled: (x − mean) / std; no numbers leave them alone."""

    mean: tuple[float, ...] = ()
    std: tuple[PositiveFloat, ...] = ()

    @model_validator(mode="after")
    def _check_pair(self) -> Self:
        if len(self.mean) != len(self.std):
            raise ValueError(f"mean has {len(self.mean)} numbers and std {len(self.std)}; give one each per channel")
        return self

    @property
    def is_normalized(self) -> bool:
        """Whether anything is shifted or scaled."""
        return bool(self.mean)

    def _check_channels(self, channels: int) -> None:
        if len(self.mean) not in (0, channels):
            raise ValueError(f"mean has {len(self.mean)} numbers, expected {channels}, one for each channel")


class PictureForm(_Normalized):
    """Pictures of one size, grey (one channel) or in colour (three), their bytes as numbers in [0, 1].

    Example:
        >>> form = PictureForm(height=64, width=64, channels=1, mean=[0.5], std=[0.25])
        >>> form.shape, str(form), form.bounds().high
        ((1, 64, 64), '64×64 grey, normalized', (2.0,))
    """

    kind: Literal["pictures"] = "pictures"
    height: Side
    width: Side
    channels: Literal[1, 3] = 3

    @model_validator(mode="after")
    def _check(self) -> Self:
        self._check_channels(self.channels)
        return self

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one input: channels, height, width."""
        return self.channels, self.height, self.width

    def bounds(self) -> InputForm:
        """The range of its numbers, after normalization."""
        if not self.is_normalized:
            return InputForm(self.shape)
        low, high = (tuple((pixel - m) / s for m, s in zip(self.mean, self.std, strict=True)) for pixel in (0.0, 1.0))
        return InputForm(self.shape, low, high)

    def __str__(self) -> str:
        colour = "grey" if self.channels == 1 else "colour"
        return f"{self.width}×{self.height} {colour}" + (", normalized" if self.is_normalized else "")


class ArrayForm(_Normalized):
    """Numbers in an array of a given shape.

    Example:
        >>> str(ArrayForm(shape=(13,))), ArrayForm(shape=(1, 8, 8)).bounds().shape
        ('13', (1, 8, 8))
    """

    kind: Literal["arrays"] = "arrays"
    shape: Annotated[tuple[PositiveInt, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _check(self) -> Self:
        self._check_channels(self.shape[0])
        return self

    def bounds(self) -> InputForm:
        """The range of its numbers: normalized ones are taken to lie in ±3."""
        return InputForm(self.shape, (-3.0,), (3.0,)) if self.is_normalized else InputForm(self.shape)

    def __str__(self) -> str:
        return "×".join(map(str, self.shape)) + (", normalized" if self.is_normalized else "")


RowForm: TypeAlias = Annotated[PictureForm | ArrayForm | TableForm | TextForm, Field(discriminator="kind")]


def form_key(form: RowForm, mixed: bool) -> tuple[object, ...]:
    """What must agree between sites: numbers and how they were normalized, a table's columns, the characters of texts.

    Args:
        form: a site's.
        mixed: whether networks only mix their answers, and so may lay the same numbers out differently.

    Example:
        >>> grey, flat = PictureForm(height=2, width=3, channels=1), ArrayForm(shape=(6,))
        >>> form_key(grey, mixed=True) == form_key(flat, mixed=True), form_key(grey, False) == form_key(flat, False)
        (True, False)
    """
    if isinstance(form, TableForm | TextForm):
        return (form.kind, form)
    return math.prod(form.shape) if mixed else form.shape, form.mean, form.std

"""What a file says of itself: which classes, which inputs, who learnt on how much, and how; read with care."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
)

from fedfuse.core.forms import ArrayForm, RowForm
from fedfuse.core.settings import Settings, validate_settings
from fedfuse.errors import ConfigError

Word = Annotated[str, Field(max_length=1000)]
ClassName = Annotated[str, Field(min_length=1, max_length=200)]


class Contribution(Settings):
    """A site of which something is in a fused model.

    Attributes:
        client: its name.
        num_examples: how many examples it said stand behind its update.
        counted: for how many it counted, where that is another number: weakened at the door, or vouched for.
        file: where its update lay, where the file's name is another one than the site's.

    Example:
        >>> Contribution(client="north", num_examples=400, counted=120).model_dump()
        {'client': 'north', 'num_examples': 400.0, 'counted': 120.0}
    """

    client: Word
    num_examples: NonNegativeFloat
    counted: NonNegativeFloat | None = None
    file: Word = ""

    @model_serializer(mode="wrap")
    def _leave_out_what_is_usual(self, plain: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {key: value for key, value in plain(self).items() if value not in (None, "")}


class About(BaseModel):
    """What the header of an update or of a model tells a reader.

    Attributes:
        client: the site, of an update.
        method: which method made it.
        federation: the name of the federation file it was made by, if any.
        task: what is to be learned; where nothing stands, classification.
        class_names: the name of each output, in order; none in files that know only how many there are.
        inputs: the form of its rows.
        num_examples: how many examples stand behind an update.
        steps: local optimizer steps of an update.
        training: how it was trained.
        start: a short name of the weights it began with.
        reveals: what left the site beside the weights.
        sites: who is in a fused model.
        refused: who is not, and why.
        versions: of what wrote it.

    Example:
        >>> About.of({"kind": "reply", "client": "north", "class_names": ["ill", "well"]}).class_names
        ('ill', 'well')
    """

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    client: Word = ""
    method: Word = ""
    federation: Word = ""
    task: Word = ""
    class_names: tuple[ClassName, ...] = ()
    inputs: RowForm | None = None
    num_examples: NonNegativeFloat | None = None
    steps: Annotated[int, Field(ge=0)] | None = None
    training: dict[str, Any] = Field(default_factory=dict)
    start: Word = ""
    reveals: tuple[Word, ...] = ()
    sites: tuple[Contribution, ...] = ()
    refused: tuple[dict[str, Word], ...] = ()
    versions: dict[str, Word] = Field(default_factory=dict)

    @field_validator("class_names")
    @classmethod
    def _check_names(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        check_class_names(names)
        return names

    @field_validator("inputs", mode="before")
    @classmethod
    def _read_shape(cls, given: Any) -> Any:
        """Files used to tell the shape and nothing else."""
        return ArrayForm(shape=tuple(given)) if isinstance(given, list) and given else given or None

    @classmethod
    def of(cls, header: Mapping[str, Any]) -> About:
        """What a header tells; what it does not mention is left empty.

        Raises:
            ConfigError: in the words of the first entry that cannot be.
        """
        return validate_settings(cls, {key: header[key] for key in cls.model_fields if key in header})

    def to_json(self) -> dict[str, Any]:
        """Plain data for a header: only what there is to tell."""
        return {key: value for key, value in self.model_dump(mode="json").items() if value not in (None, "", [], {})}


def check_class_names(names: Sequence[str]) -> None:
    """Refuse names that could not tell classes apart.

    Example:
        >>> check_class_names(["ill", "ill"])
        Traceback (most recent call last):
        ...
        fedfuse.errors.ConfigError: the class 'ill' stands there twice; each class needs a name of its own
    """
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"the class {twice[0]!r} stands there twice; each class needs a name of its own")
    if odd := [name for name in names if not name.isprintable() or name != name.strip() or not name]:
        raise ConfigError(f"{odd[0]!r} is no name of a class; use printable letters without blanks at the ends")


def distinct_names(names: Sequence[str]) -> tuple[str, ...]:
    """Names that tell classes apart, where a public set calls two of them by one word.

    Example:
        >>> distinct_names(["crane", "egret", "crane"])
        ('crane', 'egret', 'crane (2)')
    """
    places = [names[: k + 1].count(name) for k, name in enumerate(names)]
    return tuple(name if place == 1 else f"{name} ({place})" for name, place in zip(names, places, strict=True))


def versions() -> dict[str, str]:
    """Of what computes here.

    Example:
        >>> sorted(versions())
        ['fedfuse', 'python', 'torch']
    """
    found = {name: metadata.version(name) for name in ("fedfuse", "torch")}
    return {**found, "python": platform.python_version()}


def names_text(names: Sequence[str], most: int = 12) -> str:
    """Class names in a sentence.

    Example:
        >>> names_text(["ill", "well"]), names_text(["a", "b", "c"], most=2)
        ('ill, well', 'a, b, … (3 in all)')
    """
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown}, … ({len(names)} in all)"

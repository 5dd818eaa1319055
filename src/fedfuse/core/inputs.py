"""What an input looks like, known without seeing one, and how each network reads it."""

from __future__ import annotations

import inspect
import math
import re
import string
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, Literal, Self, TypeAlias

import torch
from pydantic import Field, PositiveFloat, PositiveInt, model_validator
from torch import Tensor, nn

from fedfuse.core.rng import seeded, stream
from fedfuse.core.settings import Settings
from fedfuse.core.spec import Spec, factory_of, is_of_transformers, logits_in
from fedfuse.errors import ConfigError, FuseError, error_text

_TEXT = 16  # tokens of a text that is made up to look at a network


@dataclass(frozen=True, slots=True)
class InputForm:
    """The shape of one input and the range of its numbers, per channel or feature; or how many tokens there are.

    Example:
        >>> form = InputForm((1, 2, 2), low=(-1.0,), high=(3.0,))
        >>> form.squash(torch.zeros(1, 1, 2, 2)).flatten()
        tensor([1., 1., 1., 1.])
    """

    shape: tuple[int, ...]
    low: tuple[float, ...] = (0.0,)
    high: tuple[float, ...] = (1.0,)
    tokens: int = 0

    def squash(self, free: Tensor) -> Tensor:
        """Any numbers brought into the range, smoothly: low + (high − low) · sigmoid(u)."""
        view = (1, -1) + (1,) * (len(self.shape) - 1)
        low, high = (free.new_tensor(bound).view(view) for bound in (self.low, self.high))
        return low + (high - low) * free.sigmoid()

    def noise(self, count: int, generator: torch.Generator) -> Tensor:
        """Inputs of uniform noise over the range, or tokens drawn at random."""
        if self.tokens:
            return torch.randint(self.tokens, (count, *self.shape), generator=generator)
        return self.squash(torch.rand(count, *self.shape, generator=generator).logit(1e-6))


@lru_cache(maxsize=16)
def own_form(spec: Spec) -> InputForm | None:
    """The form of a network's inputs as its options tell it; None where they do not.

    Example:
        >>> own_form(Spec("lenet", {"size": 32, "channels": 3})).shape, own_form(Spec("mlp")).shape
        ((3, 32, 32), (784,))
    """
    inner = spec.options.get("of")
    if not spec.can_run:  # a described network's factory is a word from a file
        return None
    if spec.prototype is not None:
        return _form_by_config(spec.prototype)
    if isinstance(inner, dict):
        return own_form(Spec.from_json(inner, spec.factories))
    try:
        parameters = inspect.signature(factory_of(spec.factory)).parameters.values()
    except (TypeError, ValueError):  # a callable that hides its signature
        return None
    options = {p.name: p.default for p in parameters} | dict(spec.options)
    sizes = {
        name: options[name]
        for name in ("channels", "size", "inputs", "tokens", "length")
        if type(options.get(name)) is int
    }
    if "channels" in sizes and "size" in sizes:
        return InputForm((sizes["channels"], sizes["size"], sizes["size"]))
    if "tokens" in sizes and "length" in sizes:
        return InputForm((sizes["length"],), tokens=sizes["tokens"])
    return InputForm((sizes["inputs"],)) if "inputs" in sizes else None


def _form_by_config(module: nn.Module) -> InputForm | None:
    """What a network of `transformers` reads, as its config tells: pictures, or tokens of a text that is not long."""
    config = getattr(module, "config", None)
    if not is_of_transformers(module) or config is None:
        return None
    size, channels = getattr(config, "image_size", None), getattr(config, "num_channels", None)
    if isinstance(size, int) and isinstance(channels, int):
        return InputForm((channels, size, size))
    tokens, most = getattr(config, "vocab_size", None), getattr(config, "max_position_embeddings", None)
    if not isinstance(tokens, int):
        return None
    return InputForm((min(_TEXT, most) if isinstance(most, int) else _TEXT,), tokens=tokens)


def _own_shape(spec: Spec) -> tuple[int, ...] | None:
    """The shape a network of ours reads by its options, and a sequence by the linear layer that it begins with."""
    if spec.is_ours and (form := own_form(spec)) is not None:
        return form.shape
    first = spec.skeleton() if spec.prototype is not None else None
    while type(first) is nn.Sequential and len(first):
        first = first[0]
    return (first.in_features,) if isinstance(first, nn.Linear) else None


def shape_read(spec: Spec, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape in which a network reads inputs of this one: its own, where that lays as many numbers out otherwise.

    Only networks we know enough of are asked; any other is taken to read what comes.

    Example:
        >>> shape_read(Spec("lenet"), (784,)), shape_read(Spec("lenet"), (1, 28, 28))
        ((1, 28, 28), (1, 28, 28))
    """
    own = _own_shape(spec)
    same = own is None or len(own) == len(shape) or math.prod(own) != math.prod(shape)
    return shape if same or own is None else own


def as_read(spec: Spec, x: Tensor) -> Tensor:
    """Inputs as a network reads them: pictures for one that convolves, though they came as rows of features."""
    shape = shape_read(spec, tuple(x.shape[1:]))
    return x if shape == tuple(x.shape[1:]) else x.reshape(len(x), *shape)


def convolves_images(spec: Spec, shape: tuple[int, ...]) -> bool:
    """Whether inputs of this shape are images, and the network has convolutions for them.

    Example:
        >>> convolves_images(Spec("lenet"), (1, 28, 28)), convolves_images(Spec("mlp"), (784,))
        (True, False)
    """
    return len(shape) == 3 and any(isinstance(part, nn.Conv2d) for part in spec.skeleton().modules())


def example_inputs(spec: Spec, shape: tuple[int, ...], count: int, dtype: torch.dtype | None = None) -> Tensor:
    """Inputs of this shape, the same in every process: uniform noise, or zeros and ones as whole numbers.

    Args:
        spec: the network that reads them.
        shape: of one input.
        count: how many.
        dtype: of real inputs, where it is known; else the network's own, or whole numbers if it reads only those.

    Example:
        >>> example_inputs(Spec("mlp", {"inputs": 4}), (4,), 2).shape
        torch.Size([2, 4])
    """
    x = torch.rand(count, *shape_read(spec, shape), generator=stream(0, "inputs"))
    if dtype is None:
        x = spec.cast(x)
        return x.round().long() if reads_tokens(spec, tuple(x.shape[1:])) else x
    return x.to(dtype) if dtype.is_floating_point else x.round().to(dtype)


def run_once(spec: Spec, shape: tuple[int, ...]) -> Tensor:
    """A network's logits for one input of this shape, in evaluation mode: for callers that watch its layers by hooks.

    Raises:
        ConfigError: if it cannot read such an input, or gives no logits.

    Example:
        >>> run_once(Spec("mlp", {"inputs": 4, "classes": 3}), (4,)).shape
        torch.Size([1, 3])
    """
    x = example_inputs(spec, shape, 1)
    try:
        with torch.no_grad(), seeded(0, "reading"):
            out = spec.skeleton()(x)
    except FuseError:
        raise
    except Exception as why:  # the user's own forward may raise anything
        raise ConfigError(
            f"model {spec.factory!r} cannot read an input of shape {tuple(x.shape[1:])}: {error_text(why)}"
        ) from why
    return logits_in(out, spec.factory)


@lru_cache(maxsize=16)
def reads_tokens(spec: Spec, shape: tuple[int, ...]) -> bool:
    """Whether a network reads whole numbers and no others, found by asking it.

    Example:
        >>> reads_tokens(Spec("mlp", {"inputs": 4}), (4,))
        False
    """
    if spec.is_ours and spec.prototype is None:
        form = own_form(spec)
        return form is not None and form.tokens > 0
    zeros = torch.zeros(2, *shape)
    return not _runs(spec, spec.cast(zeros)) and _runs(spec, zeros.long())


def _runs(spec: Spec, x: Tensor) -> bool:
    try:
        with torch.no_grad(), seeded(0, "reading"):
            spec.skeleton()(x)
    except Exception:  # the user's own forward may raise anything
        return False
    return True


class HidePadding:
    """A hook that tells a network of `transformers` which tokens are padding, and remembers it until the next batch.

    Attributes:
        padding: the token that pads.
        known: where the last batch had other tokens, (rows, positions); None before the first.

    Example:
        >>> import torch
        >>> hide = HidePadding(0)
        >>> hide(nn.Identity(), (torch.tensor([[5, 0]]),), {})[1]["attention_mask"]
        tensor([[1, 0]])
    """

    def __init__(self, padding: int) -> None:
        self.padding = padding
        self.known: Tensor | None = None

    def __call__(
        self,
        module: nn.Module,  # noqa: ARG002 - torch's signature
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The same call with a mask."""
        self.known = args[0] != self.padding
        return args, {**kwargs, "attention_mask": self.known.long()}


def hide_padding(module: nn.Module, padding: int) -> nn.Module:
    """The module, told where its texts end."""
    module.register_forward_pre_hook(HidePadding(padding), with_kwargs=True)
    return module


def padding_of(module: nn.Module) -> HidePadding | None:
    """The hook that a module was given, if it was."""
    return next((hook for hook in module._forward_pre_hooks.values() if isinstance(hook, HidePadding)), None)


UNKNOWN = "�"  # the name of token 0: padding, and characters that are not known
PLAIN = "\n" + "".join(sorted(set(string.printable) - set("\t\n\r\x0b\x0c")))
"""Those of plain English texts, for sites that agree on no others: ASCII and the end of a line."""


def token_names(vocabulary: Iterable[str]) -> tuple[str, ...]:
    """The vocabulary as names that can be printed: blanks and controls by their numbers.

    Example:
        >>> token_names(["a", " "])
        ('a', 'U+0020')
    """
    return tuple(c if c.isprintable() and not c.isspace() else f"U+{ord(c):04X}" for c in vocabulary)


class TextForm(Settings):
    """Texts of at most `length` characters, each a token: its place among the known ones, counted from 1.

    Token 0 fills texts up and stands for characters that are not known.

    Example:
        >>> form = TextForm(length=8, characters="ab ")
        >>> form.shape, form.vocabulary, form.bounds().tokens, str(form)
        ((8,), ('�', 'a', 'b', ' '), 4, 'texts of up to 8 characters, 3 of them known')
    """

    kind: Literal["texts"] = "texts"
    length: Annotated[PositiveInt, Field(le=1 << 16)]
    characters: Annotated[str, Field(min_length=1, max_length=1 << 16)]

    @model_validator(mode="after")
    def _check_characters(self) -> Self:
        if twice := [c for c, count in Counter(self.characters).items() if count > 1]:
            raise ValueError(f"characters name {twice[0]!r} twice; name each once")
        if odd := [c for c in self.characters if c == UNKNOWN or 0xD800 <= ord(c) <= 0xDFFF]:
            raise ValueError(f"{odd[0]!r} is no character of a text: it stands for what is unknown or for half of one")
        return self

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one text: its length."""
        return (self.length,)

    @property
    def vocabulary(self) -> tuple[str, ...]:
        """What each token stands for."""
        return (UNKNOWN, *self.characters)

    @property
    def token_names(self) -> tuple[str, ...]:
        """The vocabulary as names that can be printed."""
        return token_names(self.vocabulary)

    @property
    def tokens(self) -> int:
        """How many there are."""
        return 1 + len(self.characters)

    @property
    def is_normalized(self) -> bool:
        """Tokens are not scaled."""
        return False

    def bounds(self) -> InputForm:
        """Any token may stand anywhere."""
        return InputForm(self.shape, tokens=self.tokens)

    def differences(self, other: TextForm) -> str:
        """What tells this form from another, in words.

        Example:
            >>> TextForm(length=8, characters="abc").differences(TextForm(length=8, characters="bcd"))
            "texts with 'a', without 'd'"
        """
        mine, theirs = set(self.characters), set(other.characters)
        told = {"with": sorted(mine - theirs), "without": sorted(theirs - mine)}
        parts = [f"{word} {', '.join(map(repr, each[:6]))}" for word, each in told.items() if each]
        if parts:
            return "texts " + ", ".join(parts)
        if self.length != other.length:
            return f"texts of up to {self.length} characters"
        return "texts whose characters stand in another order"

    def __str__(self) -> str:
        return f"texts of up to {self.length} characters, {len(self.characters)} of them known"


Name = Annotated[str, Field(min_length=1, max_length=200)]
Scale = Literal["awaited", "moments", "site", "none"]

_HEADING = re.compile(r"(?P<name>[^\[\]]*[^\[\]\s])\s*\[(?P<unit>[^\[\]]+)\]")
_COLUMN = re.compile(r"(?P<name>[^\[\]:]+)(\[(?P<unit>[^\[\]]+)\])?(:(?P<levels>.*))?")


class NumericColumn(Settings):
    """Numbers, shifted and scaled; where one is missing, the mean stands."""

    name: Name
    kind: Literal["numeric"] = "numeric"
    unit: str = ""
    mean: float = 0.0
    std: PositiveFloat = 1.0
    indicator: bool = False

    @property
    def features(self) -> tuple[str, ...]:
        """The names of what it becomes."""
        return (self.name, f"{self.name} missing") if self.indicator else (self.name,)


class CategoricalColumn(Settings):
    """Categories: one column of zeros and ones for each but the first; where one is missing, the commonest stands."""

    name: Name
    kind: Literal["categorical"] = "categorical"
    levels: Annotated[tuple[Name, ...], Field(min_length=1, max_length=10_000)]
    mode: str = ""
    indicator: bool = False

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(set(self.levels)) < len(self.levels):
            raise ValueError(f"column {self.name!r} names a category twice")
        if self.mode and self.mode not in self.levels:
            raise ValueError(f"the commonest category of {self.name!r} is {self.mode!r}, which is none of its own")
        return self

    @property
    def features(self) -> tuple[str, ...]:
        """The names of what it becomes."""
        found = tuple(f"{self.name}={level}" for level in self.levels[1:])
        return (*found, f"{self.name} missing") if self.indicator else found


class TargetColumn(Settings):
    """What is to be predicted; numbers are shifted and scaled, so that a network sees unit variance."""

    name: Name
    unit: str = ""
    mean: float = 0.0
    std: PositiveFloat = 1.0


Column: TypeAlias = Annotated[NumericColumn | CategoricalColumn, Field(discriminator="kind")]


class TableForm(Settings):
    """The columns of a table in their order, what each becomes, and what is to be predicted.

    Attributes:
        kind: of form.
        scale: where means and deviations come from: sums of all sites, one site's rows, nowhere (numbers are taken as
            they are), or they are still awaited.
        columns: what is read, in the order in which a network reads it.
        targets: what is predicted.

    Example:
        >>> form = TableForm(columns=[NumericColumn(name="age", mean=50, std=10),
        ...                           CategoricalColumn(name="sex", levels=["f", "m"])])
        >>> form.features, form.shape, str(form)
        (('age', 'sex=m'), (2,), 'a table of age, sex')
    """

    kind: Literal["table"] = "table"
    scale: Scale = "none"
    columns: Annotated[tuple[Column, ...], Field(min_length=1, max_length=100_000)]
    targets: tuple[TargetColumn, ...] = ()

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = [column.name for column in (*self.columns, *self.targets)]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"the column {twice[0]!r} stands there twice; name each once, the target apart")
        if not self.features:
            raise ValueError("no column has more than one category; a network could tell nothing from them")
        return self

    @property
    def features(self) -> tuple[str, ...]:
        """The name of each feature, in order."""
        return tuple(name for column in self.columns for name in column.features)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one row: as many numbers as there are features."""
        return (len(self.features),)

    @property
    def is_normalized(self) -> bool:
        """Whether a tensor must still be shifted and scaled: never, for reading a table does it column by column."""
        return False

    @property
    def target_names(self) -> tuple[str, ...]:
        """The names of what is predicted."""
        return tuple(target.name for target in self.targets)

    def bounds(self) -> InputForm:
        """The range of its numbers: scaled ones are taken to lie in ±3."""
        return InputForm(self.shape, (-3.0,), (3.0,))

    def differences(self, other: TableForm) -> str:
        """In which column two tables differ, and how, in a few words.

        Example:
            >>> a, b = (TableForm(columns=[NumericColumn(name="age", mean=m)]) for m in (1, 2))
            >>> a.differences(b)
            "column 'age' has mean 1, there 2"
        """
        mine, theirs = ({c.name: c for c in (*form.columns, *form.targets)} for form in (self, other))
        for name in (*mine, *theirs):
            if name not in mine or name not in theirs:
                return f"column {name!r} is {'not there' if name not in theirs else 'only there'}"
            for key, value in mine[name].model_dump().items():
                there = theirs[name].model_dump().get(key)
                if value != there:
                    return f"column {name!r} has {key} {_plain(value)}, there {_plain(there)}"
        return "columns stand in another order"

    def __str__(self) -> str:
        names = [column.name for column in self.columns]
        shown = ", ".join(names[:8]) + (f", … ({len(names)} columns)" if len(names) > 8 else "")
        return f"a table of {shown}"


def _plain(value: object) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return ", ".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


def split_heading(heading: str) -> tuple[str, str]:
    """A column's name and unit, as the first line of a file has them.

    Example:
        >>> split_heading("chol [mg/dl]"), split_heading("age")
        (('chol', 'mg/dl'), ('age', ''))
    """
    found = _HEADING.fullmatch(heading.strip())
    return (found["name"].strip(), found["unit"].strip()) if found else (heading.strip(), "")


def parse_columns(texts: Sequence[str]) -> tuple[NumericColumn | CategoricalColumn, ...]:
    """Columns as a user types them: `age`, `chol[mg/dl]` for numbers, `sex:f|m` for categories.

    Example:
        >>> [column.name for column in parse_columns(["age[years]", "sex:f|m"])]
        ['age', 'sex']

    Raises:
        ConfigError: naming what cannot be read.
    """
    return tuple(_parse_column(text.strip()) for text in texts)


def _parse_column(text: str) -> NumericColumn | CategoricalColumn:
    found = _COLUMN.fullmatch(text)
    levels = [] if found is None else [level.strip() for level in (found["levels"] or "").split("|")]
    if found is None or (found["levels"] is not None and (found["unit"] or "" in levels or len(levels) < 2)):
        raise ConfigError(
            f"--columns: {text!r} is no column; write age or age[years] for numbers, sex:f|m for categories"
        )
    name = found["name"].strip()
    if found["levels"] is None:
        return NumericColumn(name=name, unit=(found["unit"] or "").strip())
    return CategoricalColumn(name=name, levels=tuple(levels))


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

"""Texts as rows of tokens: a vocabulary of characters, windows of equal length, and who wrote what."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from fedfuse.core.characters import UNKNOWN, token_names
from fedfuse.data.rows import Array, Rows
from fedfuse.errors import ConfigError
from fedfuse.tasks.language import NO_TARGET, PADDING


@dataclass(frozen=True, slots=True, eq=False)
class TextSplit:
    """Texts as tokens, their targets, who wrote each where that is known, and what tokens stand for."""

    x: Array
    y: Array
    owners: tuple[str, ...] = ()
    vocabulary: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.y)

    def take(self, index: Array) -> TextSplit:
        """The rows at these positions."""
        owners = tuple(self.owners[i] for i in index) if self.owners else ()
        return replace(self, x=self.x[index], y=self.y[index], owners=owners)

    def rows(self) -> Rows:
        """The rows as tensors."""
        return Rows(torch.from_numpy(self.x.copy()), torch.from_numpy(self.y.copy()))


@dataclass(frozen=True, slots=True)
class TextHalves:
    """Texts to train on and texts to judge on, and the names of their targets."""

    train: TextSplit
    test: TextSplit
    classes: tuple[str, ...]


def vocabulary_of(texts: Iterable[str]) -> tuple[str, ...]:
    """The unknown, then every character of some texts in order.

    Example:
        >>> vocabulary_of(["ba", "ac"])
        ('�', 'a', 'b', 'c')
    """
    return (UNKNOWN, *sorted(set().union(*texts)))


def encode(text: str, vocabulary: Sequence[str]) -> Array:
    """A text's tokens; what the vocabulary lacks is unknown.

    Example:
        >>> encode("abx", ("�", "a", "b"))
        array([1, 2, 0])
    """
    places = {character: place for place, character in enumerate(vocabulary)}
    return np.array([places.get(character, PADDING) for character in text], dtype=np.int64)


def cut_windows(tokens: Array, length: int) -> tuple[Array, Array]:
    """Windows of so many tokens, one behind the other, and the token that follows each of theirs.

    The last window is filled up with padding, which has no target.

    Example:
        >>> x, y = cut_windows(np.array([1, 2, 3, 4]), 2)
        >>> x.tolist(), y.tolist()
        ([[1, 2], [3, 0]], [[2, 3], [4, -100]])
    """
    count = max(0, -(-(len(tokens) - 1) // length))
    x = np.full((count, length), PADDING, dtype=np.int64)
    y = np.full((count, length), NO_TARGET, dtype=np.int64)
    x.reshape(-1)[: len(tokens) - 1] = tokens[:-1] if count else []
    y.reshape(-1)[: len(tokens) - 1] = tokens[1:] if count else []
    return x, y


def language_halves(
    texts: Mapping[str, str], length: int, fraction: float, vocabulary: Sequence[str] = ()
) -> TextHalves:
    """Each writer's text cut into windows: the first part of it to train on, the last to judge on.

    Args:
        texts: by writer.
        length: of a window, in characters.
        fraction: of each text that is judged on.
        vocabulary: where it is fixed; else the characters of all training texts.
    """
    begins = {who: round((1 - fraction) * len(text)) for who, text in texts.items()}
    known = tuple(vocabulary) or vocabulary_of(text[: begins[who]] for who, text in texts.items())
    train = [cut_windows(encode(text[: begins[who]], known), length) for who, text in texts.items()]
    test = [cut_windows(encode(text[begins[who] :], known), length) for who, text in texts.items()]
    owners = tuple(who for who, (x, _) in zip(texts, train, strict=True) for _ in x)
    return TextHalves(_join(train, known, owners), _join(test, known), token_names(known))


def _join(parts: Sequence[tuple[Array, Array]], vocabulary: tuple[str, ...], owners: tuple[str, ...] = ()) -> TextSplit:
    if not any(len(x) for x, _ in parts):
        raise ConfigError("there is no text of two characters, so nothing is to be told; give longer texts")
    return TextSplit(np.concatenate([x for x, _ in parts]), np.concatenate([y for _, y in parts]), owners, vocabulary)


def pad(texts: Sequence[str], length: int, vocabulary: Sequence[str]) -> Array:
    """Texts as rows of tokens, cut or filled up to one length.

    Example:
        >>> pad(["abc", "b"], 2, ("�", "a", "b"))
        array([[1, 2], [2, 0]])
    """
    x = np.full((len(texts), length), PADDING, dtype=np.int64)
    for row, text in enumerate(texts):
        tokens = encode(text[:length], vocabulary)
        x[row, : len(tokens)] = tokens
    return x

"""Texts as a network reads them: which characters there are, in the order of their tokens, and how many at once."""

from __future__ import annotations

import string
from collections import Counter
from collections.abc import Iterable
from typing import Annotated, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from fedfuse.core.inputs import InputForm
from fedfuse.core.settings import Settings

UNKNOWN = "�"  # what stands for the token of padding and of characters nobody knew
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
    """Texts of at most so many characters, each a token: its place among the known ones, counted from 1.

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

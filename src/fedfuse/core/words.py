"""Words a user typed, and the nearest ones that are known."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable

from fedfuse.errors import ConfigError


def suggest(word: str, known: Iterable[str]) -> str:
    """The end of a sentence about an unknown word: the nearest known one, if any is near.

    Example:
        >>> suggest("krumm", ["krum", "median"])
        "; did you mean 'krum'?"
    """
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ";"


def check_options(who: str, given: Collection[str], known: Collection[str]) -> None:
    """Refuse the first option nobody reads, with the nearest one that somebody does.

    Example:
        >>> check_options("model 'mlp'", ["hiden"], ["hidden", "classes"])
        Traceback (most recent call last):
        ...
        fedfuse.errors.ConfigError: model 'mlp' has no option 'hiden'; did you mean 'hidden'? it has hidden, classes
    """
    for key in given:
        if key not in known:
            has = ", ".join(known) or "none"
            raise ConfigError(f"{who} has no option {key!r}{suggest(key, known)} it has {has}")

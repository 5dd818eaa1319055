"""Every error fedfuse raises on purpose.

Each message is one sentence that says who, what came, what was expected and what to do.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable


class FuseError(Exception):
    """Base of every error we raise on purpose; `exit_code` is what the command line returns."""

    exit_code = 1


class ConfigError(FuseError, ValueError):
    """What the user asked for cannot be: a misspelt key, a missing file, an impossible number."""

    exit_code = 2


class DataMissing(ConfigError):
    """A public data set is not here, or not all of it."""


class RecipeError(FuseError, ValueError):
    """The parts of a recipe do not fit each other, or do not fit the model or the data."""

    exit_code = 2


class Refused(FuseError):
    """One client's reply broke the contract; the round goes on without it.

    Attributes:
        client: who sent it, as the transport says.
        field: which part was wrong.
        got: what came.
        expected: what should have come.

    Example:
        >>> raise Refused("site-3", "num_examples", -9, "a number in (0, 1e6]")
        Traceback (most recent call last):
        ...
        fedfuse.errors.Refused: site-3: num_examples is -9, expected a number in (0, 1e6]
    """

    def __init__(self, client: str, field: str, got: object, expected: str) -> None:
        self.client, self.field, self.got, self.expected = client, field, _short(got), expected
        super().__init__(f"{_short(client)}: {field} is {self.got}, expected {expected}")

    def facts(self) -> dict[str, str]:
        """The refusal as plain strings, for the ledger."""
        return {"client": self.client, "field": self.field, "got": self.got, "expected": self.expected}


class QuorumLost(FuseError):
    """Too few clients answered well enough for the round to count."""

    exit_code = 3


class ClientsDropped(FuseError):
    """A run ended without some clients that had crashed, and its file does not allow that."""

    exit_code = 4


class NotConverged(FuseError):
    """A solver stopped before it reached its tolerance."""


class MethodFault(FuseError):
    """A part of a method returned what no round can go on with; no client is to blame for it."""


def error_text(why: BaseException) -> str:
    """A third-party exception as part of one of our messages: its type and the first line of what it says.

    Example:
        >>> error_text(RuntimeError("shapes differ"))
        'RuntimeError: shapes differ'
        >>> error_text(MemoryError())
        'MemoryError: no reason given'
    """
    lines = str(why).strip().splitlines()
    return f"{type(why).__name__}: {lines[0][:200] if lines else 'no reason given'}"


def printable(text: str, keep: str = "") -> str:
    r"""A text whose control characters are spelt out, so that a file's name cannot steer a terminal.

    Args:
        text: from any source.
        keep: control characters that may stay, such as line ends.

    Example:
        >>> printable("site\x1b[2J.safetensors")
        'site\\x1b[2J.safetensors'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


def _short(value: object, limit: int = 120) -> str:
    """A value as text that cannot flood a log, whatever a client put in it."""
    text = printable((value if isinstance(value, str) else repr(value))[: 2 * limit])
    return text if len(text) <= limit else text[: limit - 1] + "…"


def suggest(word: str, known: Iterable[str]) -> str:
    """The end of a sentence about an unknown word: the nearest known one, if any is near.

    Example:
        >>> suggest("krumm", ["krum", "median"])
        "; did you mean 'krum'?"
    """
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ";"


def check_options(who: str, given: Collection[str], known: Collection[str]) -> None:
    """Refuse the first unknown option, with the nearest known one.

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

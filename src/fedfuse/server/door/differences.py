"""Where two updates differ first, in words fit for a terminal."""

from __future__ import annotations

from collections.abc import Mapping

from fedfuse.core.messages import Form
from fedfuse.server.door.forms import form_words


def first_difference(got: Mapping[str, Form], expected: Mapping[str, Form]) -> tuple[str, str, str] | None:
    """The first tensor in which two layouts differ, and how it is in each, in words."""
    for name in sorted(got.keys() | expected.keys()):
        if got.get(name) != expected.get(name):
            here, there = (form_words(forms[name]) if name in forms else "missing" for forms in (got, expected))
            return shorten(name), here, there
    return None


def shorten(text: object) -> str:
    """A word from a file, fit for a terminal."""
    return ascii(text)[:80] if not str(text).isprintable() else str(text)[:80]

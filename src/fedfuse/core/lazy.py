"""Packages whose names are imported when they are first used, so that asking for help costs no more than help."""

from __future__ import annotations

import contextlib
import gc
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any


def lazy_names(package: dict[str, Any], homes: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """A package's `__getattr__`: it imports the module a name lives in and remembers what was found there.

    Args:
        package: its `globals()`.
        homes: the names that live in each module.
    """
    home_of = {name: home for home, names in homes.items() for name in names}

    def find(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module {package['__name__']!r} has no attribute {name!r}")
        package[name] = found = getattr(importlib.import_module(home_of[name]), name)
        return found

    return find


@contextlib.contextmanager
def without_collecting() -> Iterator[None]:
    """Look for no garbage for a while: large packages make a million objects that stay, and each is looked at often."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()

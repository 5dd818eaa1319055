"""Seconds, by what they were spent on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(slots=True)
class Clock:
    """Adds up the seconds of each kind of work.

    Example:
        >>> clock = Clock()
        >>> with clock.counting("server"):
        ...     pass
        >>> clock.seconds["server"] >= 0, clock.seconds.get("diagnostics", 0.0)
        (True, 0.0)
    """

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def counting(self, what: str) -> Iterator[None]:
        """Count the seconds inside under a name."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[what] = self.seconds.get(what, 0.0) + time.perf_counter() - began

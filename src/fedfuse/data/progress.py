"""A progress bar on a terminal, and silence elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)


@contextmanager
def bar(what: str, total: int | None, *, done: int = 0, in_bytes: bool = False) -> Iterator[Callable[[int], None]]:
    """A bar that fills as the function it gives is called with how much was done.

    Example:
        >>> with bar("reading", 3) as advance:
        ...     advance(3)
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn() if in_bytes else MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    hidden = not sys.stderr.isatty()
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=hidden) as progress:
        task = progress.add_task(what, total=total, completed=done)
        yield lambda amount: progress.advance(task, amount)

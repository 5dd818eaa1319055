"""How the command line ends when it is told to: nothing of it stays behind."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_TYPERS = 130  # the exit code that typer makes of any interruption


class Terminated(KeyboardInterrupt):
    """Somebody ended the process by a signal; it stops as by Ctrl-C and leaves nothing behind."""

    def __init__(self, number: int) -> None:
        self.exit_code = 128 + number  # as shells tell it
        super().__init__(number)


def stop_code(why: KeyboardInterrupt) -> int:
    """The exit code of a command that was stopped: 1 after Ctrl-C, a shell's own for any other signal."""
    return why.exit_code if isinstance(why, Terminated) else 1


def interruption(end: BaseException) -> KeyboardInterrupt | None:
    """What stopped a command, where it was stopped and has not said so: typer makes an exit of its own of it."""
    found: BaseException | None = end if not isinstance(end, SystemExit) or end.code == _TYPERS else None
    while found is not None and not isinstance(found, KeyboardInterrupt):
        found = found.__context__
    return found


@contextmanager
def stop_cleanly() -> Iterator[None]:
    """Within, the signals that end a process are an exception, so that workers and temporary folders go with it."""

    def stop(number: int, _frame: object) -> None:
        signal.signal(number, signal.SIG_IGN)  # a second one must not interrupt the tidying up
        raise Terminated(number)

    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]  # Windows lacks one
    ours = [number for number in numbers if signal.getsignal(number) is signal.SIG_DFL]  # `nohup` says otherwise
    if threading.current_thread() is not threading.main_thread():
        ours = []  # only the main thread may set handlers
    for number in ours:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)

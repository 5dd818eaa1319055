"""How worker processes start: forked off a server that has imported what they need.

Importing this module imports no torch, so that a command can start that server first of all, and both import at once.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.context import ForkServerContext, SpawnContext
from pathlib import Path

from fedfuse.errors import ConfigError

_PRELOAD = ["fedfuse.models", "fedfuse.engines.preload"]  # what workers find imported when they are forked
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
# glibc would give large pieces back to the system at once: a third of an evaluation is fetching them again
_KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 26), "MALLOC_TRIM_THRESHOLD_": str(1 << 26)}

# they are started by `python -c`, which looks for modules in the current folder first: a json.py there would be run
_NOTHING_FROM_HERE = {"PYTHONSAFEPATH": "1"}


def process_context() -> ForkServerContext | SpawnContext:
    """How processes start: forked off one that has imported torch, where the system can."""
    # never "fork": a copy of a process with threads can hang in a lock that one of them held
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    return context


def start_early() -> None:
    """Let the server import while our caller still prepares its data; where there is none, do nothing.

    Raises:
        ConfigError: if its socket cannot have a name.
    """
    if isinstance(process_context(), ForkServerContext):
        with start_conditions(), _without_interrupts():
            _start_server()


@contextmanager
def start_conditions() -> Iterator[None]:
    """Processes started within have one thread, find modules where we do, and look for a main one that is a file."""
    with _environment(_ONE_THREAD | _KEEP_MEMORY | _NOTHING_FROM_HERE), main_if_a_file():
        yield


def _start_server() -> None:
    try:
        multiprocessing.forkserver.ensure_running()
    except OSError as why:
        if "AF_UNIX" not in str(why):
            raise
        raise ConfigError(
            f"worker processes cannot be reached: the folder for temporary files, {tempfile.gettempdir()}, has too "
            "long a name for a socket; set TMPDIR to a shorter one, or use workers=0"
        ) from why


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Processes started within ignore Ctrl-C from their start on: this process handles it and ends them."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # starting it later would unblock the signal again
    old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Processes started within inherit these variables."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def main_if_a_file() -> Iterator[None]:
    """New processes import the main module; one that was typed or piped in has no file and must not be looked for."""
    main = sys.modules["__main__"]
    path = getattr(main, "__file__", None)
    if path is None or Path(path).exists():
        yield
        return
    del main.__file__
    try:
        yield
    finally:
        main.__file__ = path

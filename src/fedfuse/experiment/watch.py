"""Callbacks of a run: what happens in it, told as it happens to progress bars, loggers and programs of the user's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol


class Watcher(Protocol):
    """Is called as a run makes progress; the methods must return quickly."""

    def run_started(self, name: str, folder: Path, config: Mapping[str, Any]) -> None:
        """An experiment starts in a run directory, with these settings."""
        ...

    def method_started(self, label: str, seed: int, done: int, rounds: int, clients: int) -> None:
        """A method starts on a seed, with some rounds done already and so many clients to ask in each."""
        ...

    def client_done(self, client: str, seconds: float, remembered: bool) -> None:
        """A client answered."""
        ...

    def server_progress(self, what: str, done: int, total: int) -> None:
        """A long step of the server's has come so far."""
        ...

    def round_done(self, label: str, seed: int, round_: int, scores: Mapping[str, Any]) -> None:
        """A round was written to the ledger; the scores are its line."""
        ...

    def run_done(self) -> None:
        """Every method has run on every seed."""
        ...


class Callback:
    """A watcher that does nothing: override what you want to know of.

    Example:
        >>> class Best(Callback):
        ...     accuracy = 0.0
        ...
        ...     def round_done(self, label, seed, round_, scores):
        ...         self.accuracy = max(self.accuracy, scores["accuracy"])
    """

    def run_started(self, name: str, folder: Path, config: Mapping[str, Any]) -> None:
        """An experiment starts in a run directory, with these settings."""

    def method_started(self, label: str, seed: int, done: int, rounds: int, clients: int) -> None:
        """A method starts on a seed, with some rounds done already and so many clients to ask in each."""

    def client_done(self, client: str, seconds: float, remembered: bool) -> None:
        """A client answered."""

    def server_progress(self, what: str, done: int, total: int) -> None:
        """A long step of the server's has come so far."""

    def round_done(self, label: str, seed: int, round_: int, scores: Mapping[str, Any]) -> None:
        """A round was written to the ledger; the scores are its line."""

    def run_done(self) -> None:
        """Every method has run on every seed."""


class Several:
    """Several watchers as one."""

    def __init__(self, *watchers: Watcher) -> None:
        self._watchers = watchers

    def run_started(self, name: str, folder: Path, config: Mapping[str, Any]) -> None:
        """Tell all."""
        for watcher in self._watchers:
            watcher.run_started(name, folder, config)

    def method_started(self, label: str, seed: int, done: int, rounds: int, clients: int) -> None:
        """Tell all."""
        for watcher in self._watchers:
            watcher.method_started(label, seed, done, rounds, clients)

    def client_done(self, client: str, seconds: float, remembered: bool) -> None:
        """Tell all."""
        for watcher in self._watchers:
            watcher.client_done(client, seconds, remembered)

    def server_progress(self, what: str, done: int, total: int) -> None:
        """Tell all."""
        for watcher in self._watchers:
            watcher.server_progress(what, done, total)

    def round_done(self, label: str, seed: int, round_: int, scores: Mapping[str, Any]) -> None:
        """Tell all."""
        for watcher in self._watchers:
            watcher.round_done(label, seed, round_, scores)

    def run_done(self) -> None:
        """Tell all."""
        for watcher in self._watchers:
            watcher.run_done()

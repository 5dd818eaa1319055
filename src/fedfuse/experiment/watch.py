"""Observers of a run: a progress bar, or none."""

from __future__ import annotations

from typing import Protocol


class Watcher(Protocol):
    """Is called as a run makes progress; the methods must return quickly."""

    def method_started(self, label: str, seed: int, done: int, rounds: int, clients: int) -> None:
        """A method starts on a seed, with some rounds done already and so many clients to ask in each."""
        ...

    def client_done(self, client: str, seconds: float, remembered: bool) -> None:
        """A client answered."""
        ...

    def round_done(self, label: str, seed: int, round_: int, accuracy: float | None) -> None:
        """A round was written to the ledger."""
        ...


class Quiet:
    """A watcher that does nothing."""

    def method_started(self, label: str, seed: int, done: int, rounds: int, clients: int) -> None:
        """Nothing."""

    def client_done(self, client: str, seconds: float, remembered: bool) -> None:
        """Nothing."""

    def round_done(self, label: str, seed: int, round_: int, accuracy: float | None) -> None:
        """Nothing."""

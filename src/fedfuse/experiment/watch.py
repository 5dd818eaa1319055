"""Someone who is told what happens in a run: a progress bar, or nobody."""

from __future__ import annotations

from typing import Protocol


class Watcher(Protocol):
    """Told as things happen; must not take long."""

    def method_started(self, label: str, seed: int, done: int, rounds: int, clients: int) -> None:
        """A method starts on a seed, with some rounds done already and so many clients to ask in each."""
        ...

    def client_done(self, client: str, seconds: float, remembered: bool) -> None:
        """A client answered."""
        ...

    def round_done(self, label: str, seed: int, round_: int, accuracy: float | None) -> None:
        """A round is on record."""
        ...


class Quiet:
    """Nobody."""

    def method_started(self, label: str, seed: int, done: int, rounds: int, clients: int) -> None:
        """Nothing."""

    def client_done(self, client: str, seconds: float, remembered: bool) -> None:
        """Nothing."""

    def round_done(self, label: str, seed: int, round_: int, accuracy: float | None) -> None:
        """Nothing."""

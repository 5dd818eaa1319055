"""What a roster arranges beside who answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Terms:
    """What a roster has arranged beside who answers; the loop, the door and the ledger go by it.

    Attributes:
        always: who is asked in every round, beside those chosen.
        shared_rows: rows of the server's that every client was given: they count in its num_examples.
        shared_bytes: bytes of them in all, sent before the first round.
        reveals: in plain words, what was given to whom.
    """

    always: tuple[str, ...] = ()
    shared_rows: int = 0
    shared_bytes: int = 0
    reveals: tuple[str, ...] = ()

    def claimable_examples(self, declared: Mapping[str, int]) -> dict[str, int]:
        """How many examples each client may claim, the lent ones among them.

        Example:
            >>> Terms(shared_rows=5).claimable_examples({"a": 10})
            {'a': 15}
        """
        return {client: count + self.shared_rows for client, count in declared.items()}

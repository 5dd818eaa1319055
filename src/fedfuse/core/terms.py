"""What a roster arranges beside who answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Terms:
    """What a roster has arranged beside who answers; the loop, the door and the ledger go by it.

    Attributes:
        always: who is asked in every round, beside those chosen.
        lent: rows of the server's that every client was given: they count in its num_examples.
        sent: bytes of them in all, sent before the first round.
        reveals: in plain words, what was given to whom.
    """

    always: tuple[str, ...] = ()
    lent: int = 0
    sent: int = 0
    reveals: tuple[str, ...] = ()

    def enrolled(self, declared: Mapping[str, int]) -> dict[str, int]:
        """How many examples each client may claim, the lent ones among them.

        Example:
            >>> Terms(lent=5).enrolled({"a": 10})
            {'a': 15}
        """
        return {client: count + self.lent for client, count in declared.items()}

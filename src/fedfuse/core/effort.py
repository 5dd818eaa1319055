"""How much of a network a client's parts take: passes per row, said by the parts themselves."""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

from fedfuse.core.seams import PlainEvidence, ServerPart
from fedfuse.core.settings import LocalSettings
from fedfuse.core.spec import Spec

TRAINING_PASSES = 3.0
"""What plain training takes of a row: a pass forward, the gradient of what goes in, the gradient of the weights."""


class Effort(NamedTuple):
    """What the work of a client's round is counted by.

    Attributes:
        spec: the network.
        shape: of one input.
        round: counted from 0.
        rows: how many the client has.
        settings: how it trains.
    """

    spec: Spec
    shape: tuple[int, ...]
    round: int
    rows: float
    settings: LocalSettings


@runtime_checkable
class HasPasses(Protocol):
    """An objective that takes more of the network than plain training does says how much."""

    def passes(self, effort: Effort) -> float:
        """Passes through the network per row of a batch, a pass forward being one and plain training three."""
        ...


def passes_of(objective: object, effort: Effort) -> float:
    """What an objective takes of a row: what it says, else what its base takes, else plain training.

    Example:
        >>> passes_of(object(), Effort(Spec("mlp"), (4,), 0, 10, LocalSettings()))
        3.0
    """
    if isinstance(objective, HasPasses):
        return objective.passes(effort)
    base = getattr(objective, "base", None)
    return TRAINING_PASSES if base is None else passes_of(base, effort)


class CurvatureEvidence(PlainEvidence):
    """Evidence that looks at the curvature of a client's loss: its FLOPs have a column of their own."""

    __slots__ = ()


class DiagnosticStep(ServerPart):
    """A step that only notes something for the reader: its seconds are counted apart from the method's."""

    __slots__ = ()

"""Beside the seams: what comes before the first round, with the plainest choice for each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

from fedfuse.core.messages import Form
from fedfuse.core.model import Single
from fedfuse.core.params import Layout
from fedfuse.core.state import Bench, ServerState
from fedfuse.tasks import CLASSIFICATION, Task


class ModelPreparation(Protocol):
    """The network a method trains, made of the network the user chose."""

    def __call__(self, start: Single, classes: int, seed: int, task: Task = CLASSIFICATION) -> Single:
        """The start with the layers or outputs the method needs; one that has them already stays as it is."""

    def missing(self, layout: Layout, forms: Mapping[str, Form], classes: int) -> str | None:
        """In plain words, what a network of this layout lacks that the method would have given it; None if nothing."""


class FirstStep(Protocol):
    """What a server does once, before it first speaks to a client."""

    @property
    def needs(self) -> frozenset[str]:
        """As for an aggregator."""

    def __call__(self, state: ServerState, bench: Bench) -> ServerState:
        """The state the first round begins with."""


@dataclass(frozen=True, slots=True)
class AsChosen:
    """The network as the user chose it."""

    def __call__(self, start: Single, classes: int, seed: int, task: Task = CLASSIFICATION) -> Single:  # noqa: ARG002
        """The start as it is."""
        return start

    def missing(self, layout: Layout, forms: Mapping[str, Form], classes: int) -> str | None:  # noqa: ARG002
        """Nothing: any network will do."""
        return None


@dataclass(frozen=True, slots=True)
class NothingBefore:
    """Nothing comes before the first round."""

    needs: ClassVar[frozenset[str]] = frozenset()

    def __call__(self, state: ServerState, bench: Bench) -> ServerState:  # noqa: ARG002 - the seam's signature
        """The state as it is."""
        return state

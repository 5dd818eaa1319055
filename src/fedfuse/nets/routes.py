"""Choosing who answers an input before everybody has answered it: at a layer, or by where its features lie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from fedfuse.errors import ConfigError

Count: TypeAlias = int | Literal["all"]
LayerChoice: TypeAlias = int | str


@runtime_checkable
class Route(Protocol):
    """A rule that chooses the members before they run: those not chosen stop early and answer zeros."""

    def choose(self, confidence: Tensor) -> Tensor:
        """The members' confidence (k, n) to who runs on which input, true or false (k, n)."""
        ...


@dataclass(frozen=True, slots=True)
class AtLayer:
    """AMS decided at a layer: only the members in whom it responds most strongly run to the end.

    A member's confidence is the largest output of the layer, before the activation; the k largest are chosen, ties to
    the lowest client, and their logits are added. At a network's last layer this is AMS itself.

    Attributes:
        k: how many members run to the end, or "all".
        layer: "first"; a number, counting layers with weights from 1; or a layer's name.

    Example:
        >>> AtLayer().choose(torch.tensor([[1.0, 5.0], [2.0, 5.0]]))
        tensor([[False,  True],
                [ True, False]])
    """

    k: Count = 1
    layer: LayerChoice = "first"

    def __post_init__(self) -> None:
        check_count("AMS", self.k)
        number = isinstance(self.layer, int) and not isinstance(self.layer, bool) and self.layer >= 1
        if not number and not (isinstance(self.layer, str) and self.layer):
            raise ConfigError(
                f"AMS: layer is {str(self.layer)[:40]!r}, expected 'first', a number from 1 on or a layer's name"
            )

    def choose(self, confidence: Tensor) -> Tensor:
        """The k most confident members of each input."""
        return largest(confidence, self.k)

    def __call__(self, weights: Tensor, logits: Tensor) -> Tensor:  # noqa: ARG002 - members not chosen are zero
        """The sum of the chosen members' logits."""
        return logits.sum(0)


@dataclass(frozen=True, slots=True)
class Nearest:
    """AMS by distance: the members to whose own rows an input's features are nearest answer, by the sum of logits.

    The confidence is −d_j(x), the Mahalanobis distance of `FeatureRegion` in what member j's last layer reads, whose
    moments its client has sent. The k nearest are chosen, ties to the lowest client.

    Example:
        >>> Nearest().choose(torch.tensor([[-1.0, -5.0], [-2.0, -0.5]]))
        tensor([[ True, False],
                [False,  True]])
    """

    k: Count = 1

    def __post_init__(self) -> None:
        check_count("AMS", self.k)

    def choose(self, confidence: Tensor) -> Tensor:
        """The k nearest members of each input."""
        return largest(confidence, self.k)

    def __call__(self, weights: Tensor, logits: Tensor) -> Tensor:  # noqa: ARG002 - members not chosen are zero
        """The sum of the chosen members' logits."""
        return logits.sum(0)


def largest(confidence: Tensor, count: Count) -> Tensor:
    """Which members have the `count` largest confidences, per input; of equals the first (k, n).

    Example:
        >>> largest(torch.tensor([[1.0], [1.0], [0.0]]), 1)[:, 0].tolist()
        [True, False, False]
    """
    if count == "all" or count >= len(confidence):
        return torch.ones_like(confidence, dtype=torch.bool)
    best = confidence.sort(stable=True, dim=0, descending=True).indices[:count]
    return torch.zeros_like(confidence, dtype=torch.bool).scatter_(0, best, True)


def check_count(who: str, count: object) -> None:
    """Refuse a number of members that is none."""
    if count != "all" and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
        raise ConfigError(f"{who} takes {str(count)[:40]!r} members, expected a whole number from 1 on, or 'all'")

"""How far above the others one client's say may be: an operator's limits, and the robust rule behind them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat

from fedfuse.core.settings import Settings

FEW = 5  # fewer clients have no robust centre
_NOTHING = 1e-9  # what is smaller has no say to be compared: squared gradients of rows known by heart, say
_SIGMA = 1.4826  # the median distance from the median, times this, is a Gaussian's standard deviation

Over = Literal["refuse", "clip", "off"]


class Bounds(Settings):
    """How far above the others a client's levers may be.

    Attributes:
        ratio: always allowed, of each lever and of their product: this multiple of the median.
        spread: also allowed: so many robust deviations above the median, on a log scale; of the product half as many.
        together: whether what a client's levers make together is bounded too.
        few: with fewer than five clients: this multiple of what the brief or the median gives.
        share: the largest share of all examples that one client may have by its own word.
        margin: whoever exceeds a bound by less than this factor is weakened to it: honest clients differ that much.
        over: whether whoever exceeds it by more is refused, or weakened too; "off" compares nobody with anybody.
    """

    ratio: Annotated[float, Field(gt=1)] = 2.0
    spread: NonNegativeFloat = 3.0
    together: bool = True
    few: Annotated[float, Field(gt=1)] = 100.0
    share: Annotated[float, Field(gt=0, le=1)] = 0.5
    margin: Annotated[float, Field(ge=1)] = 1000.0
    over: Over = "refuse"

    def limit_together(self, values: Sequence[float]) -> float:
        """The most that a client's levers may make together in a layer: half as many deviations as of each alone.

        Example:
            >>> apart = [1.0, 2.0, 4.0, 8.0, 16.0]
            >>> Bounds(spread=2.0).limit_together(apart) == Bounds(spread=1.0).limit(apart)
            True
        """
        return self.model_copy(update={"spread": self.spread / 2}).limit(values)

    def limit(self, values: Sequence[float], expected: float = 0.0) -> float:
        """The most a lever may be, given everybody's; infinite where nothing is known.

        Args:
            values: of every client.
            expected: what the brief says the lever is about, 0 if it says nothing; asked where clients are few.

        Example:
            >>> Bounds(ratio=6.0).limit([1.0, 1.0, 2.0, 1.0, 1.0, 1e9])
            6.0
            >>> Bounds(few=100).limit([1.0, 1e9], expected=3.0), Bounds().limit([0.0, 0.0, 0.0, 0.0, 1.0])
            (300.0, inf)
        """
        middle = statistics.median(values)
        if len(values) < FEW:
            known = max(expected, middle if len(values) > 2 else 0.0)
            return self.few * known if known > _NOTHING else math.inf
        if not _NOTHING < middle < math.inf:
            return math.inf
        logs = [math.log(max(value, _NOTHING)) for value in values]
        centre = math.log(middle)
        deviation = _SIGMA * statistics.median(abs(x - centre) for x in logs)
        return math.exp(min(centre + max(math.log(self.ratio), self.spread * deviation), 700.0))


AMONG_OWN = Bounds(ratio=2.5, spread=4.0, together=False)
"""For clients that a simulation made itself: wide, so that honest ones, however different, are hardly ever weakened."""

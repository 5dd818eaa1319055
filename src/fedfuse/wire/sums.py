"""Sums of several sites' weights as one message: the mean as any reader takes it, and the sum it was rounded from.

A mean of weights is Σ c_k w_k / Σ c_k. A region that sent its mean alone would round it to the network's precision, and
fusing regions would differ from fusing their sites. So a sum carries Σ c_k w_k in float64 too, under notes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fedfuse.core.messages import Form
from fedfuse.core.params import Params
from fedfuse.wire.codec import LazyParams, Malformed, forms_of, piece_of
from fedfuse.wire.messages import NOTE

SUM_NAME = "sum of sites"  # what a sum without a name of its own is called
SUM = "sum/"  # the kind of notes that carry the float64 sums
_MOST_SITES = 10**9
_MOST_WEIGHT = 1e15


@dataclass(frozen=True, slots=True)
class Summed:
    """What the header of a sum says of it.

    Attributes:
        sites: how many sites are in it.
        by: by what they weigh: their "examples", alike as "clients", or in sums of "evidence" as what they bring.
        weight: Σ c_k, by which the sum is divided to be a mean.
    """

    sites: int
    by: str
    weight: float

    @classmethod
    def of(cls, header: Mapping[str, Any]) -> Summed | None:
        """What a header says, None of one site's own update.

        Raises:
            Malformed: if it says what no sum can be.

        Example:
            >>> Summed.of({"sums": {"sites": 3, "by": "examples", "weight": 90.0}}).sites
            3
        """
        told = header.get("sums")
        if told is None:
            return None
        match told:
            case {"sites": int(sites), "by": "examples" | "clients" | "evidence" as by, "weight": int(w) | float(w)}:
                if 1 <= sites <= _MOST_SITES and 0 < w <= _MOST_WEIGHT:
                    return cls(sites, by, float(w))
        raise Malformed(f"its header tells of an impossible sum of sites: {str(told)[:80]}")

    def to_json(self) -> dict[str, Any]:
        """Plain data for a header."""
        return {"sites": self.sites, "by": self.by, "weight": self.weight}


class SummedParams(LazyParams):
    """The mean of several sites' weights that still knows the float64 sum it was rounded from.

    What changes the mean makes another mapping of it and leaves the sum behind, so the two cannot disagree.
    """

    __slots__ = ("totals", "weight")

    def __init__(self, mean: LazyParams, totals: Params, weight: float) -> None:
        super().__init__(mean.forms, mean.piece, mean.offsets, mean.resident)
        self.totals, self.weight = totals, weight


def sum_forms(forms: Mapping[str, Form]) -> dict[str, Form]:
    """The forms of the notes that carry the sums of tensors of these forms; counters have none.

    Example:
        >>> sum_forms({"w": Form((2,), torch.float32), "n": Form((), torch.int64)})
        {'~sum/w': Form(shape=(2,), dtype=torch.float64)}
    """
    floating = {n: f for n, f in forms.items() if f.dtype.is_floating_point and not n.startswith(NOTE)}
    return {f"{NOTE}{SUM}{name}": Form(form.shape, torch.float64) for name, form in floating.items()}


def find_odd_mean(mean: Params, totals: Params, weight: float, size: int = 1 << 20) -> str | None:
    """The first tensor that is not its sum divided by the weight and rounded once.

    Example:
        >>> sums = {"w": torch.tensor([1.0, 2.0], dtype=torch.float64)}
        >>> find_odd_mean({"w": torch.tensor([0.5, 1.0])}, sums, 2.0), find_odd_mean({"w": torch.ones(2)}, sums, 2.0)
        (None, 'w')
    """
    for name, form in forms_of(totals).items():
        count = math.prod(form.shape)
        for begin in range(0, count, size):
            end = min(begin + size, count)
            piece = piece_of(mean, name, begin, end)
            if not (piece_of(totals, name, begin, end) / weight).to(piece.dtype).equal(piece):
                return name
    return None

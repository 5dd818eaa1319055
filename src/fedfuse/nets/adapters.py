"""Low-rank adapters among the tensors of a network: pairs of factors, whose product moves a weight."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

_SIDES = (("lora_A", "lora_B"), ("lora_embedding_A", "lora_embedding_B"))
PARTS = frozenset({side for pair in _SIDES for side in pair} | {"lora_magnitude_vector"})
"""What a part of a tensor's name is, if it belongs to an adapter."""

INPUTS = "inputs"
"""The kind of evidence that has the moments of what adapted modules read."""

MERGED = ("merged_A", "merged_B")
"""What a layer with an adapter calls the factors of earlier rounds, where those are merged."""


class Pair(NamedTuple):
    """The two factors of one module, by name; the update of its weight is B A."""

    module: str
    a: str
    b: str


def pairs_in(names: Collection[str]) -> Iterator[Pair]:
    """Every low-rank pair among a model's tensors.

    Example:
        >>> list(pairs_in(["fc.lora_A.weight", "fc.lora_B.weight"]))
        [Pair(module='fc', a='fc.lora_A.weight', b='fc.lora_B.weight')]
    """
    for name in names:
        parts = name.split(".")
        for side, other in _SIDES:
            if side in parts:
                place = parts.index(side)
                partner = ".".join([*parts[:place], other, *parts[place + 1 :]])
                if partner in names:
                    yield Pair(".".join(parts[:place]), name, partner)

"""Sums of several sites at the door: what a region says of itself, and what can be checked of it.

That a region's mean is its sum divided by its weight is checked, and its examples are compared per site. How many sites
there are in it, and that their sum is true, is the region's own word: whoever fuses regions must know them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedfuse.core.messages import Form
from fedfuse.errors import Refused
from fedfuse.wire.codec import LazyParams, Malformed
from fedfuse.wire.sums import SUM, Summed, SummedParams, find_odd_mean, sum_forms


def read_sums(client: str, header: Mapping[str, Any], by: str | None) -> Summed | None:
    """What a reply says of the sites it sums, None of one site's own.

    Args:
        client: who sent it.
        header: what it says.
        by: by what clients weigh in the sum that the method reads; None where no sums are admitted.

    Raises:
        Refused: if the method reads other sums than this one, or more than sums.
    """
    try:
        found = Summed.of(header)
    except Malformed as why:
        raise Refused(client, "sums", str(why), "what `fedfuse fuse --partial` writes") from why
    if found is None or found.by == by:
        return found
    came = f"a sum of {found.sites} sites by {found.by}"
    words = "one client's own reply" if by is None else f"a sum by {by}, as this method takes it"
    raise Refused(client, "sums", came, words)


def forms_with_sums(forms: Mapping[str, Form], sums: Summed | None) -> Mapping[str, Form]:
    """The forms a reply must have: of a sum of weights also those of its float64 sums."""
    return forms if sums is None or sums.by == "evidence" else {**forms, **sum_forms(forms)}


def attach_sums(client: str, mean: LazyParams, notes: LazyParams, sums: Summed | None) -> tuple[LazyParams, LazyParams]:
    """The mean that knows its sum, and the notes without it.

    Raises:
        Refused: if the mean is not the sum divided by its weight.
    """
    if sums is None or sums.by == "evidence":
        return mean, notes
    totals = notes.part(lambda n: n.startswith(SUM), lambda n: n.removeprefix(SUM))
    if odd := find_odd_mean(mean, totals, sums.weight):
        raise Refused(client, odd, "not its sum divided by the weight", "the mean of the sum beside it")
    return SummedParams(mean, totals, sums.weight), notes.part(lambda n: not n.startswith(SUM))

"""Sums of several sites at the door: what a region says of itself, and what can be checked of it.

That a region's mean is its sum divided by its weight is checked, and its examples are compared per site. How many sites
there are in it, and that their sum is true, is the region's own word. It is believed where at least half of the files
are sums, for whoever fuses regions must know them, and there no region may claim far more sites than others; among
single sites' own updates it weighs as one of them, unless somebody vouches for its number of examples.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Any, NamedTuple

from fedfuse.core.messages import ClientUpdate, Form
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


class Believed(NamedTuple):
    """Updates with as many sites as they are believed to have, and what was refused or counted for less."""

    updates: list[ClientUpdate]
    refused: list[Refused]
    clipped: list[Refused]


def believe_sites(updates: Sequence[ClientUpdate], own_word: AbstractSet[str], ratio: float) -> Believed:
    """Take regions at their word where regions are fused, and as one site each among single sites.

    Args:
        updates: what was admitted.
        own_word: for whom nobody but themselves says what stands behind them.
        ratio: among regions, a number of sites above this multiple of the median is refused.
    """
    sums = [u for u in updates if u.sites > 1]
    if not sums:
        return Believed(list(updates), [], [])
    among_regions, found = 2 * len(sums) >= len(updates), Believed([], [], [])
    usual = statistics.median([u.sites for u in updates])
    for update in updates:
        doubtful = update.sites > 1 and update.client in own_word
        if doubtful and among_regions and update.sites > ratio * usual:
            words = f"at most {ratio * usual:g}, {ratio:g} times the median"
            found.refused.append(Refused(update.client, "sites", update.sites, words))
            continue
        if doubtful and not among_regions:
            words = "one by its own word where most are one site's own, so it weighs as one; num_examples vouch for it"
            found.clipped.append(Refused(update.client, "sites", update.sites, words))
            update = replace(update, sites=1)
        found.updates.append(update)
    return found

"""Sums of sums: several updates as one, a late site added, a site taken out again.

Where a method reads nothing of its clients but sums, the sum of some updates is an update again: regions can be fused
before the whole is, a fused file can keep the sums it was made of, and subtracting a site's sums is exact unlearning.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedfuse.api.update import Update
from fedfuse.core.about import About
from fedfuse.core.messages import ClientUpdate, Cohort
from fedfuse.core.recipe import Recipe
from fedfuse.errors import ConfigError, RecipeError
from fedfuse.server.aggregate.mean import largest, sums_of
from fedfuse.server.door.admit import Admission
from fedfuse.wire.codec import Malformed, decode, encode, forms_of, read
from fedfuse.wire.messages import NOTE, mark_notes
from fedfuse.wire.sums import SUM, SUM_NAME, Summed
from fedfuse.wire.table import Altered

SUMS = "sums"  # the kind of notes under which a fused file keeps them, and the fact that describes them


def check_sums(recipe: Recipe, what: str) -> None:
    """Go on only if the method reads sums of evidence and nothing else.

    Raises:
        RecipeError: naming what was asked for.
    """
    if recipe.sums_by != "evidence":
        raise RecipeError(
            f"{what} needs a method that reads sums of evidence and nothing else, such as ridge or refit, and "
            f"{recipe.label or recipe.name!r} reads more of each client; fuse all updates at once"
        )


def add_updates(updates: Sequence[ClientUpdate], header: Mapping[str, Any], client: str) -> Update:
    """The sum of admitted updates, an update again.

    Args:
        updates: what is added, in its order.
        header: what one of them says of network, start and classes.
        client: what the sum is called.
    """
    total: dict[str, Tensor] = {}
    for update in updates:
        for name, tensor in update.notes.items():
            total[name] = total[name] + tensor if name in total else tensor.clone()
    count = math.fsum(u.num_examples for u in updates)
    told = {**header, "client": client, "num_examples": count, "steps": 0, "facts": {}}
    if (sites := sum(u.sites for u in updates)) > 1:
        told["sums"] = Summed(sites, "evidence", count).to_json()
    return Update(client, encode(mark_notes(total), told), spec=updates[0].spec)


def add_weights(cohort: Cohort, by: str, header: Mapping[str, Any], client: str) -> Update:
    """The sum of admitted weights, an update again: their mean, and beside it the float64 sum it was rounded from.

    Args:
        cohort: what is added, in its order.
        by: by what clients weigh: "examples", or alike as "clients".
        header: what all of them say.
        client: what the sum is called.
    """
    given = cohort.num_examples if by == "examples" else torch.tensor([float(u.sites) for u in cohort])
    weight, totals = math.fsum(given.tolist()), sums_of(cohort, given)
    sources = [u.posterior.mean for u in cohort]
    forms = forms_of(sources[0])
    mean = {n: (totals[n] / weight).to(f.dtype) if n in totals else largest(sources, n) for n, f in forms.items()}
    sums = Summed(cohort.sites, by, weight).to_json()
    examples, steps = math.fsum(cohort.num_examples.tolist()), max(u.steps for u in cohort)
    told = {**header, "client": client, "num_examples": examples, "steps": steps, "facts": {}, "sums": sums}
    notes = mark_notes({SUM + name: tensor for name, tensor in totals.items()})
    return Update(client, encode({**mean, **notes}, told), spec=cohort.updates[0].spec)


def sum_header(shared: Mapping[str, Any], about: About) -> dict[str, Any]:
    """What a sum says of itself: all that its updates agree on, but none of their names."""
    return {**about.model_copy(update={"sites": (), "refused": ()}).to_json(), **shared}


def evidence_sums(
    recipe: Recipe, admission: Admission, header: Mapping[str, Any], keep_sites: bool
) -> tuple[Update, ...]:
    """What a later fusion can go on from: the total, or everybody's own."""
    if recipe.sums_by != "evidence" or admission.clipped:
        return ()  # what was weakened is no sum of rows
    if keep_sites:
        return tuple(add_updates([u], header, u.client) for u in admission.cohort)
    return (add_updates(admission.cohort.updates, header, SUM_NAME),)


def region_of(recipe: Recipe, admission: Admission, header: Mapping[str, Any], whole: bool) -> Callable[[], Update]:
    """What adds up the weights that were fused, when it is asked, or says why it cannot be done."""
    by, name = recipe.sums_by, recipe.label or recipe.name
    if by is None:
        return partial(no_sum, f"{name!r} reads more of its clients than one sum; use ridge, refit or fedavg")
    if admission.clipped:
        weak = admission.clipped[0]["client"]
        return partial(no_sum, f"the say of {weak} was weakened at the door; leave it out, or widen bounds")
    if whole:
        return partial(no_sum, "checkpoint folders are fused whole; fuse all of them at once")
    return no_sum if by == "evidence" else partial(add_weights, admission.cohort, by, header, SUM_NAME)


def no_sum(why: str = "sites were kept apart; fuse without keep_sites") -> Update:
    """Say why there is no one sum of what was fused.

    Raises:
        RecipeError: always.
    """
    raise RecipeError(f"there is no one sum of what was fused, for {why}")


def kept_updates(path: Path) -> list[Update]:
    """The sums a fused file was made of: one for all sites, or one for each.

    Raises:
        ConfigError: if it keeps none.
    """
    try:
        packet = read(path)
    except Altered:
        raise
    except Malformed as why:
        raise ConfigError(f"{path} is no model file: {why}") from why
    headers = packet.header.get("facts", {}).get(SUMS)
    if not isinstance(headers, list) or not all(isinstance(h, dict) for h in headers) or not headers:
        raise ConfigError(f"{path} does not keep the sums it was made of; fuse it by ridge or refit, from updates")
    found = []
    for place, header in enumerate(headers):
        prefix = f"{NOTE}{SUMS}/{place}/"
        notes = {n.removeprefix(prefix): t for n, t in packet.tensors.items() if n.startswith(prefix)}
        found.append(Update(str(header.get("client", place)), encode(mark_notes(notes), header)))
    return found


def sums_to_keep(kept: Sequence[Update]) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """The notes and the headers that a fused file keeps of updates."""
    packets = [decode(update.payload) for update in kept]
    notes = {
        f"{SUMS}/{place}/{name.removeprefix(NOTE)}": tensor
        for place, packet in enumerate(packets)
        for name, tensor in packet.tensors.items()
    }
    return notes, [dict(packet.header) for packet in packets]


def take_out(kept: Sequence[Update], what: Sequence[str], whose: Path) -> list[Update]:
    """The kept sums without some sites: by name where they are kept apart, by its update file where they are not.

    Raises:
        ConfigError: if a site is neither.
    """
    left = list(kept)
    for site in what:
        if any(update.client == site for update in left):
            left = [update for update in left if update.client != site]
        elif Path(site).is_file() and len(left) == 1:
            left = [_subtract(left[0], Path(site))]
        else:
            names = ", ".join(update.client for update in left)
            raise ConfigError(
                f"{whose} does not keep the sums of {site!r} apart (it has {names}); pass that site's own update file, "
                "or fuse with --keep-sites next time"
            )
    return left


def _subtract(total: Update, path: Path) -> Update:
    whole, part = decode(total.payload), read(path)
    same = ("spec", "start", "classes")
    if odd := [key for key in same if whole.header.get(key) != part.header.get(key)]:
        raise ConfigError(f"{path} is no part of these sums: its {odd[0]} is another one")
    if whole.tensors.forms != {n: f for n, f in part.tensors.forms.items() if n.startswith(NOTE)}:
        raise ConfigError(f"{path} is no part of these sums: it brings other evidence")
    notes = {name: tensor - part.tensors[name] for name, tensor in whole.tensors.items()}
    left = float(whole.header["num_examples"]) - float(part.header["num_examples"])
    if left <= 0 or not all(bool(torch.isfinite(t).all()) for t in notes.values()):
        raise ConfigError(f"{path} is no part of these sums, or all of them: {left:g} examples would be left")
    return Update(total.client, encode(notes, {**whole.header, "num_examples": left}))


def check_kept(clients: Sequence[str], admission: Admission, into: str | Path | None) -> None:
    """Go on only if all that a fused file keeps was fused again: otherwise sites would be lost unasked."""
    for refusal in admission.refused:
        if refusal["client"] in clients:
            raise ConfigError(
                f"what {into} keeps of {refusal['client']} does not suit the updates: {refusal['field']} is "
                f"{refusal['got']}, expected {refusal['expected']}; add updates made for the same model"
            )

"""Bounds on what one admitted client can do: every lever in one place.

A reply can be well formed and still outweigh all others: by a number of examples, by a long move, by evidence that
claims to be very sure. Each number that scales a client's say is a lever, and each lever is compared with the same
lever of the other clients. With m the median of the logarithms and s their robust deviation (1.4826 times the median
distance from m), a client may be at most

    exp(m + max(log ratio, spread · s)),

a bound that follows how different the clients are. Whoever is above it is weakened to it, and refused only beyond a
wide margin: honest clients differ much, above all in curvature. There is no lower bound: whoever has less say takes
nothing over.
Fewer than five clients have no robust centre; there the brief says how large a move may be, and the median, where
there are three, gives the scale of everything else, both with much more room. A lever that is nothing for most
clients (the curvature of networks that have learned their rows by heart) has no centre and is left to the evidence's
own check.

Levers multiply: what a client does to a layer goes by its examples × its move, and where clients say how sure they are
by its examples × what it brings (`moves_by_precision`): precision times move, as matrices and not as sizes, over the
mean of everybody's precision. Whoever claims to be sure just where it moved brings far more than its move and its mean
precision tell, and whoever is merely surer than others hardly more than they. So this product is bounded too, with half
the deviations, and who exceeds it has its move shortened. A number of examples that is vouched for or believed counts
there for at most the median: a large client is no liar, and a small one that moved far says little.

| beside `levers` | where it acts |
|---|---|
| number of examples (of a sum of sites: per site), where it is the client's own word | every weighted mean, every sum |
| number of sites in a sum (`regions`) | every mean of regions |
| steps, both ways | FedNova; local steps follow from examples and settings where the server gave those |
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from fedfuse.core.bounds import FEW, Bounds
from fedfuse.core.messages import ClientUpdate, Cohort
from fedfuse.core.params import Params
from fedfuse.core.settings import LocalSettings
from fedfuse.core.threads import one_thread
from fedfuse.errors import Refused
from fedfuse.server.brought import moves_by_precision
from fedfuse.server.door.levers import MOVE, Lever, owners_of
from fedfuse.server.door.regions import believe_sites

_ABSURD = 1e6  # times the median: one unit taken for another, or a number that was never counted
_ROOM_FOR_STEPS = 2.0  # a client that counts its batches otherwise than we do is no liar
_AT_BOUND = 1 - 1e-6  # whoever was weakened to a bound stands at it, up to rounding


@dataclass(slots=True)
class Bounded:
    """What is left of a cohort within its bounds, who was refused for what, and whose levers were weakened."""

    updates: list[ClientUpdate]
    refused: list[dict[str, str]] = field(default_factory=list)
    clipped: list[dict[str, str]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Claims:
    """What is known of numbers that clients say of themselves.

    Attributes:
        told: how clients were told to train, where they were: it fixes the steps for any number of examples.
        own_word: whose number of examples is nobody's word but their own.
        ratio: a number of examples above this multiple of the median is refused; of few clients, `Bounds.few` times.
        believed: their own word counts as it is, up to `_ABSURD` times the median.
        exact: below that it counts as it is: weakened sums would no longer be the sums of anybody's rows.
    """

    told: LocalSettings | None = None
    own_word: AbstractSet[str] = frozenset()
    ratio: float = 10.0
    believed: bool = False
    exact: bool = False

    def doubts(self, client: str) -> bool:
        """Whether the others' numbers of examples limit this client's."""
        return client in self.own_word and not self.believed

    def ratio_among(self, count: int, bounds: Bounds) -> float:
        """The multiple of the median that so many clients may claim; of two, nobody is the odd one."""
        if count <= 2:
            return math.inf
        return _ABSURD if self.believed else self.ratio if count >= FEW else bounds.few


def keep_within_bounds(
    updates: Sequence[ClientUpdate],
    levers: Mapping[str, Mapping[str, Lever]],
    claims: Claims,
    bounds: Bounds,
    starts: Mapping[str, Params] | None = None,
) -> Bounded:
    """The updates none of whose levers is far above the others'; networks of several kinds are compared apart.

    Args:
        updates: what was admitted.
        levers: of every client, as `measure` gives them.
        claims: what is known of examples and steps.
        bounds: how much is too much.
        starts: where clients began to move, where that is known.
    """
    if bounds.over == "off":
        return Bounded(list(updates))
    believed = believe_sites(updates, claims.own_word, claims.ratio_among(len(updates), bounds))
    found = Bounded([], *([why.facts() for why in each] for each in (believed.refused, believed.clipped)))
    updates, usual = believed.updates, _Usual.of(believed.updates, claims, bounds)
    fair = [u for u in updates if not _exceeds_claims(u, usual, claims, found)]
    limits = {spec: _limits([u for u in fair if u.spec == spec], levers, bounds) for spec in {u.spec for u in fair}}
    for update in fair:
        kept: ClientUpdate | None = update
        for name, limit in limits[update.spec].items():
            lever = levers[update.client].get(name)
            if kept is not None and lever is not None and not lever.value <= limit:
                kept = _over(kept, name, lever, limit, bounds, found)
        if kept is not None:
            found.updates.append(kept)
    found.updates = _cap_examples(found.updates, claims, bounds, found.clipped)
    if not bounds.together:
        return found
    found.updates = [
        capped
        for spec in dict.fromkeys(u.spec for u in found.updates)
        for capped in _cap_says(
            [u for u in found.updates if u.spec == spec], levers, limits[spec], claims, bounds, starts or {}, found
        )
    ]
    return found


def _limits(
    peers: Sequence[ClientUpdate], levers: Mapping[str, Mapping[str, Lever]], bounds: Bounds
) -> dict[str, float]:
    """The limit of every lever among clients of one network."""
    found: dict[str, list[Lever]] = {}
    for update in peers:
        for name, lever in levers[update.client].items():
            found.setdefault(name, []).append(lever)
    return {
        name: max(
            each[0].room * bounds.limit([x.value for x in each], max(x.expected for x in each)),
            max(x.allowed for x in each),
        )
        for name, each in found.items()
    }


def _over(
    update: ClientUpdate, name: str, lever: Lever, limit: float, bounds: Bounds, found: Bounded
) -> ClientUpdate | None:
    """The client weakened to the limit of its lever, or None where it is so far above that it is refused."""
    why = Refused(update.client, name, f"{lever.value:.4g}", f"at most {limit:.4g}, going by the round's other clients")
    near = bounds.over == "clip" or lever.value <= bounds.margin**lever.patience * limit
    if near and math.isfinite(lever.value):
        found.clipped.append(why.facts())
        return lever.weaken(update, limit / lever.value)
    found.refused.append(why.facts())
    return None


class _Usual(NamedTuple):
    """What is usual among the clients of a round: examples per site, steps, and how many times as many one may have."""

    examples: float
    steps: float
    ratio: float

    @classmethod
    def of(cls, updates: Sequence[ClientUpdate], claims: Claims, bounds: Bounds) -> _Usual:
        if not updates:
            return cls(0.0, 0.0, math.inf)
        examples = statistics.median(u.examples_per_site for u in updates)
        ratio = claims.ratio_among(len(updates), bounds)
        return cls(examples, statistics.median(u.steps for u in updates), ratio)


def _exceeds_claims(update: ClientUpdate, usually: _Usual, claims: Claims, found: Bounded) -> bool:
    """Whether a client says more of itself than it could know, which is then written down."""
    typical, ratio = usually.examples, usually.ratio
    if update.client in claims.own_word and update.examples_per_site > ratio * typical:
        words = f"at most {update.sites * ratio * typical:g}, {ratio:g} times the median{_of_sites(update)}"
        found.refused.append(Refused(update.client, "num_examples", update.num_examples, words).facts())
        return True
    if claims.told is not None:
        usual = max(1, claims.told.steps_for(update.num_examples))
        least, most = math.floor(usual / _ROOM_FOR_STEPS), math.ceil(usual * _ROOM_FOR_STEPS)
        words = f"{least} to {most}, for {update.num_examples:g} examples trained on as it was told"
    else:
        larger = 1.0 if claims.doubts(update.client) else max(1.0, update.examples_per_site / typical)
        room = claims.ratio * larger
        least, most = 0, math.ceil(room * usually.steps)
        words = f"at most {most}, {room:g} times the median"
    if least <= update.steps <= most:
        return False
    found.refused.append(Refused(update.client, "steps", update.steps, words).facts())
    return True


def _cap_examples(
    updates: Sequence[ClientUpdate], claims: Claims, bounds: Bounds, clipped: list[dict[str, str]]
) -> list[ClientUpdate]:
    """The updates with numbers of examples that nobody vouches for cut to their bounds: median and share."""
    if len(updates) < 3 or claims.exact or claims.believed:  # of two, one always has half
        return list(updates)
    counts = {u.client: (u.num_examples, u.sites) for u in updates}
    usual = bounds.limit([u.examples_per_site for u in updates]) if len(updates) >= FEW else math.inf
    most = min(usual, _largest_fair(counts, claims.own_word, bounds.share))
    capped = []
    for update in updates:
        if update.client in claims.own_word and update.examples_per_site > most:
            allowed = most * update.sites
            words = f"at most {allowed:.4g} by its own word{_of_sites(update)}, so it weighs as that many"
            clipped.append(Refused(update.client, "num_examples", update.num_examples, words).facts())
            steps = max(1, round(update.steps * allowed / update.num_examples))  # FedNova multiplies by everybody's
            update = replace(update, num_examples=allowed, steps=steps)
        capped.append(update)
    return capped


def _of_sites(update: ClientUpdate) -> str:
    return "" if update.sites == 1 else f", for a sum of {update.sites} sites"


Say = tuple[str, str]  # a layer, and by what its weights count beside examples: a layer's or tensor's name, or ""


def _cap_says(
    peers: Sequence[ClientUpdate],
    levers: Mapping[str, Mapping[str, Lever]],
    limits: Mapping[str, float],
    claims: Claims,
    bounds: Bounds,
    starts: Mapping[str, Params],
    found: Bounded,
) -> list[ClientUpdate]:
    """The updates with their moves shortened where move, examples and evidence together say too much."""
    typical, brought = statistics.median(u.examples_per_site for u in peers), _brought_by(peers, starts)
    says = {}
    for update in peers:
        counts = update.examples_per_site
        counts = counts if claims.doubts(update.client) else min(counts, typical)
        says[update.client] = _says_of(update, levers[update.client], limits, brought[update.client], counts)
    most = {
        say: bounds.limit_together([each[say] for each in says.values() if say in each])
        for say in dict.fromkeys(say for each in says.values() for say in each)
    }
    return [_shorten_moves(u, says[u.client], most, levers[u.client], found.clipped) for u in peers]


def _says_of(
    update: ClientUpdate,
    levers: Mapping[str, Lever],
    limits: Mapping[str, float],
    brings: Mapping[str, float],
    counts: float,
) -> dict[Say, float]:
    """How much a client says in every layer: its examples × its move, or × what it brings where it says how sure it is.

    Evidence that weights count by without being a precision multiplies the move.
    """
    within = {name: min(lever.value, limits[name]) for name, lever in levers.items()}
    owners = owners_of(update.spec.layout)
    weights: dict[str, float] = {}
    for name, lever in levers.items():
        if lever.weighs is not None:
            weights[lever.weighs] = weights.get(lever.weighs, 1.0) * within[name]
    counts *= weights.pop("", 1.0)
    says = {(name.removeprefix(MOVE), ""): counts * move for name, move in within.items() if name.startswith(MOVE)}
    for target in dict.fromkeys((*weights, *brings)):
        layer = owners.get(target, target)
        if (layer, "") in says:
            says[layer, target] = counts * brings[target] if target in brings else weights[target] * says[layer, ""]
    return {say: value for say, value in says.items() if not math.isnan(value)}


def _brought_by(peers: Sequence[ClientUpdate], starts: Mapping[str, Params]) -> dict[str, dict[str, float]]:
    """How much every client brings to each part of the network of which all say how sure they are."""
    found: dict[str, dict[str, float]] = {update.client: {} for update in peers}
    if starts.keys() >= found.keys() and len(peers) >= FEW:
        with one_thread():
            for name, moves in moves_by_precision(Cohort(tuple(peers)), [starts[u.client] for u in peers]):
                for update, length in zip(peers, torch.linalg.vector_norm(moves, dim=1).tolist(), strict=True):
                    found[update.client][name] = length
    return found


def _shorten_moves(
    update: ClientUpdate,
    says: Mapping[Say, float],
    most: Mapping[Say, float],
    levers: Mapping[str, Lever],
    clipped: list[dict[str, str]],
) -> ClientUpdate:
    """The update with each layer's move so short that it says no more than it may."""
    for layer in dict.fromkeys(layer for layer, _ in says):
        mine = [(most[say] / value, say) for say, value in says.items() if say[0] == layer and value > 0]
        factor, say = min(mine, default=(1.0, (layer, "")))
        if factor < _AT_BOUND:
            words = f"at most {most[say]:.4g}, going by the round's other clients"
            what = f"say in {layer}" + (f" by {say[1]}" if say[1] else "")
            clipped.append(Refused(update.client, what, f"{says[say]:.4g}", words).facts())
            update = levers[MOVE + layer].weaken(update, factor)
    return update


def _largest_fair(counts: Mapping[str, tuple[float, int]], own_word: AbstractSet[str], share: float) -> float:
    """The number C with which no site of those capped at it has more than `share` of all examples.

    With the k sites of the largest claims capped, C = share · (sum of the others) / (1 − k · share).

    Example:
        >>> _largest_fair({"a": (1.0, 1), "b": (1.0, 1), "c": (8.0, 1)}, {"a", "b", "c"}, 0.5)
        2.0
        >>> _largest_fair({"a": (3.0, 1), "b": (3.0, 1), "c": (4.0, 1)}, {"a", "b", "c"}, 0.5)
        inf
        >>> _largest_fair({"a": (1.0, 1), "b": (1.0, 1), "region": (8.0, 4)}, {"a", "b", "region"}, 0.5)
        inf
    """
    claimed = sorted((entry for client, entry in counts.items() if client in own_word), key=lambda e: -e[0] / e[1])
    total = sum(examples for examples, _ in counts.values())
    for number in range(len(claimed) + 1):
        over, free = sum(n for n, _ in claimed[:number]), 1 - share * sum(sites for _, sites in claimed[:number])
        if free <= 0:
            break
        cap = share * (total - over) / free
        if number == len(claimed) or claimed[number][0] / claimed[number][1] <= cap:
            return cap if number else math.inf
    return claimed[-1][0] / claimed[-1][1]  # the share is too small for so few: all weigh alike

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

| lever | where it acts |
|---|---|
| number of examples (of a sum of sites: per site), where it is the client's own word | every weighted mean |
| steps, both ways | FedNova; local steps follow from examples and settings where the server gave those |
| the move of a layer, and of its running statistics | every mean of weights; without a start, the layer's own length |
| the move per step | FedNova, SCAFFOLD |
| mean variance and mean precision of Bayesian layers | barycenters and products of posteriors |
| what each kind of evidence names by `influence` | whatever reads that evidence |
| a counter, where no start says what it was | the next round's counters |
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from fedfuse.core.bounds import FEW, Bounds
from fedfuse.core.messages import Brief, ClientUpdate
from fedfuse.core.params import Layout, Params
from fedfuse.core.seams import Evidence
from fedfuse.core.settings import LocalSettings
from fedfuse.core.threads import one_thread
from fedfuse.errors import Refused
from fedfuse.wire.codec import LazyParams, forms_of, piece_of

_ROOM_FOR_STEPS = 2.0  # a client that counts its batches otherwise than we do is no liar

_ROOM_FOR_PACE = 3.0  # a client with few rows takes few steps, and each carries it further
_ROOM_AT_START = 2.0  # a client with few rows leaves a belief about where it began
_STATISTICS = " statistics"

Weaken = Callable[[ClientUpdate, float], ClientUpdate]


class Lever(NamedTuple):
    """A number that scales a client's say.

    Attributes:
        value: the number.
        weaken: the update with this lever multiplied by a factor below 1.
        expected: what the brief knows of its size, 0 if nothing.
        allowed: what it may be whatever the others have.
        room: how many times further than usual honest clients differ in it.
    """

    value: float
    weaken: Weaken
    expected: float = 0.0
    allowed: float = 0.0
    room: float = 1.0


def measure(
    update: ClientUpdate, brief: Brief, evidence: Sequence[Evidence], anchored: bool = True
) -> dict[str, Lever]:
    """Every lever of one client but its numbers of examples and steps, by name.

    Args:
        update: what it sent.
        brief: what it was asked, as it heard it.
        evidence: the kinds it was asked for.
        anchored: whether it began with the brief's weights, so that a move is known.
    """
    stands = anchored and update.posterior.mean is brief.params  # nobody trained: there is no move to measure
    with one_thread():
        levers = {} if stands else dict(_weight_levers(update.posterior.mean, brief, anchored))
    for kind in evidence:
        found = kind.influence(update.notes)
        levers |= {
            name: Lever(value, partial(_scale_notes, kind, name), room=kind.room) for name, value in found.items()
        }
    if anchored and not stands:
        total = math.hypot(*(lever.value for name, lever in levers.items() if name.startswith("move of ")))
        everything = frozenset(_floating(update.posterior.mean, brief.spec.layout))
        shorten = partial(_scale_weights, everything, brief.params)
        levers["move per step"] = Lever(total / max(1, update.steps), shorten, room=_ROOM_FOR_PACE)
    return levers


def _weight_levers(mean: Params, brief: Brief, anchored: bool) -> Iterator[tuple[str, Lever]]:
    layout, start = brief.spec.layout, brief.params if anchored else None
    for group, names in _groups(mean, layout).items():
        expected = max(_length(start, names), 1.0) if start and not group.endswith(_STATISTICS) else 0.0
        shorten = partial(_scale_weights, frozenset(names), start)
        yield f"{'move' if anchored else 'length'} of {group}", Lever(_length(mean, names, start), shorten, expected)
    for name in layout.with_role("log_variance"):
        if name in mean:
            for word, sign in (("precision", -1), ("variance", 1)):
                begun = _ROOM_AT_START * _mean_exp(sign * start[name].double()) if start else 0.0
                value = _mean_exp(sign * mean[name].double())
                yield f"{word} of {name}", Lever(value, partial(_shift, name, sign), begun, begun)
    if not anchored:
        for name in layout.with_role("counter"):
            if name in mean and mean[name].numel():
                yield f"count of {name}", Lever(float(mean[name].max()), partial(_scale_weights, {name}, None))


def _mean_exp(values: Tensor) -> float:
    return float(values.exp().mean()) if values.numel() else 0.0


def _floating(mean: Params, layout: Layout) -> Iterator[str]:
    """Tensors that are averaged as they are."""
    floating = (name for name, form in forms_of(mean).items() if form.dtype.is_floating_point)
    return (name for name in floating if layout.roles.get(name) != "log_variance")


def _groups(mean: Params, layout: Layout) -> dict[str, list[str]]:
    """Floating tensors by the layer they belong to; running statistics, which have another scale, beside them."""
    owners = {name: layer.name for layer in layout.layers for name in (layer.weight, layer.bias, *layer.followers)}
    groups = dict[str, list[str]]()
    for name in _floating(mean, layout):
        owner = owners.get(name, name) + (_STATISTICS if layout.roles.get(name) == "statistic" else "")
        groups.setdefault(owner, []).append(name)
    return groups


def _length(params: Params, names: Sequence[str], start: Params | None = None) -> float:
    """The length of some tensors as one vector, or of their way from the start; infinite where it overflows."""
    tensors = (params[name] if start is None else params[name] - start[name] for name in names)
    return math.hypot(*(float(torch.linalg.vector_norm(tensor.float())) for tensor in tensors))


def _scale_weights(names: AbstractSet[str], start: Params | None, update: ClientUpdate, factor: float) -> ClientUpdate:
    """Some tensors nearer to the start, or to zero."""
    mean = update.posterior.mean

    def fetch(name: str, begin: int, end: int) -> Tensor:
        piece = piece_of(mean, name, begin, end)
        if name not in names:
            return piece
        origin = torch.zeros((), dtype=torch.float64) if start is None else piece_of(start, name, begin, end).double()
        return (origin + factor * (piece.double() - origin)).to(piece.dtype)

    return _with_mean(update, fetch)


def _shift(name: str, sign: int, update: ClientUpdate, factor: float) -> ClientUpdate:
    """Log-variances moved so that the variance, or for −1 the precision, is multiplied by the factor."""
    mean, by = update.posterior.mean, sign * math.log(factor)

    def fetch(wanted: str, begin: int, end: int) -> Tensor:
        piece = piece_of(mean, wanted, begin, end)
        return piece + by if wanted == name else piece

    return _with_mean(update, fetch)


def _with_mean(update: ClientUpdate, fetch: Callable[[str, int, int], Tensor]) -> ClientUpdate:
    mean = LazyParams(forms_of(update.posterior.mean), fetch)
    return replace(update, posterior=replace(update.posterior, mean=mean))


def _scale_notes(kind: Evidence, lever: str, update: ClientUpdate, factor: float) -> ClientUpdate:
    """The notes that a lever names, multiplied; the posterior follows them."""
    before = update.notes

    def fetch(name: str, begin: int, end: int) -> Tensor:
        piece = piece_of(before, name, begin, end)
        return piece * factor if name == lever or name.startswith(f"{lever}/") else piece

    notes = LazyParams(forms_of(before), fetch)
    geometry = kind.geometry(notes)
    posterior = update.posterior if geometry is None else replace(update.posterior, geometry=geometry)
    return replace(update, notes=notes, posterior=posterior)


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
    """

    told: LocalSettings | None = None
    own_word: AbstractSet[str] = frozenset()
    ratio: float = 10.0


def keep_within_bounds(
    updates: Sequence[ClientUpdate], levers: Mapping[str, Mapping[str, Lever]], claims: Claims, bounds: Bounds
) -> Bounded:
    """The updates none of whose levers is far above the others'; networks of several kinds are compared apart.

    Args:
        updates: what was admitted.
        levers: of every client, as `measure` gives them.
        claims: what is known of examples and steps.
        bounds: how much is too much.
    """
    found, usual = Bounded([]), _Usual.of(updates, claims, bounds)
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
    near = bounds.over == "clip" or lever.value <= bounds.margin * limit
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
        ratio = claims.ratio if len(updates) >= FEW else bounds.few if len(updates) > 2 else math.inf
        return cls(examples, statistics.median(u.steps for u in updates), ratio)


def _exceeds_claims(update: ClientUpdate, usually: _Usual, claims: Claims, found: Bounded) -> bool:
    """Whether a client says more of itself than it could know, which is then written down."""
    typical, ratio, vouched = usually.examples, usually.ratio, update.client not in claims.own_word
    if not vouched and update.examples_per_site > ratio * typical:
        words = f"at most {update.sites * ratio * typical:g}, {ratio:g} times the median{_of_sites(update)}"
        found.refused.append(Refused(update.client, "num_examples", update.num_examples, words).facts())
        return True
    if claims.told is not None:
        usual = max(1, claims.told.steps_for(update.num_examples))
        least, most = math.floor(usual / _ROOM_FOR_STEPS), math.ceil(usual * _ROOM_FOR_STEPS)
        words = f"{least} to {most}, for {update.num_examples:g} examples trained on as it was told"
    else:
        room = claims.ratio * (max(1.0, update.examples_per_site / typical) if vouched else 1.0)
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
    if len(updates) < 3:  # of two, one always has half
        return list(updates)
    counts = {u.client: (u.num_examples, u.sites) for u in updates}
    usual = bounds.ratio * statistics.median(u.examples_per_site for u in updates) if len(updates) >= FEW else math.inf
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

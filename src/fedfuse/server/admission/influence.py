"""What one admitted client can do to a fused model, and the bounds that keep it from doing much more than the others.

A *lever* is a number of a reply that scales its sender's influence: how far each layer moved, how large its evidence
is, how many examples it claims. `measure` reads the levers of one client; `keep_within_bounds` compares each with the
same lever of the round's other clients, and then their product layer by layer. A client above a bound is weakened to
it (`clipped`) and refused only far above it. `moves_by_precision` is the common unit of moves and of evidence that
says how sure a client is; robust guards measure distances in it too.
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

from fedfuse.core.messages import Brief, ClientUpdate, Cohort, Form
from fedfuse.core.params import Layout, Params
from fedfuse.core.posterior import Diag, Geometry, Kron
from fedfuse.core.seams import Evidence
from fedfuse.core.settings import FEW, Bounds, LocalSettings
from fedfuse.core.spec import Spec
from fedfuse.core.torch_utils import one_thread
from fedfuse.errors import Refused
from fedfuse.linalg.factor import Factor, as_stack
from fedfuse.linalg.lowrank import norm_of
from fedfuse.linalg.psd import inverse
from fedfuse.linalg.subspace import reciprocal, times, written
from fedfuse.models.adapted import Pair, pairs_in
from fedfuse.nets.kronecker import Block, blocks_of
from fedfuse.server.admission.values import lengths_of
from fedfuse.wire.codec import LazyParams, forms_of, piece_of

Parts = Iterator[tuple[str, Tensor]]  # of the network, each with one row of numbers per client

# A client with few rows takes few steps, and each of its steps carries it further than a step of many.
_ROOM_FOR_PACE = 4.0
# A client with few rows hardly leaves the belief it began with, whatever the others learned.
_ROOM_AT_START = 2.0
# Evidence is refused only at margin³ = 10⁹ times its bound: curvatures of honest networks that know their rows by heart
# differ by more than 10⁶ (docs/decisions/0017). It is weakened to the bound like anything else.
_PATIENCE_WITH_EVIDENCE = 3.0
# Times the median: one unit taken for another, or a number that was never counted. Even believed clients stop here.
_ABSURD = 1e6
# A client that drops its last batch, or counts a repeated one, is honest.
_ROOM_FOR_STEPS = 2.0
# A client that was weakened to a bound stands at it up to rounding and is not to be weakened, and named, once more.
_AT_BOUND = 1 - 1e-6

_STATISTICS = " statistics"
MOVE = "move of "


# --- Levers: what one client can do ---

Weaken = Callable[[ClientUpdate, float], ClientUpdate]


class Lever(NamedTuple):
    """A number that scales a client's influence.

    Attributes:
        value: the number.
        weaken: the update with this lever multiplied by a factor below 1.
        expected: what the brief knows of its size, 0 if nothing.
        allowed: what it may be whatever the others have.
        room: how many times further than usual honest clients differ in it.
        weighs: the layer or tensor whose weights count by it, "" for all; None where none do.
        patience: the power of the usual margin by which it may exceed its bound before its sender is refused.
    """

    value: float
    weaken: Weaken
    expected: float = 0.0
    allowed: float = 0.0
    room: float = 1.0
    weighs: str | None = None
    patience: float = 1.0


@dataclass(frozen=True, slots=True)
class Baseline:
    """What clients with one brief are measured against, found once for all of them.

    Attributes:
        groups: floating tensors by the layer they belong to, running statistics, which have another scale, apart.
        expected: how long the start is in each of these groups, at least 1; nothing where no start is known.
    """

    groups: Mapping[str, Sequence[str]]
    expected: Mapping[str, float]

    @classmethod
    def of(cls, forms: Mapping[str, Form], layout: Layout, start: Params | None) -> Baseline:
        """The baseline of replies of these forms, to a brief with this start."""
        owners, groups = owners_of(layout), dict[str, list[str]]()
        for name, form in forms.items():
            role = layout.roles.get(name)
            if form.dtype.is_floating_point and role != "log_variance":  # log-variances have levers of their own
                group = owners.get(name, name) + (_STATISTICS if role == "statistic" else "")
                groups.setdefault(group, []).append(name)
        if not start:
            return cls(groups, {})
        lengths = lengths_of(start)
        # A start of zeros (adapters, a new head) says nothing of how far training goes from it, hence the 1.
        known = {group: max(_joint(lengths, names), 1.0) for group, names in groups.items()}
        return cls(groups, {group: length for group, length in known.items() if not group.endswith(_STATISTICS)})


def owners_of(layout: Layout) -> dict[str, str]:
    """The layer that each tensor belongs to."""
    owners: dict[str, str] = {}
    for layer in layout.layers:
        for name in (layer.weight, layer.bias, *layer.followers, *layer.log_variances):
            if name is not None:
                owners[name] = layer.name
    return owners


def _joint(lengths: Mapping[str, float], names: Sequence[str]) -> float:
    """The length of some tensors as one vector; infinite where it overflows."""
    return math.hypot(*[lengths[name] for name in names])


def measure(
    update: ClientUpdate,
    brief: Brief,
    evidence: Sequence[Evidence],
    anchored: bool = True,
    baseline: Baseline | None = None,
    moves: Mapping[str, float] | None = None,
) -> dict[str, Lever]:
    """Every lever of one client but its numbers of examples and steps, by name.

    Args:
        update: what it sent.
        brief: what it was asked, as it heard it.
        evidence: the kinds it was asked for.
        anchored: whether it began with the brief's weights, so that a move is known.
        baseline: of the brief, where it has been found.
        moves: how far each tensor moved, where that was measured when its numbers were checked.
    """
    mean, start = update.posterior.mean, brief.params if anchored else None
    levers: dict[str, Lever] = {}
    stands = mean is start  # where clients do not train there is no move to measure
    if not stands:
        baseline = baseline or Baseline.of(forms_of(mean), brief.spec.layout, start)
        moves = moves or lengths_of(mean, start)
        for group, names in baseline.groups.items():
            shorten = partial(_scale_weights, frozenset(names), start)
            name = f"{MOVE if anchored else 'length of '}{group}"
            levers[name] = Lever(_joint(moves, names), shorten, baseline.expected.get(group, 0.0))
        levers |= _weight_levers(mean, brief.spec.layout, start)
    for kind in evidence:
        for name, value in kind.influence(update.notes).items():
            weighs = [*name.split("/"), ""][1] if kind.weighs else None
            weaken = partial(_scale_notes, kind, name)
            levers[name] = Lever(value, weaken, room=kind.room, weighs=weighs, patience=_PATIENCE_WITH_EVIDENCE)
    if baseline is not None and start is not None and not stands:
        # FedNova divides a move by its steps, so a client that claims few for a long move would count as many clients.
        total = math.hypot(*[levers[f"{MOVE}{group}"].value for group in baseline.groups])
        everything = frozenset[str]().union(*baseline.groups.values())
        shorten = partial(_scale_weights, everything, start)
        levers["move per step"] = Lever(total / max(1, update.steps), shorten, room=_ROOM_FOR_PACE)
    return levers


def _weight_levers(mean: Params, layout: Layout, start: Params | None) -> dict[str, Lever]:
    """Levers of weights that are not their length: products of adapters' factors, beliefs, counters."""
    levers: dict[str, Lever] = {}
    for pair in pairs_in(mean):
        # Each factor within its bound is not enough: two that are twice the median make a product four times as long.
        length = _product(mean, pair)
        levers[f"product of {pair.module}"] = Lever(length, partial(_shorten_product, pair, length))
    log_variances = layout.with_role("log_variance")
    means = {log: name for name, log in layout.log_variances.items()} if log_variances else {}
    for name in log_variances:
        if name in mean:
            # Both ways: a precision outweighs the others, a variance hides what all of them know.
            for word, sign in (("precision", -1), ("variance", 1)):
                begun = _ROOM_AT_START * _mean_exp(sign * start[name].double()) if start else 0.0
                value = _mean_exp(sign * mean[name].double())
                weighs = means[name] if word == "precision" else None
                levers[f"{word} of {name}"] = Lever(value, partial(_shift, name, sign), begun, begun, weighs=weighs)
    if start is None:  # with a start, counters were held to its counts and the client's own steps (values.py)
        for name in layout.with_role("counter"):
            if name in mean and mean[name].numel():
                weaken = partial(_scale_weights, frozenset({name}), None)
                levers[f"count of {name}"] = Lever(float(mean[name].max()), weaken)
    return levers


def _mean_exp(values: Tensor) -> float:
    return float(values.exp().mean()) if values.numel() else 0.0


def _product(mean: Params, pair: Pair) -> float:
    """‖B A‖ of an adapter."""
    return norm_of(*(mean[name].double().flatten(1) for name in (pair.b, pair.a)))


# What weakens a lever. Tensors are rescaled as they are read (`LazyParams`), so a weakened update needs no memory.


def _shorten_product(pair: Pair, length: float, update: ClientUpdate, factor: float) -> ClientUpdate:
    """An adapter whose product is `factor` times as long as it was; no less where its factors were shortened since."""
    now = _product(update.posterior.mean, pair)
    if now <= factor * length:
        return update
    return _scale_weights(frozenset({pair.b}), None, update, factor * length / now)


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
    sent = update.notes

    def fetch(name: str, begin: int, end: int) -> Tensor:
        piece = piece_of(sent, name, begin, end)
        return piece * factor if name == lever or name.startswith(f"{lever}/") else piece

    notes = LazyParams(forms_of(sent), fetch)
    geometry = kind.geometry(notes)
    posterior = update.posterior if geometry is None else replace(update.posterior, geometry=geometry)
    return replace(update, notes=notes, posterior=posterior)


# --- Bounds: each lever against the others' ---


@dataclass(slots=True)
class Bounded:
    """What is left of a cohort within its bounds, which clients were refused for what, and which were weakened."""

    updates: list[ClientUpdate]
    refused: list[dict[str, str]] = field(default_factory=list)
    clipped: list[dict[str, str]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Claims:
    """What is known of numbers that clients say of themselves.

    Attributes:
        told: how clients were told to train, where they were: it fixes the steps for any number of examples.
        own_word: clients whose number of examples is only their own word.
        ratio: a number of examples above this multiple of the median is refused; of few clients, `Bounds.few` times.
        believed: their own word counts as it is, up to `_ABSURD` times the median.
        exact: below that it counts as it is: weakened sums would no longer be the sums of any rows.
    """

    told: LocalSettings | None = None
    own_word: AbstractSet[str] = frozenset()
    ratio: float = 10.0
    believed: bool = False
    exact: bool = False

    def ratio_among(self, count: int, bounds: Bounds) -> float:
        """The multiple of the median that one of `count` clients may claim; of two, neither is the odd one."""
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

    In this order, so that each bound is taken over what the ones before it left: sites, examples and steps; every lever
    alone; examples as weights; everything together.

    Args:
        updates: what was admitted.
        levers: of every client, as `measure` gives them.
        claims: what is known of examples and steps.
        bounds: how much is too much.
        starts: where clients began to move, where that is known.
    """
    if bounds.over == "off":
        return Bounded(list(updates))
    found = Bounded([])
    fair = _keep_to_claims(updates, claims, bounds, found)
    limits: dict[str, Mapping[str, float]] = {}
    for peers in _by_network(fair):
        limits |= dict.fromkeys((u.client for u in peers), _limits(peers, levers, bounds))
    for update in fair:
        kept: ClientUpdate | None = update
        for name, limit in limits[update.client].items():
            lever = levers[update.client].get(name)
            if kept is not None and lever is not None and not lever.value <= limit:  # nor is NaN within any limit
                kept = _over(kept, name, lever, limit, bounds, found)
        if kept is not None:
            found.updates.append(kept)
    found.updates = _cap_examples(found.updates, claims, bounds, found.clipped)
    if bounds.together:
        groups = _by_network(found.updates)
        found.updates = []
        for peers in groups:
            shared = limits[peers[0].client]
            found.updates += _cap_together(peers, levers, shared, claims, bounds, starts or {}, found.clipped)
    return found


def _by_network(updates: Sequence[ClientUpdate]) -> list[list[ClientUpdate]]:
    groups: dict[Spec, list[ClientUpdate]] = {}
    for update in updates:
        groups.setdefault(update.spec, []).append(update)
    return list(groups.values())


def _limits(
    peers: Sequence[ClientUpdate], levers: Mapping[str, Mapping[str, Lever]], bounds: Bounds
) -> dict[str, float]:
    """The limit of every lever among clients of one network."""
    by_name: dict[str, list[Lever]] = {}
    for update in peers:
        for name, lever in levers[update.client].items():
            by_name.setdefault(name, []).append(lever)
    limits: dict[str, float] = {}
    for name, each in by_name.items():
        limit = bounds.limit([lever.value for lever in each], max([lever.expected for lever in each]))
        limits[name] = max(each[0].room * limit, *[lever.allowed for lever in each])
    return limits


def _over(
    update: ClientUpdate, name: str, lever: Lever, limit: float, bounds: Bounds, found: Bounded
) -> ClientUpdate | None:
    """The client weakened to the limit of its lever, or None where it is so far above that it is refused.

    Honest clients exceed bounds as well (docs/decisions/0015); weakening keeps them and takes as much from the others.
    """
    why = Refused(update.client, name, f"{lever.value:.4g}", f"at most {limit:.4g}, going by the round's other clients")
    near = bounds.over == "clip" or lever.value <= bounds.margin**lever.patience * limit
    if near and math.isfinite(lever.value):
        found.clipped.append(why.facts())
        return lever.weaken(update, limit / lever.value)
    found.refused.append(why.facts())
    return None


# --- Examples, steps and sites: what clients say of themselves ---


def _keep_to_claims(
    updates: Sequence[ClientUpdate], claims: Claims, bounds: Bounds, found: Bounded
) -> list[ClientUpdate]:
    """The updates that say no more of themselves than they could know; the others are written down."""
    if not updates:
        return []
    kept = _believe_sites(updates, claims.own_word, claims.ratio_among(len(updates), bounds), found)
    if not kept:
        return []
    examples = statistics.median([u.examples_per_site for u in kept])
    steps = statistics.median([u.steps for u in kept])
    ratio, fair = claims.ratio_among(len(kept), bounds), list[ClientUpdate]()
    for update in kept:
        if update.client in claims.own_word and update.examples_per_site > ratio * examples:
            words = f"at most {update.sites * ratio * examples:g}, {ratio:g} times the median{_of_sites(update)}"
            found.refused.append(Refused(update.client, "num_examples", update.num_examples, words).facts())
            continue
        least, most, words = _steps_allowed(update, examples, steps, claims)
        if least <= update.steps <= most:
            fair.append(update)
        else:
            found.refused.append(Refused(update.client, "steps", update.steps, words).facts())
    return fair


def _steps_allowed(update: ClientUpdate, examples: float, steps: float, claims: Claims) -> tuple[int, int, str]:
    """The steps a client can have taken, given the usual examples per site and steps; and the same in words."""
    if claims.told is not None:
        usual = max(1, claims.told.steps_for(update.num_examples))
        least, most = math.floor(usual / _ROOM_FOR_STEPS), math.ceil(usual * _ROOM_FOR_STEPS)
        return least, most, f"{least} to {most}, for {update.num_examples:g} examples trained on as it was told"
    # More rows take more steps; but a number of rows that is only its own word buys no steps.
    vouched = update.client not in claims.own_word or claims.believed
    room = claims.ratio * (max(1.0, update.examples_per_site / examples) if vouched else 1.0)
    most = math.ceil(room * steps)
    return 0, most, f"at most {most}, {room:g} times the median"


def _believe_sites(
    updates: Sequence[ClientUpdate], own_word: AbstractSet[str], ratio: float, found: Bounded
) -> list[ClientUpdate]:
    """The updates, where sums of several sites are believed among sums and weigh as one site among single sites.

    Examples are compared per site, so a number of sites that is compared with nothing would lift the bound on examples:
    one header entry, `"sites": 1000000000`, once made one file of ten the whole mean (docs/decisions/0031).
    """
    sums = sum(1 for u in updates if u.sites > 1)
    if not sums:
        return list(updates)
    among_sums, usual, kept = 2 * sums >= len(updates), statistics.median([u.sites for u in updates]), []
    for update in updates:
        doubtful = update.sites > 1 and update.client in own_word
        if doubtful and among_sums and update.sites > ratio * usual:
            words = f"at most {ratio * usual:g}, {ratio:g} times the median"
            found.refused.append(Refused(update.client, "sites", update.sites, words).facts())
            continue
        if doubtful and not among_sums:
            words = "one by its own word where most are one site's own, so it weighs as one; num_examples vouch for it"
            found.clipped.append(Refused(update.client, "sites", update.sites, words).facts())
            update = replace(update, sites=1)
        kept.append(update)
    return kept


def _of_sites(update: ClientUpdate) -> str:
    return "" if update.sites == 1 else f", for a sum of {update.sites} sites"


def _cap_examples(
    updates: Sequence[ClientUpdate], claims: Claims, bounds: Bounds, clipped: list[dict[str, str]]
) -> list[ClientUpdate]:
    """The updates with numbers of examples that are only their own word cut to their bounds: median and share."""
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
            # FedNova multiplies the mean direction by the mean number of steps, so steps shrink with the examples.
            steps = max(1, round(update.steps * allowed / update.num_examples))
            update = replace(update, num_examples=allowed, steps=steps)
        capped.append(update)
    return capped


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
    # Solve C = share · (others + k C) for k = 0, 1, … of the largest claims; the first k whose next claim is within C
    # is the answer, since capping more than exceed C would only lower it.
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


# --- Together: examples × evidence × move, layer by layer ---

Say = tuple[str, str]  # a layer, and by what its weights count apart from examples: a layer's or tensor's name, or ""


def _cap_together(
    peers: Sequence[ClientUpdate],
    levers: Mapping[str, Mapping[str, Lever]],
    limits: Mapping[str, float],
    claims: Claims,
    bounds: Bounds,
    starts: Mapping[str, Params],
    clipped: list[dict[str, str]],
) -> list[ClientUpdate]:
    """The updates with their moves shortened where move, examples and evidence together say too much.

    Levers multiply: each just within its bound of twice the median makes 2³ together. The move is what is shortened,
    since evidence may be needed as it was sent and a poisoned update does its harm by its move (docs/decisions/0017).
    """
    typical, brought = statistics.median([u.examples_per_site for u in peers]), _brought_by(peers, starts)
    owners, says = owners_of(peers[0].spec.layout), dict[str, dict[Say, float]]()
    values: dict[Say, list[float]] = {}
    for update in peers:
        counts = update.examples_per_site
        if update.client not in claims.own_word or claims.believed:
            counts = min(counts, typical)  # a large count that is vouched for is not suspicious by itself
        own = _says_of(levers[update.client], limits, brought[update.client], counts, owners)
        says[update.client] = own
        for say, value in own.items():
            values.setdefault(say, []).append(value)
    most = {say: bounds.limit_together(each) for say, each in values.items()}
    return [_shorten_moves(u, says[u.client], most, levers[u.client], clipped) for u in peers]


def _says_of(
    levers: Mapping[str, Lever],
    limits: Mapping[str, float],
    brings: Mapping[str, float],
    counts: float,
    owners: Mapping[str, str],
) -> dict[Say, float]:
    """How much a client says in every layer: its examples × its move, or × what it brings where it says how sure it is.

    Evidence that weights count by without being a precision multiplies the move. Levers count as they were weakened.
    """
    weights: dict[str, float] = {}
    for name, lever in levers.items():
        if lever.weighs is not None:
            weights[lever.weighs] = weights.get(lever.weighs, 1.0) * min(lever.value, limits[name])
    counts *= weights.pop("", 1.0)
    says: dict[Say, float] = {}
    for name, lever in levers.items():
        if name.startswith(MOVE):
            says[name.removeprefix(MOVE), ""] = counts * min(lever.value, limits[name])
    for target in dict.fromkeys((*weights, *brings)):
        layer = owners.get(target, target)
        if (layer, "") in says:
            says[layer, target] = counts * brings[target] if target in brings else weights[target] * says[layer, ""]
    return {say: value for say, value in says.items() if not math.isnan(value)}


def _brought_by(peers: Sequence[ClientUpdate], starts: Mapping[str, Params]) -> dict[str, dict[str, float]]:
    """How much every client brings to each part of the network of which all say how sure they are."""
    found: dict[str, dict[str, float]] = {update.client: {} for update in peers}
    # Of fewer than FEW clients a limit follows the brief alone, which knows nothing of precisions.
    if len(peers) >= FEW and starts.keys() >= found.keys():
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
    strictest: dict[str, tuple[float, Say]] = {}  # of each layer: by how much the move is to be shortened, and why
    for say, value in says.items():
        entry = (most[say] / value, say) if value > 0 else (1.0, (say[0], ""))
        strictest[say[0]] = min(strictest.get(say[0], entry), entry)
    for layer, (factor, say) in strictest.items():
        if factor < _AT_BOUND:
            words = f"at most {most[say]:.4g}, going by the round's other clients"
            what = f"say in {layer}" + (f" by {say[1]}" if say[1] else "")
            clipped.append(Refused(update.client, what, f"{says[say]:.4g}", words).facts())
            update = levers[MOVE + layer].weaken(update, factor)
    return update


# --- Moves in units of precision ---


def moves_by_precision(cohort: Cohort, origins: Sequence[Params]) -> Parts:
    """For every layer or tensor of which all clients say how sure they are, P̄⁻¹ P_k (w_k − o_k), (clients × numbers).

    P̄ is the mean of their precisions P_k. This is nearly what a product of their beliefs would lose without client k,
    whether it claims much or moves far. To every P_k a multiple of the identity as large as P̄ on average is added, so
    that no client disappears by claiming nothing; clients that are equally sure bring their moves. Of Kronecker factors
    each side is taken by itself.

    Args:
        cohort: clients of one network.
        origins: for each of them, where its move begins.
    """
    geometries, means = [update.posterior.geometry for update in cohort], [u.posterior.mean for u in cohort]
    for block in _common_blocks(cohort, geometries):
        stacks = [torch.stack([block.matrices(p).double() for p in side]) for side in (means, origins)]
        factors = [g.factors[block.name] for g in geometries if isinstance(g, Kron)]
        yield block.name, _by_factors(stacks[0] - stacks[1], factors, block.groups).flatten(1)
    for name, precision in _diagonal_precisions(cohort, geometries):
        moves = torch.stack([m[name].double() - o[name].double() for m, o in zip(means, origins, strict=True)])
        # The mean of P̄. Without it a client that claims nothing would bring nothing however far it moves; with it,
        # P_k = 0 still brings half of its move where P̄ is average.
        shift = precision.mean()
        brought = moves * (precision + shift) / (precision.mean(0) + shift) if shift > 0 else moves
        yield name, brought.reshape(len(cohort), -1)  # a weight without dimensions is a row of one number


def brought_moves(cohort: Cohort) -> Parts:
    """For every part of the network what each client brings to it, (clients × numbers), seen from the median client.

    Where clients say how sure they are it is `moves_by_precision`, elsewhere how far they stand from the median.

    Example:
        >>> from fedfuse.core.messages import ClientUpdate
        >>> from fedfuse.core.posterior import Posterior
        >>> from fedfuse.core.spec import Spec
        >>> at = [{"w": torch.tensor([m])} for m in (-1.0, 0.0, 1.0)]
        >>> sure = [Diag({"w": torch.tensor([1.0])})] * 2 + [Diag({"w": torch.tensor([0.25])})]
        >>> beliefs = [Posterior(*pair) for pair in zip(at, sure)]
        >>> told = [ClientUpdate(c, b, 1.0, 1, Spec.of_tensors(b.mean)) for c, b in zip("abc", beliefs)]
        >>> [(name, moves.flatten().tolist()) for name, moves in brought_moves(Cohort.of(told))]
        [('w', [-0.75, 0.0, 1.5])]
    """
    centre = dict[str, Tensor]()
    for name in cohort.names:  # stacked again below: all stacks at once would be as large as all updates
        if (stack := cohort.stack(name)).is_floating_point():
            centre[name] = stack.median(0).values
    blocks, done = {block.name: block.tensors for block in blocks_of(cohort.updates[0].spec)}, set[str]()
    for name, moves in moves_by_precision(cohort, [centre] * len(cohort)):
        yield name, moves
        done.update(blocks[name] if name in blocks and name not in centre else (name,))
    for name, middle in centre.items():
        if name not in done:
            yield name, (cohort.stack(name).double() - middle.double()).reshape(len(cohort), -1)


def tells_precision(geometry: Geometry, note: str) -> bool:
    """Whether a note, "kind/layer/…" or "kind/tensor", is one that the geometry was made of.

    Example:
        >>> known = Diag({"w": torch.ones(1)})
        >>> tells_precision(known, "fisher/w"), tells_precision(known, "start_loss/mean")
        (True, False)
    """
    part = [*note.split("/"), ""][1]
    known = geometry.factors if isinstance(geometry, Kron) else geometry.variance if isinstance(geometry, Diag) else ()
    return part in known


def _common_blocks(cohort: Cohort, geometries: Sequence[Geometry]) -> Iterator[Block]:
    """The parts of the network of which all clients have factors."""
    if not all(isinstance(geometry, Kron) for geometry in geometries):
        return
    for block in blocks_of(cohort.updates[0].spec):
        if all(isinstance(g, Kron) and block.name in g.factors for g in geometries):
            yield block


def _diagonal_precisions(cohort: Cohort, geometries: Sequence[Geometry]) -> Parts:
    """The precision of every tensor whose coordinates have variances of their own, sent as evidence or with weights."""
    for name in cohort.names:
        variances = [g.variance[name] for g in geometries if isinstance(g, Diag) and name in g.variance]
        if len(variances) == len(cohort):
            yield name, torch.stack([variance.double().reciprocal() for variance in variances])
    for name, log in cohort.updates[0].spec.layout.log_variances.items():
        if name in cohort.names:
            yield name, (-cohort.stack(log).double()).exp()


def _by_factors(moves: Tensor, factors: Sequence[tuple[Factor, Factor]], groups: int) -> Tensor:
    """B̄⁻¹ B_k M_k A_k Ā⁻¹ of every client's M_k, (clients × groups × out × in)."""
    inputs, outputs = ([as_stack(pair[side]) for pair in factors] for side in (0, 1))
    for group in range(groups):
        by_inputs, by_outputs = (_relative([f[group] for f in side]) for side in (inputs, outputs))
        for client, move in enumerate(moves[:, group]):
            moves[client, group] = by_outputs(client, by_inputs(client, move).mT).mT
    return moves


def _relative(factors: Sequence[Factor]) -> Callable[[int, Tensor], Tensor]:
    """X ↦ X F_k F̄⁻¹, with a client's factor over the mean of all; X itself where they say nothing."""
    whole = [written(factor) for factor in factors]
    if len({each.ndim for each in whole}) > 1:
        whole = [torch.diag(each) if each.ndim == 1 else each for each in whole]
    mean = torch.stack(whole).mean(0)
    shift = (mean if mean.ndim == 1 else mean.diagonal()).mean()  # F̄'s mean eigenvalue: see `moves_by_precision`
    if not shift > 0:
        return lambda _, moved: moved
    even = shift if mean.ndim == 1 else shift * torch.eye(len(mean), dtype=mean.dtype, device=mean.device)
    over = reciprocal(mean + even) if mean.ndim == 1 else inverse(mean + even)
    return lambda client, moved: times(times(moved, whole[client] + even), over)

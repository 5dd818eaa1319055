"""What one admitted client can do: every number of a reply that scales its influence, and the bounds on it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedfuse.core.messages import Brief, ClientUpdate, Cohort, Form
from fedfuse.core.params import Layout, Params
from fedfuse.core.posterior import Diag, Geometry, Kron
from fedfuse.core.seams import Evidence
from fedfuse.core.settings import FEW, Bounds, LocalSettings
from fedfuse.core.torch_utils import one_thread
from fedfuse.errors import Refused
from fedfuse.linalg.factor import Factor, as_stack
from fedfuse.linalg.lowrank import norm_of
from fedfuse.linalg.psd import inverse
from fedfuse.linalg.subspace import reciprocal, times, written
from fedfuse.models.adapted import Pair, pairs_in
from fedfuse.nets.kronecker import Block, blocks_of
from fedfuse.server.admission.values import lengths_of
from fedfuse.wire.codec import LazyParams, Malformed, forms_of, piece_of
from fedfuse.wire.sums import SUM, Summed, SummedParams, find_odd_mean, sum_forms

Parts = Iterator[tuple[str, Tensor]]


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
    centre = {n: cohort.stack(n).median(0).values for n in cohort.names if cohort.stack(n).is_floating_point()}
    blocks, done = {block.name: block.tensors for block in blocks_of(cohort.updates[0].spec)}, set[str]()
    for name, moves in moves_by_precision(cohort, [centre] * len(cohort)):
        yield name, moves
        done.update(blocks[name] if name in blocks and name not in centre else (name,))
    for name, middle in centre.items():
        if name not in done:
            yield name, (cohort.stack(name).double() - middle.double()).flatten(1)


def moves_by_precision(cohort: Cohort, origins: Sequence[Params]) -> Parts:
    """For every layer or tensor of which all clients say how sure they are, P̄⁻¹ P_k (w_k − o_k), (clients × numbers).

    P̄ is the mean of their precisions P_k. This is nearly what a product of their beliefs would lose without client k,
    whoever claims much or moves far. To every P_k a multiple of the identity as large as P̄ on average is added, so that
    nobody disappears by claiming nothing; clients that are equally sure bring their moves. Of Kronecker factors each
    side is taken by itself.

    Args:
        cohort: clients of one network.
        origins: for each of them, where its move begins.
    """
    geometries = [update.posterior.geometry for update in cohort]
    for block in _common_blocks(cohort, geometries):
        stacks = [torch.stack([block.matrices(p).double() for p in side]) for side in (_means(cohort), origins)]
        factors = [g.factors[block.name] for g in geometries if isinstance(g, Kron)]
        yield block.name, _by_factors(stacks[0] - stacks[1], factors, block.groups).flatten(1)
    for name, precision in _diagonal_precisions(cohort, geometries):
        moves = torch.stack([m[name].double() - o[name].double() for m, o in zip(_means(cohort), origins, strict=True)])
        shift = precision.mean()
        yield name, (moves * (precision + shift) / (precision.mean(0) + shift) if shift > 0 else moves).flatten(1)


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
    """The parts of the network of which everybody has factors."""
    if not all(isinstance(geometry, Kron) for geometry in geometries):
        return
    for block in blocks_of(cohort.updates[0].spec):
        if all(isinstance(g, Kron) and block.name in g.factors for g in geometries):
            yield block


def _means(cohort: Cohort) -> list[Params]:
    return [update.posterior.mean for update in cohort]


def _diagonal_precisions(cohort: Cohort, geometries: Sequence[Geometry]) -> Parts:
    """The precision of every tensor whose coordinates have variances of their own, told beside weights or with them."""
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
    shift = (mean if mean.ndim == 1 else mean.diagonal()).mean()
    if not shift > 0:
        return lambda _, moved: moved
    even = shift if mean.ndim == 1 else shift * torch.eye(len(mean), dtype=mean.dtype, device=mean.device)
    over = reciprocal(mean + even) if mean.ndim == 1 else inverse(mean + even)
    return lambda client, moved: times(times(moved, whole[client] + even), over)


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


_ROOM_FOR_PACE = 4.0  # a client with few rows takes few steps, and each carries it further
_ROOM_AT_START = 2.0  # a client with few rows leaves a belief about where it began
_PATIENCE_WITH_EVIDENCE = 3.0  # the curvature of networks that know their rows by heart differs by many decades
_STATISTICS = " statistics"
MOVE = "move of "

Weaken = Callable[[ClientUpdate, float], ClientUpdate]


class Lever(NamedTuple):
    """A number that scales a client's say.

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


class Lengths(NamedTuple):
    """How long tensors are, by name: the client's moves, and what it began with where that is known."""

    moves: Mapping[str, float]
    begun: Mapping[str, float]


def measure(
    update: ClientUpdate,
    brief: Brief,
    evidence: Sequence[Evidence],
    anchored: bool = True,
    lengths: Lengths | None = None,
) -> dict[str, Lever]:
    """Every lever of one client but its numbers of examples and steps, by name.

    Args:
        update: what it sent.
        brief: what it was asked, as it heard it.
        evidence: the kinds it was asked for.
        anchored: whether it began with the brief's weights, so that a move is known.
        lengths: of its tensors, where somebody has measured them.
    """
    mean, start = update.posterior.mean, brief.params if anchored else None
    stands = mean is start  # nobody trained: there is no move to measure
    if lengths is None and not stands:
        lengths = Lengths(lengths_of(mean, start), {} if start is None else lengths_of(start))
    levers = {} if lengths is None or stands else dict(_weight_levers(mean, brief, anchored, lengths))
    for kind in evidence:
        for name, value in kind.influence(update.notes).items():
            weighs = [*name.split("/"), ""][1] if kind.weighs else None
            weaken = partial(_scale_notes, kind, name)
            levers[name] = Lever(value, weaken, room=kind.room, weighs=weighs, patience=_PATIENCE_WITH_EVIDENCE)
    if anchored and not stands:
        total = math.hypot(*(lever.value for name, lever in levers.items() if name.startswith(MOVE)))
        everything = frozenset(_floating(update.posterior.mean, brief.spec.layout))
        shorten = partial(_scale_weights, everything, brief.params)
        levers["move per step"] = Lever(total / max(1, update.steps), shorten, room=_ROOM_FOR_PACE)
    return levers


def _weight_levers(mean: Params, brief: Brief, anchored: bool, lengths: Lengths) -> Iterator[tuple[str, Lever]]:
    layout, start = brief.spec.layout, brief.params if anchored else None
    for group, names in _groups(mean, layout).items():
        expected = max(_together(lengths.begun, names), 1.0) if start and not group.endswith(_STATISTICS) else 0.0
        shorten = partial(_scale_weights, frozenset(names), start)
        yield f"{MOVE if anchored else 'length of '}{group}", Lever(_together(lengths.moves, names), shorten, expected)
    for pair in pairs_in(mean):
        length = _product(mean, pair)
        yield f"product of {pair.module}", Lever(length, partial(_shorten_product, pair, length))
    means = {log: name for name, log in layout.log_variances.items()}
    for name in layout.with_role("log_variance"):
        if name in mean:
            for word, sign in (("precision", -1), ("variance", 1)):
                begun = _ROOM_AT_START * _mean_exp(sign * start[name].double()) if start else 0.0
                value = _mean_exp(sign * mean[name].double())
                weighs = means[name] if word == "precision" else None
                yield f"{word} of {name}", Lever(value, partial(_shift, name, sign), begun, begun, weighs=weighs)
    if not anchored:
        for name in layout.with_role("counter"):
            if name in mean and mean[name].numel():
                yield f"count of {name}", Lever(float(mean[name].max()), partial(_scale_weights, {name}, None))


def _product(mean: Params, pair: Pair) -> float:
    """‖B A‖ of an adapter."""
    return norm_of(*(mean[name].double().flatten(1) for name in (pair.b, pair.a)))


def _shorten_product(pair: Pair, length: float, update: ClientUpdate, factor: float) -> ClientUpdate:
    """An adapter whose product is so many times as long as it was: less where its factors have been shortened since."""
    now = _product(update.posterior.mean, pair)
    return update if now <= factor * length else _scale_weights({pair.b}, None, update, factor * length / now)


def _mean_exp(values: Tensor) -> float:
    return float(values.exp().mean()) if values.numel() else 0.0


def _floating(mean: Params, layout: Layout) -> Iterator[str]:
    """Tensors that are averaged as they are."""
    floating = (name for name, form in forms_of(mean).items() if form.dtype.is_floating_point)
    return (name for name in floating if layout.roles.get(name) != "log_variance")


def _groups(mean: Params, layout: Layout) -> dict[str, list[str]]:
    """Floating tensors by the layer they belong to; running statistics, which have another scale, beside them."""
    owners, groups = owners_of(layout), dict[str, list[str]]()
    for name in _floating(mean, layout):
        owner = owners.get(name, name) + (_STATISTICS if layout.roles.get(name) == "statistic" else "")
        groups.setdefault(owner, []).append(name)
    return groups


def owners_of(layout: Layout) -> dict[str, str]:
    """The layer that each tensor belongs to."""
    parts = {layer.name: (layer.weight, layer.bias, *layer.followers, *layer.log_variances) for layer in layout.layers}
    return {name: layer for layer, names in parts.items() for name in names if name is not None}


def _together(lengths: Mapping[str, float], names: Sequence[str]) -> float:
    """The length of some tensors as one vector; infinite where it overflows."""
    return math.hypot(*(lengths[name] for name in names))


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

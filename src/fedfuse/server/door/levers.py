"""Levers: every number of a reply that scales its sender's say, and how to weaken it.

| lever | where it acts |
|---|---|
| the move of a layer, and of its running statistics | every mean of weights; without a start, the layer's own length |
| the product of a low-rank adapter's factors, each of which is a layer of its own | means of adapters |
| the move per step | FedNova, SCAFFOLD |
| mean variance and mean precision of Bayesian layers | barycenters and products of posteriors |
| what each kind of evidence names by `influence` | whatever reads that evidence |
| a counter, where no start says what it was | the next round's counters |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from fedfuse.core.messages import Brief, ClientUpdate
from fedfuse.core.params import Layout, Params
from fedfuse.core.seams import Evidence
from fedfuse.linalg.lowrank import norm_of
from fedfuse.nets.adapters import Pair, pairs_in
from fedfuse.server.door.values import lengths_of
from fedfuse.wire.codec import LazyParams, forms_of, piece_of

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

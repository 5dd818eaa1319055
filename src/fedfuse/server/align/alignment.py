"""Units to common places, before anything is compared or fused.

`AlignUnits` puts hidden units in order by one of the `ALIGNMENTS`; for transformers it can first turn residual streams
onto the reference's (`turn_onto`), whose positions have no order of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, TypeAlias

import torch
from torch import Tensor

from fedfuse.core.inputs import shape_read
from fedfuse.core.messages import ClientUpdate, Cohort
from fedfuse.core.params import Params
from fedfuse.core.posterior import Flat, Posterior
from fedfuse.core.spec import drop_tied_names
from fedfuse.core.state import Bench
from fedfuse.errors import ConfigError
from fedfuse.nets.channels import Location
from fedfuse.nets.streams import Stream, find_streams, nearest_turn, turn_stream
from fedfuse.server.aggregate.mean import mean_of
from fedfuse.server.align.activations import ByActivations, cross_moments, probes
from fedfuse.server.align.graph import ByGraph
from fedfuse.server.align.nets import Moves, Net, check_alike, move_update
from fedfuse.server.align.transport import ByTransport
from fedfuse.server.align.weights import ByWeights
from fedfuse.server.inputs import input_form

Reference = Literal["first", "largest", "mean"]
TurnedBy = Literal["weights", "activations"]
_PROBES = 256  # inputs on which streams are compared
_MAX_MEANS = 10  # how often a mean is found again at most; clients seldom move after the third


class Matching(Protocol):
    """A rule that matches the units of several networks with those of a reference."""

    @property
    def any_width(self) -> bool:
        """Whether networks may differ in width."""
        ...

    @property
    def laws(self) -> frozenset[str]:
        """The laws of the common suite that still hold behind it."""
        ...

    def __call__(self, nets: Sequence[Net], reference: Net, bench: Bench) -> Sequence[Moves]:
        """For every network, what becomes of the units of each group."""
        ...


ALIGNMENTS: Mapping[str, type[Matching]] = {
    "weights": ByWeights,
    "activations": ByActivations,
    "transport": ByTransport,
    "graph": ByGraph,
}


@dataclass(frozen=True, slots=True)
class AlignUnits:
    """Reorder every client's units as the reference has them, with everything that belongs to a unit.

    Weights, running statistics, log-variances, variances, Kronecker factors and evidence of a tensor's own shape move
    together, so "aligned FedLPA" is one recipe. A network and any permuted copy of it fuse to the network.

    Attributes:
        by: how units are matched.
        reference: whose places: those of the "first" client, of the "largest" (most units, then most examples), or
            of the "mean" of the aligned clients, found again until none moves.
        stream: whether residual streams of transformers are also turned onto the reference's, by orthogonal maps. By
            "weights": first by what tokens, pixels and outputs tell, and by all weights once units are in order. By
            "activations": by what layers add to the stream on the server's rows, or on noise without any.

    Example:
        >>> AlignUnits(ByWeights()).reference
        'first'
    """

    by: Matching
    reference: Reference = "first"
    stream: TurnedBy | None = None

    @property
    def needs(self) -> frozenset[str]:
        """What finding the places needs, and networks that can be followed from unit to unit."""
        own: frozenset[str] = getattr(self.by, "needs", frozenset())
        return own | {"network"}

    @property
    def laws(self) -> frozenset[str]:
        """What still holds when units have moved."""
        return self.by.laws

    @property
    def mixes_networks(self) -> bool:
        """Whether clients may have networks of different widths."""
        return self.by.any_width

    def __call__(self, cohort: Cohort, bench: Bench) -> tuple[Cohort, Mapping[str, Any]]:
        """The cohort at common places; the facts hold how much each client moved."""
        shape = input_form(bench, cohort.updates[0].spec).shape
        nets = [Net.of(update, shape) for update in cohort]
        check_alike(nets, self.by.any_width and not self.stream)
        if self.stream == "weights":
            cohort, nets = self._turn(cohort, nets, shape, lambda net, _: gain_of_weights(net, anchored=True))
        elif self.stream == "activations":
            x = probes(nets[0], bench, "auto", _PROBES)
            cohort, nets = self._turn(cohort, nets, shape, lambda net, onto: gain_of_activations(net, onto, x))
        aligned, moves = self.align(cohort, nets, bench)
        if self.stream == "weights":
            again = [Net.of(update, shape) for update in aligned]
            aligned, _ = self._turn(aligned, again, shape, lambda net, _: gain_of_weights(net, anchored=False))
        facts: dict[str, Any] = {"aligned": repr(self.by), "moved": _moved_shares(cohort, nets, moves)}
        # what no group holds, with its reason, and groups that could not be compared
        uncompared = {
            g.name for net, move in zip(nets, moves, strict=True) if move for g in net.groups if g.name not in move
        }
        if left_out := [*nets[0].left_out, *(f"{name} (nothing to compare)" for name in sorted(uncompared))]:
            facts["not_aligned"] = left_out
        return aligned, facts

    def _turn(
        self, cohort: Cohort, nets: Sequence[Net], shape: tuple[int, ...], gain: Callable[[Net, Net], Gain]
    ) -> tuple[Cohort, list[Net]]:
        """The cohort with its streams turned onto those of the reference, which stays as it is."""
        first = self._first_reference(cohort, nets)
        streams = streams_of(nets[first], shape_read(nets[first].spec, shape))
        updates = [
            update if i == first else turn_onto(update, net, nets[first], streams, gain(net, nets[first]))
            for i, (update, net) in enumerate(zip(cohort, nets, strict=True))
        ]
        turned = Cohort(tuple(updates))
        return turned, [replace(n, params=u.posterior.mean) for n, u in zip(nets, turned, strict=True)]

    def align(self, cohort: Cohort, nets: Sequence[Net], bench: Bench) -> tuple[Cohort, Sequence[Moves]]:
        """The cohort with its units at common places, and the moves that brought them there."""
        first = self._first_reference(cohort, nets)
        others = [i for i in range(len(nets)) if i != first]
        aligned, moves = self._align_onto(cohort, nets, nets[first], others, bench)
        for _ in range(_MAX_MEANS if self.reference == "mean" and others else 0):
            mean_net = replace(nets[first], client="the mean", params=mean_of(aligned))
            aligned, again = self._align_onto(cohort, nets, mean_net, range(len(nets)), bench)
            # moves, not means: a mean changes in its last bits as long as any client is added in another order
            if all(_same_moves(a, b) for a, b in zip(moves, again, strict=True)):
                break
            moves = again
        return aligned, moves

    def _first_reference(self, cohort: Cohort, nets: Sequence[Net]) -> int:
        """The client whose places are taken, at least to begin with."""
        if self.reference == "first":
            return 0
        return max(range(len(nets)), key=lambda i: (sum(nets[i].widths), cohort.updates[i].num_examples, -i))

    def _align_onto(
        self, cohort: Cohort, nets: Sequence[Net], reference: Net, who: Sequence[int], bench: Bench
    ) -> tuple[Cohort, list[Moves]]:
        """Some networks moved onto a reference; the others stay as they are."""
        found = self.by([nets[i] for i in who], reference, bench) if who else []
        moves: list[Moves] = [{} for _ in nets]
        for i, move in zip(who, found, strict=True):
            moves[i] = move
        updates = [
            move_update(update, net.groups, move, reference.spec) if move else update
            for update, net, move in zip(cohort, nets, moves, strict=True)
        ]
        return Cohort(tuple(updates)), moves


def _same_moves(a: Moves, b: Moves) -> bool:
    """Whether two results move every unit to the same place; an empty one moves none."""

    def stays(move: object) -> bool:
        return isinstance(move, Tensor) and move.equal(torch.arange(len(move)))

    def one(x: object, y: object) -> bool:
        if x is None or y is None:
            return stays(x if y is None else y)
        return isinstance(x, Tensor) and isinstance(y, Tensor) and x.equal(y)

    return all(one(a.get(name), b.get(name)) for name in a.keys() | b.keys())


def _moved_shares(cohort: Cohort, nets: Sequence[Net], moves: Sequence[Moves]) -> dict[str, dict[str, float]]:
    """By layer and client, the share of units that did not stay where they were."""
    shares: dict[str, dict[str, float]] = {group.name: {} for group in nets[0].groups}
    for client, net, move in zip(cohort.clients, nets, moves, strict=True):
        for group in net.groups:
            order = move.get(group.name)
            if order is None:
                shares[group.name][client] = 0.0
            elif isinstance(order, Tensor):
                shares[group.name][client] = float((order != torch.arange(len(order))).double().mean())
            else:
                shares[group.name][client] = 1.0 - float(order.make.diagonal().double().mean())
    return shares


# How well each position of the reference's stream goes with each of a network's, given both networks' weights.
Gain: TypeAlias = Callable[[Stream, Params, Params], Tensor]


def streams_of(net: Net, shape: Sequence[int]) -> tuple[Stream, ...]:
    """The streams of a network that may be turned.

    Raises:
        ConfigError: if it has none, with the reason.
    """
    streams, refused = find_streams(net.spec, tuple(shape))
    if streams:
        return streams
    why = "; ".join(refused) or "no norm stands between a stream and its readers"
    raise ConfigError(
        f"model {net.spec.factory!r} has no stream that may be turned: {why}; align without stream, by which the "
        "positions of a stream still trade places"
    )


def turn_onto(update: ClientUpdate, net: Net, reference: Net, streams: Sequence[Stream], gain: Gain) -> ClientUpdate:
    """An update whose streams are turned as the reference has them.

    Q is the orthogonal map nearest to M = Σ_t Y_t(reference) Y_t(network)ᵀ: Procrustes' problem,
    min Σ_t ‖Y_t(reference) − Q Y_t(network)‖², where the rows of Y_t are what is known of each position.

    Args:
        update: whose weights are turned; scales and shifts of norms become the reference's.
        net: its network.
        reference: the network it is turned onto.
        streams: of both.
        gain: what finds M, by weights or by activations.

    Raises:
        ConfigError: for an update with evidence, which is about weights that are not turned.
    """
    if update.notes or not isinstance(update.posterior.geometry, Flat):
        raise ConfigError(
            f"{update.client} brings evidence about its weights, which does not turn with them; fuse by a method that "
            "reads weights alone, or align without stream"
        )
    params, target = (drop_tied_names(net.spec, one.params) for one in (net, reference))
    for stream in streams:
        for norm in stream.norms:
            if not bool((target[norm.scale] != 0).all()):
                raise ConfigError(
                    f"{reference.client}: {norm.scale!r} has a zero, so nobody can be given its scales; "
                    "align without stream"
                )
        params = turn_stream(params, target, stream, nearest_turn(gain(stream, target, params), stream.keeps_mean))
    for same in net.spec.layout.tied:  # all names of a tied tensor again
        have = next(name for name in same if name in params)
        params = {**params, **dict.fromkeys(same, params[have])}
    return replace(update, posterior=Posterior({**net.params, **params}))


def gain_of_weights(net: Net, anchored: bool) -> Gain:
    """M of what tensors make or read of each position.

    Args:
        net: the network that is turned.
        anchored: look at tensors alone whose other axes hold no hidden units, so that the order of those does not
            matter; all tensors if there are none.
    """

    def gain(stream: Stream, target: Params, params: Params) -> Tensor:
        places = _anchored_places(stream, net) if anchored else list(stream.group.locations)
        return sum(
            (stream.rows(target, place) @ stream.rows(params, place).mT for place in places),
            start=torch.zeros(stream.group.size, stream.group.size, dtype=torch.float64),
        )

    return gain


def gain_of_activations(net: Net, reference: Net, x: Tensor) -> Gain:
    """M of what layers add to the stream on the same inputs; in which order hidden units stand does not matter.

    Args:
        net: the network that is turned.
        reference: the network it is turned onto.
        x: the inputs.
    """
    moments = cross_moments(reference, net, x)

    def gain(stream: Stream, target: Params, params: Params) -> Tensor:  # noqa: ARG001 - the seam's signature
        found = moments[stream.group.name]
        if not found.count:
            raise ConfigError(
                f"{net.client}: no linear layer adds to the stream {stream.group.name!r}, so there are no activations "
                "to compare; turn it by weights"
            )
        return found.ab

    return gain


def _anchored_places(stream: Stream, net: Net) -> list[Location]:
    """Where the stream meets tokens, pixels or outputs, which stand where they stand in every network."""
    others = {p.tensor for g in net.groups if g.name != stream.group.name for p in g.locations}
    found = [place for place in stream.group.locations if place.tensor not in others]
    return found or list(stream.group.locations)

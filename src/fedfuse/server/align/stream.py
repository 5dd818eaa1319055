"""Residual streams turned onto a reference's by orthogonal maps, before units are compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

import torch
from torch import Tensor

from fedfuse.core.messages import ClientUpdate
from fedfuse.core.params import Params
from fedfuse.core.posterior import Flat, Posterior
from fedfuse.core.spec import drop_tied_names
from fedfuse.errors import ConfigError
from fedfuse.nets.channels import Location
from fedfuse.nets.streams import Stream, find_streams, nearest_turn, turn_stream
from fedfuse.server.align.activations import cross_moments
from fedfuse.server.align.nets import Net


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


Gain: TypeAlias = Callable[[Stream, Params, Params], Tensor]
"""How well each position of the reference's stream goes with each of a network's, given both networks' weights."""


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
        _check_scales(stream, target, reference.client)
        params = turn_stream(params, target, stream, nearest_turn(gain(stream, target, params), stream.keeps_mean))
    return replace(update, posterior=Posterior({**net.params, **_with_tied(params, net)}))


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


def _with_tied(params: Params, net: Net) -> dict[str, Tensor]:
    """All names of tied tensors again."""
    again = dict(params)
    for same in net.spec.layout.tied:
        have = next(name for name in same if name in params)
        again |= dict.fromkeys(same, params[have])
    return again


def _check_scales(stream: Stream, target: Params, client: str) -> None:
    for norm in stream.norms:
        if not bool((target[norm.scale] != 0).all()):
            raise ConfigError(
                f"{client}: {norm.scale!r} has a zero, so nobody can be given its scales; align without stream"
            )


def _anchored_places(stream: Stream, net: Net) -> list[Location]:
    """Where the stream meets tokens, pixels or outputs, which stand where they stand in every network."""
    others = {p.tensor for g in net.groups if g.name != stream.group.name for p in g.locations}
    found = [place for place in stream.group.locations if place.tensor not in others]
    return found or list(stream.group.locations)
